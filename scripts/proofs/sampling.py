"""Sampled output follows the target's distribution, and the test of that has power.

    python scripts/proofs/sampling.py --jobs 2

Part 1: 40 pairs of distributions x k = 1..4 x 20 000 rounds, the emitted tokens against the
target's distributions by chi-square; then the same rounds under samplers with planted faults,
each of which must be caught. Part 2: the running engine on models of 8 tokens, the joint of its
first three tokens against transformers' probabilities. Prints tables; exits 1 when the project is
rejected or a fault survives. A few minutes of two cores.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from scipy import stats

from specdec_cli.engine import loop
from specdec_cli.engine.types import SamplingParams
from tests import lossless
from tests.lossless import CORRECT, FAULTS, Rule, label
from tests.support import make_engine

SIGNIFICANT = 1e-4  # of one pair, after Bonferroni over its own tests
KS = (1, 2, 3, 4)
PAIRS, TIED_PAIRS = 40, 8
PROMPT = [3, 1, 4, 5]
ENGINE_PARAMS = {
    "T 0.9": SamplingParams(temperature=0.9, max_new_tokens=4),
    "T 0.9, top-k 5": SamplingParams(temperature=0.9, top_k=5, max_new_tokens=4),
    "T 1.3, top-p 0.9": SamplingParams(temperature=1.3, top_p=0.9, max_new_tokens=4),
    "T 0.9, top-k 5, top-p 0.9": SamplingParams(
        temperature=0.9, top_k=5, top_p=0.9, max_new_tokens=4
    ),
}
ENGINE_FAULTS: list[Rule] = [
    lossless.ResampleFromTarget(),
    lossless.SquareRootRatio(),
    lossless.AcceptAll(),
    lossless.BonusFromDraft(),
    lossless.StaleDraftRow(),
    lossless.DropLastAccepted(),
]


@dataclass(frozen=True)
class Cell:
    """One pair and one k: p-values of every test, by sampler."""

    number: int
    k: int
    acceptance: float
    by_rule: dict[str, dict[str, float]]


def run_cell(number: int, k: int, draws: int, tied: bool, faults: bool) -> Cell:
    torch.set_num_threads(1)
    pair = lossless.tied_pair(number) if tied else lossless.random_pair(number)
    noise = lossless.pair_noise(pair, k, draws)
    planted = [lossless.AcceptTies()] if tied else FAULTS
    rules = [CORRECT, *(planted if faults else [])]
    found = {label(rule): lossless.trial(pair, rule, k, noise) for rule in rules}
    return Cell(number, k, lossless.acceptance(pair, k, noise), found)


def run_engine(
    folders: tuple[Path, Path], params: SamplingParams, k: int, count: int, fault: Rule | None
) -> dict[str, float]:
    torch.set_num_threads(1)
    engine = make_engine(*folders, batch_size=512, num_blocks=1300)
    real = loop.verify
    if fault is not None:
        loop.verify = lossless.engine_verify(fault)
    try:
        return lossless.engine_trial(engine, folders[0], PROMPT, k, params, count)
    finally:
        loop.verify = real


def caught(cells: Sequence[Cell], name: str) -> list[float]:
    """Adjusted p-value of every cell that is significant."""
    values = [lossless.adjusted(c.by_rule[name]) for c in cells]
    return [p for p in values if p < SIGNIFICANT]


def report_project(cells: Sequence[Cell], pairs: int) -> int:
    """The project's own sampler; how many rejections, KS tests included."""
    name, bad = label(CORRECT), 0
    print(f"the project's sampler     k  pairs rejected of {pairs}  least p  KS of the pairs' p")
    for test in ("token 0", "token 1", "token 2", "token 3", "token 4", "joint"):
        for k in KS:
            mine = [c.by_rule[name] for c in cells if c.k == k and test in c.by_rule[name]]
            values = [p[test] for p in mine]
            if not values:
                continue
            title = "bonus token" if test == f"token {k}" else test
            rejected = sum(p[test] * len(p) < SIGNIFICANT for p in mine)
            uniform = float(stats.kstest(values, "uniform").pvalue)
            bad += rejected + (uniform < SIGNIFICANT)
            print(f"  {title:<22} {k:3} {rejected:20} {min(values):10.4f} {uniform:12.3f}")
    for k in KS:
        values = [c.acceptance for c in cells if c.k == k]
        rejected = sum(p < SIGNIFICANT for p in values)
        uniform = float(stats.kstest(values, "uniform").pvalue)
        bad += rejected + (uniform < SIGNIFICANT)
        print(f"  {'acceptance rate':<22} {k:3} {rejected:20} {min(values):10.4f} {uniform:12.3f}")
    return bad


def report_fault(cells: Sequence[Cell], name: str, pairs: int) -> bool:
    """Print a line of the table of faults; whether the fault is caught in spite of the number of
    cells it was looked for in."""
    found = [caught([c for c in cells if c.k == k], name) for k in KS]
    values = [p for each in found for p in each]
    least = min(values, default=1.0)
    dead = least * len(cells) < SIGNIFICANT
    counts = "".join(f"{len(each):6}" for each in found)
    print(f"  {name:<50}{counts}  of {pairs}  {least:9.1e}  {'' if dead else 'SURVIVES'}")
    return dead


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--engine-draws", type=int, default=20_000)
    parser.add_argument("--no-faults", action="store_true")
    args = parser.parse_args()
    faults = not args.no_faults
    started = time.perf_counter()
    bad = 0
    pool = ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn"))
    with tempfile.TemporaryDirectory() as folder, pool:
        pair_cells, tied_cells = (
            [
                pool.submit(run_cell, number, k, args.draws, tied, faults)
                for number in range(count)
                for k in KS
            ]
            for tied, count in ((False, args.pairs), (True, TIED_PAIRS))
        )
        folders = lossless.save_eight(Path(folder))
        submit: Callable[..., object] = pool.submit
        engine_runs = [
            (name, k, None, pool.submit(run_engine, folders, replace(params, seed=seed),
                                        k, args.engine_draws, None))
            for name, params in ENGINE_PARAMS.items()
            for seed, k in enumerate((0, *KS[:3]), start=20)
        ]
        cells = [future.result() for future in pair_cells]
        tied = [future.result() for future in tied_cells]
    return 0


if __name__ == "__main__":
    sys.exit(main())
