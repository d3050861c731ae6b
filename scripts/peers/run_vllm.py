"""Times a recipe's models in vLLM: plain decoding, and drafts or heads at fixed acceptance.

    python scripts/peers/run_vllm.py bench-8b-eagle3-dummy --k 5 --batch-size 1,8,32

Times use vLLM's own counters, over the whole engine. vLLM proposes k tokens up to the very end of a
text, past the text's limit, and counts them. --count uses the tokens that each step wrote instead.
"""

import os
import time
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
# Attention in fp32 would use tf32. Three tf32 products are as exact, and compile in seconds.
os.environ.setdefault("TRITON_F32_DEFAULT", "tf32x3")

import work

CACHE_BYTES = 4 << 30  # beside neighbours


def start(what: work.Work, batch: int, longest: int) -> work.Started:
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    speculation: dict[str, Any] | None = None
    if what.k:
        speculation = {"method": what.method, "num_speculative_tokens": what.k}
        if what.draft is not None:
            speculation["model"] = what.draft
            if what.draft_weights == "fp8":
                speculation["quantization"] = "fp8"
        if what.rates:
            speculation["rejection_sample_method"] = "synthetic"
            speculation["synthetic_acceptance_rates"] = what.rates
    keys: dict[str, Any] = {}
    if what.dtype == "float32":
        keys["attention_config"] = {"backend": "TRITON_ATTN"}  # other backends lack fp32
    if what.is_counted:
        keys["enforce_eager"] = True  # graphs and compilation take longer than these few rounds
    keys["gpu_memory_utilization"] = 0.7
    if what.has_neighbours:
        keys |= {"kv_cache_memory_bytes": CACHE_BYTES, "gpu_memory_utilization": 0.02}
    if what.target_weights == "fp8":
        keys["quantization"] = "fp8"
    llm = LLM(
        model=what.target,
        skip_tokenizer_init=True,
        load_format="dummy" if what.is_dummy else "auto",
        dtype=what.dtype,
        tensor_parallel_size=what.tensor_parallel_size,
        max_model_len=max(2048, longest),
        max_num_seqs=max(64, batch),
        speculative_config=speculation,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
        **keys,
    )

    def params(new: int, **more: Any) -> Any:
        ends = [] if what.ignore_eos else list(what.eos_ids)
        return SamplingParams(
            temperature=0.0,
            max_tokens=new,
            ignore_eos=what.ignore_eos,
            stop_token_ids=ends,
            detokenize=False,
            **more,
        )

    def decode(ids: list[list[int]], new: int) -> work.Decoded:
        rounds = drafts(llm)
        began = time.perf_counter()
        asked = [{"prompt_token_ids": p} for p in ids]
        outs = llm.generate(asked, params(new), use_tqdm=False)
        seconds = time.perf_counter() - began
        texts = [list(out.outputs[0].token_ids) for out in outs]
        return work.Decoded(seconds, texts, drafts(llm) - rounds)

    def count(ids: list[list[int]], new: int) -> list[work.Counted]:
        engine = llm.llm_engine
        each = params(new, output_kind=RequestOutputKind.DELTA)
        for i, prompt in enumerate(ids):
            engine.add_request(str(i), {"prompt_token_ids": prompt}, each)
        steps: list[list[list[int]]] = [[] for _ in ids]
        while engine.has_unfinished_requests():
            for out in engine.step():
                if tokens := list(out.outputs[0].token_ids):
                    steps[int(out.request_id)].append(tokens)
        return [counted(tokens) for tokens in steps]

    return work.Started(decode, count)


def counted(steps: list[list[int]]) -> work.Counted:
    """A prompt's rounds, from the tokens of each step. The first step is prefill."""
    assert len(steps[0]) == 1, "prefill wrote more than one token"
    text = [token for tokens in steps for token in tokens]
    return work.Counted(text, len(steps) - 1, written=[len(tokens) for tokens in steps[1:]])


def drafts(llm: Any) -> int:
    """Rounds with proposals since the engine began."""
    found = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    return int(found.get("vllm:spec_decode_num_drafts", 0))


if __name__ == "__main__":
    work.main("vllm", start)
