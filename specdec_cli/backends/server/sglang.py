"""The dialect for SGLang's /generate. Each event holds the whole text so far, unless the server is
set to send only new tokens. The last event also has the counts of the request's rounds."""

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


class Sglang:
    kind: Kind = "sglang"
    counts = False

    def body(
        self, facts: ServerFacts, request: Request, params: SamplingParams, salt: str
    ) -> tuple[str, dict[str, Any]]:
        sampling = common_body(params, off=-1)
        return "/generate", {
            "input_ids": list(request.token_ids),
            "sampling_params": sampling
            | {
                "max_new_tokens": params.max_new_tokens,
                "min_new_tokens": params.min_new_tokens,
                "sampling_seed": seed_of(request, params),
            },
            "extra_key": salt,
            "stream": True,
        }

    def read(self, facts: ServerFacts, event: Mapping[str, Any], reading: Reading) -> None:
        refuse_error(event)
        ids, meta = list(event.get("output_ids") or ()), event.get("meta_info") or {}
        if facts.incremental:
            reading.token_ids += ids
            reading.text += event.get("text") or ""
        elif ids[: len(reading.token_ids)] == reading.token_ids:
            reading.token_ids, reading.text = ids, event.get("text") or ""
        else:
            raise Broken("the server changed tokens that it had sent")
        reading.usage = meta.get("completion_tokens")
        reading.num_prompt_tokens = meta.get("prompt_tokens")
        reading.cached_tokens = meta.get("cached_tokens") or 0
        if meta.get("spec_verify_ct") is not None:
            reading.details = _details(meta, facts)
        end = meta.get("finish_reason")
        if end is None:
            return
        if end.get("type") == "abort":
            raise Broken(f"the server aborted the request: {words_of(end)}")
        is_text = isinstance(end.get("matched"), str)
        is_length = end.get("type") == "length"
        reading.finish_reason = "length" if is_length else "stop" if is_text else "eos"


def _details(meta: Mapping[str, Any], facts: ServerFacts) -> Details:
    """Read the counts of rounds from the event's meta_info.

    `spec_accept_length` is not used, since it also counts the token that prefill generates. The
    number of proposals is not used for trees, since it counts every branch.
    """
    return Details(
        num_rounds=meta["spec_verify_ct"],
        num_accepted=meta.get("spec_num_correct_drafts", -1),
        num_proposed=None if facts.is_tree else meta.get("spec_num_proposed_drafts"),
        histogram=listed(meta.get("spec_correct_drafts_histogram")),
    )
