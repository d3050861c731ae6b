"""Times a recipe's models in SGLang: plain decoding, and drafts or heads at simulated acceptance.

    python scripts/peers/run_sglang.py bench-8b-eagle3-dummy --k 5 --batch-size 1,8,32

SGLang's simulated acceptance draws one length for the whole batch each round, which is the mean
rounded down or up, and writes the same token everywhere. So batches have no ragged ends, and a
target with experts reads few of them. With real weights its acceptance is real. Its kernels for
norms, activations and rotary embeddings have no fp32 form: --dtype float32 takes its own PyTorch
code for them.
"""

import atexit
import os
import time
from typing import Any

# Attention in fp32 would use tf32. Three tf32 products are as exact, and compile in seconds.
os.environ.setdefault("TRITON_F32_DEFAULT", "tf32x3")

import work

STEPS = {"eagle3": "EAGLE3", "draft_model": "STANDALONE", "mtp": "NEXTN"}  # a step a proposal
ALGORITHMS = STEPS | {"ngram": "NGRAM", "dflash": "DFLASH", "dspark": "DSPARK"}
IN_PYTORCH = "SPECDEC_PEERS_IN_PYTORCH"


def start(what: work.Work, batch: int, longest: int) -> work.Started:
    if what.rates:  # read when sglang is imported, in each of its processes
        os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(what.tokens_a_round)
        os.environ.setdefault("SGLANG_SIMULATE_ACC_METHOD", "match-expected")
    if what.dtype == "float32":
        os.environ[IN_PYTORCH] = "1"  # its processes import this file anew
    import sglang

    keys: dict[str, Any] = {
        "model_path": what.target,
        "skip_tokenizer_init": True,
        "load_format": "dummy" if what.is_dummy else "auto",
        "dtype": what.dtype,
        "tp_size": what.tensor_parallel_size,
        "context_length": max(2048, longest),
        "max_running_requests": max(64, batch),
        "mem_fraction_static": 0.7,
        "disable_radix_cache": True,
        "random_seed": 0,
        "log_level": "warning",
        "attention_backend": "triton" if what.dtype == "float32" else "fa3",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
    }
    if what.is_counted:
        keys["disable_cuda_graph"] = True  # their capture takes longer than these few rounds
    else:
        keys["cuda_graph_bs_decode"] = sorted({1, 2, 4, 8, 16, 32, batch})
    if what.has_neighbours:
        # The fraction is that of the free memory at the start, which neighbours may take at the
        # same time.
        keys |= {"mem_fraction_static": 0.9, "max_total_tokens": batch * longest}
    if what.k:
        keys |= {
            "speculative_algorithm": ALGORITHMS[what.method],
            "speculative_num_draft_tokens": what.k + 1,
        }
    if what.k and what.method in STEPS:
        keys |= {"speculative_num_steps": what.k, "speculative_eagle_topk": 1}
    if what.k and what.method == "dspark":
        keys["speculative_dspark_block_size"] = what.k
    if what.target_weights == "fp8":
        keys["quantization"] = "fp8"
    if what.k and what.draft is not None:
        keys["speculative_draft_model_path"] = what.draft
        if "fp8" in (what.target_weights, what.draft_weights):  # by itself it takes the target's
            form = "fp8" if what.draft_weights == "fp8" else "unquant"
            keys["speculative_draft_model_quantization"] = form
    served = sglang.Engine(**keys)
    atexit.register(served.shutdown)

    def run(ids: list[list[int]], new: int) -> tuple[float, list[Any]]:
        params = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": what.ignore_eos}
        if not what.ignore_eos:
            params["stop_token_ids"] = list(what.eos_ids)
        began = time.perf_counter()
        outs = served.generate(input_ids=ids, sampling_params=params)
        return time.perf_counter() - began, outs

    def decode(ids: list[list[int]], new: int) -> work.Decoded:
        seconds, outs = run(ids, new)
        rounds = sum(out["meta_info"].get("spec_verify_ct", 0) for out in outs)
        return work.Decoded(seconds, [out["output_ids"] for out in outs], rounds)

    def count(ids: list[list[int]], new: int) -> list[work.Counted]:
        return [counted(list(out["output_ids"]), out["meta_info"]) for out in run(ids, new)[1]]

    def stop() -> None:
        atexit.unregister(served.shutdown)
        served.shutdown()

    return work.Started(decode, count, stop)


def counted(text: list[int], told: dict[str, Any]) -> work.Counted:
    """A prompt's rounds, as the engine reports them; none if prefill's token ended the text."""
    rounds = told.get("spec_verify_ct", 0)
    return work.Counted(text, rounds, histogram=told.get("spec_correct_drafts_histogram", []))


def use_pytorch() -> None:
    """Make SGLang's layers use their PyTorch code instead of their kernels."""
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    for layer in (SiluAndMul, RMSNorm, RotaryEmbedding):
        layer.forward_cuda = layer.forward_native


# Its processes are spawned: they import this file under another name before they load a model.
if __name__ == "__mp_main__" and os.environ.get(IN_PYTORCH):
    use_pytorch()


if __name__ == "__main__":
    work.main("sglang", start)
