"""Tests that sampled output follows the target's distribution, and that this test has power.

    python scripts/proofs/sampling.py --jobs 2

Part 1 draws 20 000 rounds for 40 pairs of distributions at k = 1..4 and compares the emitted tokens
with the target's distributions by chi-square. The same rounds then run under samplers with planted
faults, each of which must be caught. Everything is repeated with proposals that are not drawn, as
in prompt lookup. Part 2 runs the engine on models of 8 tokens, with a draft and with prompt lookup,
and compares the joint distribution of its first four tokens with transformers' probabilities.
Prints tables; exits 1 if the project is rejected or a fault survives. Takes a few minutes of two
cores.
"""

import argparse
import multiprocessing
import sys
import tempfile
import time
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from scipy import stats

from specdec_cli.core.types import SamplingParams
from tests import lossless
from tests.lossless import CORRECT, FAULTS, LOOKUP_FAULTS, Rule, label
from tests.support import make_engine, ngram_engine

SIGNIFICANT = 1e-4  # level for one pair, after Bonferroni over its own tests
KS = (1, 2, 3, 4)
ENGINE_KS = (0, 1, 2, 3)
ENGINE_FAULT_K = 3  # the bonus token is the fourth token
PAIRS, TIED_PAIRS = 40, 8
# The kinds of pairs, and the faults planted in each.
KINDS: dict[str, list[Rule]] = {
    "random": FAULTS,
    "lookup": LOOKUP_FAULTS,
    "tied": [lossless.AcceptTies()],
}
PROMPTS = {"draft": [3, 1, 4, 5], "ngram": [3, 1, 4, 1, 3, 1, 4]}
ENGINE_PARAMS = {
    "T 0.9": SamplingParams(temperature=0.9, max_new_tokens=5),
    "T 0.9, top-k 5": SamplingParams(temperature=0.9, top_k=5, max_new_tokens=5),
    "T 1.3, top-p 0.9": SamplingParams(temperature=1.3, top_p=0.9, max_new_tokens=5),
    "T 0.9, top-k 5, top-p 0.9": SamplingParams(
        temperature=0.9, top_k=5, top_p=0.9, max_new_tokens=5
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
ENGINE_LOOKUP_FAULTS = LOOKUP_FAULTS[:6]


@dataclass(frozen=True)
class Cell:
    """p-values of one pair at one k, by sampler and test."""

    k: int
    acceptance: float
    by_rule: dict[str, dict[str, float]]


def run_cell(number: int, k: int, draws: int, kind: str, faults: bool) -> Cell:
    torch.set_num_threads(1)
    pair = {
        "random": lossless.random_pair,
        "lookup": lossless.lookup_pair,
        "tied": lossless.tied_pair,
    }[kind](number)
    noise = lossless.pair_noise(pair, k, draws)
    rules = [CORRECT, *(KINDS[kind] if faults else [])]
    found = {label(rule): lossless.trial(pair, rule, k, noise) for rule in rules}
    return Cell(k, lossless.acceptance(pair, k, noise), found)


def run_engine(
    folders: tuple[Path, Path],
    proposer: str,
    params: SamplingParams,
    k: int,
    count: int,
    fault: Rule | None,
) -> dict[str, float]:
    torch.set_num_threads(1)
    rule = None if fault is None else lossless.Planted(fault)
    if proposer == "ngram":
        engine = ngram_engine(folders[0], batch_size=512, num_blocks=2400, rule=rule)
    else:
        engine = make_engine(*folders, batch_size=512, num_blocks=1300, rule=rule)
    return lossless.engine_trial(engine, folders[0], PROMPTS[proposer], k, params, count)


def report_values(title: str, k: int, values: list[float], rejected: int) -> int:
    """Print one line. Returns the number of rejections, with those of a KS test of the values'
    uniformity. A value of 1 means too little data for a test, as after many rare tokens.
    """
    uniform = float(stats.kstest([p for p in values if p < 1.0], "uniform").pvalue)
    print(f"  {title:<16} {k}  {rejected:8} of {len(values)}  {min(values):8.5f}  {uniform:8.3f}")
    return rejected + (uniform < SIGNIFICANT)


def report_project(kind: str, cells: list[Cell]) -> int:
    """Print the results of the project's sampler. Returns the number of rejections."""
    name, bad = label(CORRECT), 0
    print(f"{kind + ' pairs':<16}  k  pairs rejected   least p  KS of the p")
    for k in sorted({c.k for c in cells}):
        mine = [c.by_rule[name] for c in cells if c.k == k]
        for test in mine[0]:
            rejected = sum(p[test] * len(p) < SIGNIFICANT for p in mine)
            title = "bonus token" if test == f"token {k}" else test
            bad += report_values(title, k, [p[test] for p in mine], rejected)
        rates = [c.acceptance for c in cells if c.k == k]
        bad += report_values("acceptance rate", k, rates, sum(p < SIGNIFICANT for p in rates))
    return bad


def report_fault(cells: list[Cell], name: str) -> bool:
    """Print one line of the table of faults. Returns True if the fault survives.

    A fault is caught if some cell is significant after Bonferroni over all cells.
    """
    values = [(c.k, lossless.adjusted(c.by_rule[name])) for c in cells]
    caught = [sum(p < SIGNIFICANT for k, p in values if k == mine) for mine in KS]
    least = min(p for _, p in values)
    survives = least * len(values) >= SIGNIFICANT
    print(
        f"  {name:<48}{''.join(f'{count:5}' for count in caught)}"
        f"  of {len(cells) // len(KS):2}  {least:8.1e}{'  SURVIVES' * survives}"
    )
    return survives


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--draws", type=int, default=20_000)
    parser.add_argument("--engine-draws", type=int, default=20_000)
    parser.add_argument("--no-faults", action="store_true")
    args = parser.parse_args()
    faults, started, bad = not args.no_faults, time.perf_counter(), 0
    pool = ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn"))
    with tempfile.TemporaryDirectory() as folder, pool:
        folders = lossless.save_eight(Path(folder))
        waiting = {
            kind: [
                pool.submit(run_cell, number, k, args.draws, kind, faults)
                for number in range(TIED_PAIRS if kind == "tied" else args.pairs)
                for k in KS
            ]
            for kind in KINDS
        }
        engine_runs: list[tuple[str, str, int, Rule | None, Future[dict[str, float]]]] = []
        for proposer, planted in (("draft", ENGINE_FAULTS), ("ngram", ENGINE_LOOKUP_FAULTS)):
            for name, params in ENGINE_PARAMS.items():
                for k in ENGINE_KS if proposer == "draft" else ENGINE_KS[1:]:
                    cases: list[Rule | None] = [None]
                    if faults and k == ENGINE_FAULT_K and name == "T 0.9":
                        cases += planted
                    for fault in cases:
                        seeded = replace(params, seed=100 + k)
                        future = pool.submit(
                            run_engine, folders, proposer, seeded, k, args.engine_draws, fault
                        )
                        engine_runs.append((proposer, name, k, fault, future))

        cells = {kind: [future.result() for future in waiting[kind]] for kind in KINDS}
        for kind in ("random", "lookup"):
            bad += report_project(kind, cells[kind])
        values = [lossless.adjusted(c.by_rule[label(CORRECT)]) for c in cells["tied"]]
        rejected = sum(p < SIGNIFICANT for p in values)
        bad += rejected
        print(f"  pairs with ties: {rejected} of {len(values)} cells, least p {min(values):.5f}")
        for kind in KINDS if faults else ():
            print(
                f"faults in {kind} pairs: caught, at k = ".ljust(50) + "".join(f"{k:5}" for k in KS)
            )
            bad += sum(report_fault(cells[kind], label(rule)) for rule in KINDS[kind])
        seconds = time.perf_counter() - started
        count = sum(map(len, cells.values()))
        print(f"{count} cells x {args.draws} rounds in {seconds:.0f} s", flush=True)

        print("the engine                          k  p of 1, 2, 3, 4 tokens                fault")
        for proposer, name, k, fault, future in engine_runs:
            found = future.result()
            wrong = (lossless.adjusted(found) < SIGNIFICANT) == (fault is None)
            bad += wrong
            shown = "  ".join(
                f"{p:7.1e}" if p < SIGNIFICANT else f"{p:7.5f}" for p in found.values()
            )
            title = f"{proposer}, {name}"
            print(f"  {title:<33} {k}  {shown}  {label(fault) if fault else ''}{'  WRONG' * wrong}")
    print(
        f"{len(engine_runs)} x {args.engine_draws} engine runs, "
        f"{time.perf_counter() - started:.0f} s in all: {bad} failures"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
