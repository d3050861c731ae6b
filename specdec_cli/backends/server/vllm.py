"""vLLM's dialect: completions with token ids, and counters or details of rounds."""

from collections.abc import Mapping
from typing import Any

from specdec_cli.backends.server.dialects import Details, Kind, Reading, ServerFacts, common_body
from specdec_cli.backends.server.openai import COMPLETIONS, completion, read_completion
from specdec_cli.core.types import Request, SamplingParams


class Vllm:
    kind: Kind = "vllm"
    counts = True

    def body(
        self, facts: ServerFacts, request: Request, params: SamplingParams, salt: str
    ) -> tuple[str, dict[str, Any]]:
        own = {"return_token_ids": True, "cache_salt": salt, "min_tokens": params.min_new_tokens}
        sampling = common_body(request, params, off=0)
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
        histogram=tuple(found.get("acceptance_histogram") or ()),
        accepted=None if accepted is None else tuple(accepted),
        proposed=None if proposed is None else tuple(proposed),
    )
