"""The dialects for /v1/completions. Any OpenAI-compatible server streams text, which is enough to
measure times. vLLM also sends token ids, and reports on speculation either with each answer or in
its counters."""

from collections.abc import Mapping
from typing import Any

from specdec_cli.backends.server.dialects import (
    Broken,
    Details,
    Kind,
    Reading,
    ServerFacts,
    common_body,
    listed,
    refuse_error,
    seed_of,
    words_of,
)
from specdec_cli.core.types import Request, SamplingParams

COMPLETIONS = "/v1/completions"


class OpenAI:
    kind: Kind = "openai"
    counts = False

    def body(
        self, facts: ServerFacts, request: Request, params: SamplingParams, salt: str
    ) -> tuple[str, dict[str, Any]]:
        return COMPLETIONS, completion(facts, request, params) | {
            "temperature": params.temperature,
            "top_p": params.top_p,
        }

    def read(self, facts: ServerFacts, event: Mapping[str, Any], reading: Reading) -> None:
        read_completion(event, reading)


def completion(facts: ServerFacts, request: Request, params: SamplingParams) -> dict[str, Any]:
    """Return the request fields that every OpenAI-compatible server knows."""
    found: dict[str, Any] = {
        "model": facts.model,
        "prompt": list(request.token_ids),
        "max_tokens": params.max_new_tokens,
        "seed": seed_of(request, params),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return found | ({"stop": list(params.stop)} if params.stop else {})


def read_completion(event: Mapping[str, Any], reading: Reading) -> Mapping[str, Any]:
    """Add one event of a completion to `reading`. Returns the event's first choice; {} if it has
    none. Raises `Broken` if the event reports a failure."""
    refuse_error(event)
    if isinstance(usage := event.get("usage"), Mapping):
        reading.usage = usage.get("completion_tokens")
        reading.num_prompt_tokens = usage.get("prompt_tokens")
        details = usage.get("prompt_tokens_details")
        reading.cached_tokens = (details or {}).get("cached_tokens") or 0
    choices = event.get("choices") or []
    if not choices:
        return {}
    choice: Mapping[str, Any] = choices[0]
    reading.text += choice.get("text") or ""
    match choice.get("finish_reason"):
        case None:
            pass
        case "abort" | "error" as end:
            told = words_of(choice.get("stop_reason") or end)
            raise Broken(f"the server aborted the request: {told}")
        case "length":
            reading.finish_reason = "length"
        case _:
            is_text = isinstance(choice.get("stop_reason"), str)
            reading.finish_reason = "stop" if is_text else "eos"
    return choice


class Vllm:
    kind: Kind = "vllm"
    counts = True

    def body(
        self, facts: ServerFacts, request: Request, params: SamplingParams, salt: str
    ) -> tuple[str, dict[str, Any]]:
        own = {"return_token_ids": True, "cache_salt": salt, "min_tokens": params.min_new_tokens}
        sampling = common_body(params, off=0)
        return COMPLETIONS, completion(facts, request, params) | sampling | own

    def read(self, facts: ServerFacts, event: Mapping[str, Any], reading: Reading) -> None:
        choice = read_completion(event, reading)
        reading.token_ids += choice.get("token_ids") or []
        if choice.get("prompt_token_ids") is not None:  # in the first chunk only
            reading.prompt_token_ids = list(choice["prompt_token_ids"])
        found = (event.get("metrics") or {}).get("speculative_decoding")
        if isinstance(found, Mapping):
            reading.details = _details(found)


def _details(found: Mapping[str, Any]) -> Details:
    accepted, proposed = found.get("per_step_accepted"), found.get("per_step_drafted")
    return Details(
        num_rounds=found.get("num_spec_steps", -1),
        num_accepted=found.get("num_accepted_draft_tokens", -1),
        num_proposed=found.get("num_draft_tokens"),
        histogram=listed(found.get("acceptance_histogram")),
        accepted=None if accepted is None else listed(accepted),
        proposed=None if proposed is None else listed(proposed),
    )
