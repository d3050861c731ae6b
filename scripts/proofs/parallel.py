"""The demo pair's output does not depend on the ranks over which its models are split.

    python -m scripts.proofs.parallel --prompts 40

Starts a world of 4 processes over gloo and runs the bundled prompts, fp32, greedy and sampled, with
every target TP of 1, 2 and 4 and every draft TP that divides it, read at once and one ahead.
Tokens, proposals and acceptances are compared with those of one process, greedy tokens also with
transformers' `generate`. Prints a table; exits 1 on any mismatch.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from scripts.proofs.greedy import generate_alone, oracle, read_prompts

PAIRS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
K = 4


def main() -> int:
    from specdec_cli.demo import demo_path
    from tests.dist import cases
    from tests.dist.world import World
    from tests.support import make_engine

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()

    pair = (demo_path("demo:target"), demo_path("demo:draft"))
    model, tokenizer = oracle()
    eos = frozenset({model.generation_config.eos_token_id})
    texts = read_prompts(arguments.prompts)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    new = {"max_new_tokens": arguments.new_tokens}
    runs: list[Any] = [(K, new), (K, new | {"temperature": 0.8, "seed": 7})]
    settings: dict[str, Any] = {
        "batch_size": 8,
        "block_size": 16,
        "num_blocks": 400,
        "max_model_len": 1024,
        "prefill_chunk": 2048,
        "eos_ids": eos,
    }
    one = cases.told(make_engine(*pair, **settings), prompts, runs)["seqs"]
    alone = generate_alone(texts, arguments.new_tokens)
    bad = sum(told[0] != ids for told, ids in zip(one[0], alone, strict=True))
    print(f"one process against transformers, greedy: {bad} of {len(prompts)} prompts differ")

    world = World(4, Path(tempfile.mkdtemp()))
    print("target TP  draft TP  rounds  greedy: differ  sampled: differ  seconds")
    for tps in PAIRS:
        for rounds in ("at once", "ahead"):
            started = time.perf_counter()
            found = world.run(
                cases.decode, pair, tps, prompts, runs, runs_ahead=rounds == "ahead", **settings
            )
            told = [x["seqs"] for x in found if x is not None]
            # The results of all ranks are compared, not only rank 0's.
            differ = [
                sum(any(own[run][i] != one[run][i] for own in told) for i in range(len(prompts)))
                for run in range(len(runs))
            ]
            bad += sum(differ)
            seconds = time.perf_counter() - started
            print(
                f"{tps[0]:9}  {tps[1]:8}  {rounds}  {differ[0]:14}  {differ[1]:15}  {seconds:7.0f}",
                flush=True,
            )
    world.close()
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
