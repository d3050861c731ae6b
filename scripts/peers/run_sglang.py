"""Times a recipe's models in SGLang: plain decoding, and drafts or heads at simulated acceptance.

    python scripts/peers/run_sglang.py bench-8b-eagle3-dummy --k 5 --batch-size 1,8,32

SGLang's simulated acceptance draws one length for the whole batch each round, the mean rounded down
or up, and writes one token everywhere: batches have no ragged ends, and a target with experts reads
few of them. With real weights (--token-ids) its acceptance is real.
"""

import atexit
import os
import time
from typing import Any

import work

ALGORITHMS = {"eagle3": "EAGLE3", "draft_model": "STANDALONE", "ngram": "NGRAM"}


def start(what: work.Work, batch: int, longest: int) -> work.Decode:
    if what.rates:  # read when sglang is imported, in each of its processes
        os.environ["SGLANG_SIMULATE_ACC_LEN"] = str(what.tokens_a_round)
        os.environ.setdefault("SGLANG_SIMULATE_ACC_METHOD", "match-expected")
    import sglang

    keys: dict[str, Any] = {
        "model_path": what.target,
        "skip_tokenizer_init": True,
        "load_format": "dummy" if what.is_dummy else "auto",
        "dtype": what.dtype,
        "context_length": max(2048, longest),
        "max_running_requests": max(64, batch),
        "mem_fraction_static": 0.7,
        "disable_radix_cache": True,
        "random_seed": 0,
        "log_level": "warning",
        "attention_backend": "fa3",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "cuda_graph_bs_decode": sorted({1, 2, 4, 8, 16, 32, batch}),
    }
    if what.k:
        keys |= {
            "speculative_algorithm": ALGORITHMS[what.method],
            "speculative_num_draft_tokens": what.k + 1,
        }
    if what.draft is not None:
        keys |= {
            "speculative_draft_model_path": what.draft,
            "speculative_num_steps": what.k,
            "speculative_eagle_topk": 1,
        }
    served = sglang.Engine(**keys)
    atexit.register(served.shutdown)

    def decode(ids: list[list[int]], new: int) -> work.Decoded:
        params = {"temperature": 0.0, "max_new_tokens": new, "ignore_eos": what.ignore_eos}
        began = time.perf_counter()
        outs = served.generate(input_ids=ids, sampling_params=params)
        seconds = time.perf_counter() - began
        info = [out["meta_info"] for out in outs]
        rounds = sum(m.get("spec_verify_ct", 0) for m in info)
        accepted = sum(m.get("spec_num_correct_drafts", 0) for m in info)
        return work.Decoded(seconds, [out["output_ids"] for out in outs], rounds, accepted)

    return decode


if __name__ == "__main__":
    work.main("sglang", start)
