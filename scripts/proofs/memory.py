"""Compares the cache that `profile-blocks` announces with its estimate and with a full run.

    python scripts/proofs/memory.py [RECIPE] [--target-tp N] [--draft-tp N] [--batch-size B]
        [--utilization 0.95] [--prompt-tokens 7000] [--new-tokens 64] [--device cuda] [--set K=V]

Four commands with one recipe: a measurement, an estimate, a short `generate` whose engine sizes its
own cache, and a `generate` with the announced number of blocks and more sequences than fit at once,
so that the cache is used to its last block (sequences are preempted). None of them may run out of
memory, and the engine's own cache has the announced size. Used memory is the peak of the last run
by nvidia-smi.
"""

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GIB = 2**30
OWN_WITHIN = 0.01  # the engine measures with shorter texts, whose passes may take a little less


def specdec(command: str, options: argparse.Namespace, *extra: str) -> tuple[int, str, str, float]:
    """Run one command; returns exit code, streams and seconds."""
    sets = [f"cache.gpu_memory_utilization={options.utilization}", *options.set]
    tp = ["--target-tp", str(options.target_tp), "--draft-tp", str(options.draft_tp)]
    common = [*tp, "--batch-size", str(options.batch_size), "--device", options.device, "--json"]
    program = [sys.executable, "-m", "specdec_cli", command, options.recipe, *common]
    for item in sets:
        program += ["--set", item]
    began = time.monotonic()
    done = subprocess.run([*program, *extra], capture_output=True, text=True, cwd=ROOT, check=False)
    return done.returncode, done.stdout, done.stderr, time.monotonic() - began


def document(what: str, outcome: tuple[int, str, str, float]) -> dict[str, Any]:
    code, out, err, seconds = outcome
    print(f"{what}: exit code {code} after {seconds:.0f} s", flush=True)
    if code:
        print(err or out)
        raise SystemExit(1)
    found: dict[str, Any] = json.loads(out)
    return found


class Watch(threading.Thread):
    """Peak memory in use on each GPU, as reported by nvidia-smi, in GiB."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak: list[float] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        while not self.is_over.wait(0.3):
            try:
                said = subprocess.run(query, capture_output=True, text=True, check=True).stdout
            except (OSError, subprocess.CalledProcessError):
                return
            used = [float(line) / 1024 for line in said.split()]
            self.peak = [max(pair) for pair in zip(used, self.peak or used, strict=True)]


def show(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        rows = {k.removesuffix("_bytes"): v for k, v in rank.items() if k.endswith("_bytes")}
        line = " ".join(f"{k} {v / GIB:.3f}" for k, v in rows.items() if not k.endswith("block"))
        print(f"  {name} rank {rank['rank']} ({rank['device']}), GiB: {line}; {rank['num_blocks']}")


def prompt_length(profile: dict[str, Any], wanted: int) -> tuple[int, int]:
    """A length near `wanted` at which whole prompts fill the cache, and the number of prompts."""
    size, usable = profile["block_size"], profile["num_blocks"] - 1
    k = profile["recipe"]["speculation"]["num_speculative_tokens"]
    at_once = max(1, usable // -(-wanted // size))
    # When the last sequence is admitted, one spare block for each sequence is left.
    return (usable - at_once) // at_once * size - k, at_once


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("recipe", nargs="?", default="bench-8b-1b-dummy")
    parser.add_argument("--target-tp", type=int, default=1)
    parser.add_argument("--draft-tp", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--utilization", type=float, default=0.95)
    parser.add_argument("--prompt-tokens", type=int, default=7000)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options = parser.parse_args()

    measured = document("profile-blocks", specdec("profile-blocks", options))
    show("measured", measured["ranks"])
    estimated = document("--estimate", specdec("profile-blocks", options, "--estimate"))
    show("estimated", estimated["ranks"])
    announced = measured["num_blocks"]

    length, at_once = prompt_length(measured, options.prompt_tokens)
    if at_once >= options.batch_size:
        raise SystemExit(f"{at_once} sequences fit at once: pass a larger --batch-size")
    rng = random.Random(0)
    lines = [
        json.dumps({"prompt_token_ids": [rng.randrange(3, 4000) for _ in range(length)]})
        for _ in range(at_once + 2)
    ]
    with tempfile.TemporaryDirectory() as folder:
        one, many = Path(folder) / "one.jsonl", Path(folder) / "many.jsonl"
        one.write_text(lines[0])
        many.write_text("\n".join(lines))
        short = ("--max-new-tokens", str(options.new_tokens), "--ignore-eos")
        outcome = specdec("generate", options, *short, "--prompt-file", str(one), "-v")
        document("generate, its own cache", outcome)
        found = re.search(r"the caches have (\d+) blocks", outcome[2])
        own = int(found[1]) if found else 0
        watch = Watch()
        watch.start()
        blocks = ("--num-blocks", str(announced), "--prompt-file", str(many))
        full = document("generate, announced", specdec("generate", options, *short, *blocks, "-q"))
        watch.is_over.set()

    preempted = full["metrics"]["num_preemptions"]
    ends = sorted({output["finish_reason"] for output in full["outputs"]})
    tokens = len(lines) * (length + options.new_tokens)
    off = 100 * (estimated["num_blocks"] / announced - 1)
    print(f"announced (measured)  {announced} blocks, {measured['max_tokens']} tokens")
    print(f"estimated             {estimated['num_blocks']} blocks ({off:+.2f} %)")
    print(f"the engine's own      {own} blocks ({100 * (own / announced - 1):+.2f} %)")
    print(f"used to the last      {tokens} tokens asked for, {preempted} preemptions, ended {ends}")
    if watch.peak:
        share = [f"{peak:.2f} GiB" for peak in watch.peak]
        total = measured["ranks"][0]["total_bytes"] / GIB
        print(f"peak memory           {', '.join(share)} of {total:.2f} GiB")
    is_alike = abs(own / announced - 1) <= OWN_WITHIN
    is_good = abs(off) <= 5 and preempted > 0 and ends == ["length"] and is_alike
    print("as promised" if is_good else "NOT as promised")
    raise SystemExit(not is_good)


if __name__ == "__main__":
    main()
