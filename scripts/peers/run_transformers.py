"""Times a recipe's models in transformers: generate, and assisted generation with a draft model.

    python scripts/peers/run_transformers.py bench-8b-1b-dummy --k 5

transformers assists a batch of one only, and has no acceptance at fixed rates: with dummy weights
nearly every proposal of a draft falls, so compare milliseconds a round.
"""

import time
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


def start(what: work.Work, batch: int, longest: int) -> work.Decode:
    if what.k and (what.method != "draft_model" or batch > 1):
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
        out = target.generate(
            torch.tensor(ids, device=DEVICE), min_new_tokens=least, max_new_tokens=new, **keys
        )
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        texts = out[:, len(ids[0]) :].tolist()
        rounds = passes[0] - 1 if what.k else 0
        return work.Decoded(seconds, texts, rounds, max(0, len(texts[0]) - 1 - rounds))

    return decode


if __name__ == "__main__":
    work.main("transformers", start)
