"""Times a recipe's models in transformers: generate, and assisted generation with a draft model.

    python scripts/peers/run_transformers.py bench-8b-1b-dummy --k 5

transformers assists a batch of one only, and has no acceptance at fixed rates: with dummy weights
nearly every proposal is rejected, so compare milliseconds a round.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
import work
from transformers import AutoConfig, AutoModelForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def model(name: str, what: work.Work) -> Any:
    if not what.is_dummy:
        return AutoModelForCausalLM.from_pretrained(name, dtype=what.dtype).to(DEVICE).eval()
    dtype = getattr(torch, what.dtype)
    with torch.device(DEVICE):
        return AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(name), dtype=dtype
        ).eval()


def padded(
    ids: list[list[int]], length: int, row: Callable[[list[int]], list[int]]
) -> torch.Tensor:
    """int64 [B, length]: a row for each prompt, with zeros before it."""
    rows = [[0] * (length - len(prompt)) + row(prompt) for prompt in ids]
    return torch.tensor(rows, device=DEVICE)


def start(what: work.Work, batch: int, longest: int) -> work.Started:
    if what.k and (what.method != "draft_model" or (batch > 1 and not what.is_counted)):
        raise SystemExit("transformers assists one prompt at a time, with a draft model")
    target = model(what.target, what)
    keys: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    passes = [0]
    target.register_forward_hook(lambda *_: passes.__setitem__(0, passes[0] + 1))
    if what.draft is not None:
        draft = model(what.draft, what)
        draft.generation_config.num_assistant_tokens = what.k
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        keys["assistant_model"] = draft

    def decode(ids: list[list[int]], new: int) -> work.Decoded:
        least = new if what.ignore_eos else 0
        passes[0] = 0
        began = time.perf_counter()
        longest = max(map(len, ids))
        out = target.generate(
            padded(ids, longest, lambda prompt: prompt),
            attention_mask=padded(ids, longest, lambda prompt: [1] * len(prompt)),
            min_new_tokens=least,
            max_new_tokens=new,
            **keys,
        )
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        # The first pass reads the prompt and checks the proposals after it.
        rounds = passes[0] if what.k else 0
        return work.Decoded(seconds, out[:, longest:].tolist(), rounds, apart=0)

    def count(ids: list[list[int]], new: int) -> list[work.Counted]:
        def rest(longer: list[list[int]]) -> list[work.Counted]:
            each = [decode([prompt], new - 1) for prompt in longer]
            return [work.Counted(got.token_ids[0], got.rounds) for got in each]

        first = [decode([prompt], 1).token_ids[0][0] for prompt in ids]
        return work.behind_first(ids, first, what, rest)

    return work.Started(decode, count)


if __name__ == "__main__":
    work.main("transformers", start)
