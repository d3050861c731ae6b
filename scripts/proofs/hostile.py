"""Damaged configs, indexes, tokenizers, weights, recipes, data files, options and run folders.

Each case is one `specdec` command on hostile files, in a fork of this process with 30 seconds and
4 GiB. It must end by itself with an exit code of the contract, one line for an error, a whole
document under `--json`, and no traceback, panic or crash. The same seed gives the same cases. A
case that fails keeps its folder.

    python scripts/proofs/hostile.py --cases 1000 --seed 0 --jobs 2
"""

import argparse
import gc
import itertools
import os
import shlex
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "RUST_BACKTRACE": "0",  # a backtrace takes seconds
    "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
}

from tests.hostile.cases import KINDS, case_of, kind_of  # noqa: E402
from tests.hostile.materials import FAMILIES, made_in_fork  # noqa: E402
from tests.hostile.runner import Ended, preload, run_cases  # noqa: E402
from tests.support import tiny_config  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", choices=KINDS, help="one kind of cases")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", action="store_true", help="keep the folders of all cases")
    args = parser.parse_args()
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="hostile-"))
    os.environ["HF_DATASETS_CACHE"] = str(scratch / "cache")
    preload(type(tiny_config(family)).__module__ for family in FAMILIES)
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, "a thread would not survive a fork"
    materials = made_in_fork(scratch / "materials")
    print(f"ready after {time.monotonic() - began:.0f} s", flush=True)
    wanted = (n for n in itertools.count(args.first) if args.only in (None, kind_of(n)))
    numbers = list(itertools.islice(wanted, args.cases))
    ends: list[Ended] = []
    made = run_cases(
        numbers,
        lambda number, folder: case_of(args.seed, number, folder, materials),
        scratch,
        jobs=args.jobs,
    )
    for end in made:
        ends.append(end)
        if end.problems:
            print(told(end, args.seed), flush=True)
        elif not args.keep:
            shutil.rmtree(end.folder)
        if len(ends) % 100 == 0:
            print(f"{len(ends)} cases after {time.monotonic() - began:.0f} s", flush=True)
    failed = sum(bool(end.problems) for end in ends)
    print(table(ends))
    print(f"{len(ends)} cases, {failed} failed, {time.monotonic() - began:.0f} s, seed {args.seed}")
    if not failed and not args.keep:
        shutil.rmtree(scratch)
    gc.unfreeze()  # libraries warn about objects that were never freed
    return int(failed > 0)


def told(end: Ended, seed: int) -> str:
    """The lines about a case that failed."""
    said = end.line or next(iter(end.err.strip().splitlines()[-1:]), "")
    return "\n  ".join(
        [
            f"case {end.number} ({end.kind}): {', '.join(end.problems)}: {end.told}"[:300],
            f"code {end.code}, {end.seconds:.1f} s, {end.bytes / 2**20:.0f} MiB: {said}"[:300],
            f"cd {end.folder} && specdec {shlex.join(end.arguments)}"[:1000],
            f"python scripts/proofs/hostile.py --seed {seed} --first {end.number} --cases 1",
        ]
    )


def table(ends: list[Ended]) -> str:
    """The cases by kind: exit codes, failures, the slowest and the largest."""
    codes = sorted({end.code for end in ends})
    rows = [["kind", "cases", *(f"exit {code}" for code in codes), "failed", "slowest", "largest"]]
    for kind in [*KINDS, "all"]:
        own = [end for end in ends if kind in (end.kind, "all")]
        if not own:
            continue
        counts = Counter(end.code for end in own)
        slow, large = max(own, key=lambda e: e.seconds), max(own, key=lambda e: e.bytes)
        rows.append([kind, str(len(own)), *(str(counts[code]) for code in codes)])
        rows[-1].append(str(sum(bool(end.problems) for end in own)))
        rows[-1].append(f"{slow.seconds:.1f} s ({slow.number})")
        rows[-1].append(f"{large.bytes / 2**20:.0f} MiB ({large.number})")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows
    )


if __name__ == "__main__":
    sys.exit(main())
