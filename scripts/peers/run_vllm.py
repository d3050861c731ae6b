"""Times a recipe's models in vLLM: plain decoding, and drafts or heads at fixed acceptance.

    python scripts/peers/run_vllm.py bench-8b-eagle3-dummy --k 5 --batch-size 1,8,32

vLLM counts proposals and accepted tokens over the whole engine. It proposes k tokens to the very
end of a text, beyond what may be written, and counts them.
"""

import os
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import work
from vllm import LLM, SamplingParams


def start(what: work.Work, batch: int, longest: int) -> work.Decode:
    speculation: dict[str, Any] | None = None
    if what.k:
        speculation = {"method": what.method, "num_speculative_tokens": what.k}
        if what.draft is not None:
            speculation["model"] = what.draft
        if what.rates:
            speculation["rejection_sample_method"] = "synthetic"
            speculation["synthetic_acceptance_rates"] = what.rates
    llm = LLM(
        model=what.target,
        skip_tokenizer_init=True,
        load_format="dummy" if what.is_dummy else "auto",
        dtype=what.dtype,
        max_model_len=max(2048, longest),
        max_num_seqs=max(64, batch),
        gpu_memory_utilization=0.7,
        speculative_config=speculation,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
    )

    def decode(ids: list[list[int]], new: int) -> work.Decoded:
        params = SamplingParams(
            temperature=0.0, max_tokens=new, ignore_eos=what.ignore_eos, detokenize=False
        )
        rounds, accepted = counted(llm)
        began = time.perf_counter()
        outs = llm.generate([{"prompt_token_ids": p} for p in ids], params, use_tqdm=False)
        seconds = time.perf_counter() - began
        now = counted(llm)
        texts = [list(out.outputs[0].token_ids) for out in outs]
        return work.Decoded(seconds, texts, now[0] - rounds, now[1] - accepted)

    return decode


def counted(llm: Any) -> tuple[int, int]:
    """Rounds and accepted tokens since the engine began."""
    found = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    names = "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens"
    rounds, accepted = (int(found.get(name, 0)) for name in names)
    return rounds, accepted


if __name__ == "__main__":
    work.main("vllm", start)
