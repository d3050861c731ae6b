"""Coverage of the 95 % intervals that `sweep-k` prints: the share that contains the truth.

Sweeps are simulated. Prompts differ in acceptance (Beta distributed, by category), in length (some
end early) and in the machine's speed; rounds are drawn token by token. The truth is the value over
a population of many prompts. The percentile bootstrap and BCa are computed for comparison.

    python scripts/proofs/intervals.py --sims 1000 [--claims]

--claims instead counts the sweeps that call the best of several points faster than k = 0.
"""

import argparse
import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from specdec_cli.experiment.statistics import stats
from specdec_cli.experiment.statistics.evidence import claimed
from specdec_cli.experiment.statistics.factors import reach_of
from specdec_cli.experiment.statistics.stats import SumRatio

Array = npt.NDArray[np.float64]
K, LENGTH, REPEATS = 4, 64, 3
ROUND_MS, PLAIN_MS = 12.0, 6.0
# Distribution of a prompt's acceptance rate, by category: (a, b) of a Beta distribution.
CATEGORIES = ((8.0, 2.0), (4.0, 3.0), (1.5, 1.5))


def prompts(count: int, rng: np.random.Generator) -> dict[str, Array]:
    """Tokens, rounds, accepted proposals and times of `count` simulated prompts."""
    a, b = np.array(CATEGORIES)[rng.integers(len(CATEGORIES), size=count)].T
    rate = rng.beta(a, b)
    early = rng.random(count) < 0.3
    tokens = np.where(early, rng.integers(4, LENGTH, size=count), LENGTH)
    written = np.zeros(count, dtype=int)
    rounds = np.zeros(count)
    accepted = np.zeros(count)
    while (open_ := written < tokens).any():
        stands = (rng.random((count, K)) < rate[:, None]).cumprod(axis=1)
        room = np.arange(K) < (tokens - written - 1)[:, None]
        got = (stands * room).sum(axis=1)
        written += np.where(open_, got + 1, 0)
        accepted += np.where(open_, got, 0)
        rounds += open_
    shape = (REPEATS, count)
    ours = (rounds * ROUND_MS * rng.lognormal(0.0, 0.05, shape)).mean(axis=0)
    plain = (tokens * PLAIN_MS * rng.lognormal(0.0, 0.05, shape)).mean(axis=0)
    return {
        "tokens": tokens.astype(float),
        "rounds": rounds,
        "accepted": accepted,
        "seconds": ours,
        "plain_seconds": plain,
    }


def mean_length(data: dict[str, Array]) -> SumRatio:
    return stats.mean_acceptance_length(data["accepted"].tolist(), data["rounds"].tolist())


def speedup(data: dict[str, Array]) -> SumRatio:
    ours = stats.speed(data["tokens"].tolist(), data["seconds"].tolist())
    return ours.over(stats.speed(data["tokens"].tolist(), data["plain_seconds"].tolist()))


def resampled(measure: SumRatio, rng: np.random.Generator, count: int) -> Array:
    n = len(measure.columns)
    weights = rng.multinomial(n, np.full(n, 1.0 / n), size=count).astype(float)
    logs: Array = np.log(weights @ measure.columns) @ np.array(measure.powers)
    return logs


def percentile(measure: SumRatio, rng: np.random.Generator) -> list[float]:
    found = np.quantile(resampled(measure, rng, stats.RESAMPLES), (0.025, 0.975))
    return [float(np.exp(x)) for x in found]


def bca(measure: SumRatio, rng: np.random.Generator) -> list[float]:
    """The bias-corrected and accelerated interval (Efron 1987), by scipy's normal distribution."""
    from scipy.stats import norm

    logs = resampled(measure, rng, stats.RESAMPLES)
    x, powers = measure.columns, np.array(measure.powers)
    bias = norm.ppf((logs < np.log(measure.value)).mean())
    left_out = np.log(x.sum(axis=0) - x) @ powers
    away = left_out.mean() - left_out
    acceleration = (away**3).sum() / (6 * (away**2).sum() ** 1.5)
    ends = []
    for p in (0.025, 0.975):
        z = bias + norm.ppf(p)
        ends.append(norm.cdf(bias + z / (1 - acceleration * z)))
    return [float(np.exp(e)) for e in np.quantile(logs, ends)]


@functools.cache
def _population() -> dict[str, Array]:
    return prompts(400_000, np.random.default_rng(999))


def coverage(sims: int, n: int, seed: int, methods: list[str]) -> dict[tuple[str, str], float]:
    """Share of intervals that contain the truth, by measure and method."""
    rng = np.random.default_rng(seed)
    population = _population()
    measures: dict[str, Callable[[dict[str, Array]], SumRatio]] = {
        "mean length": mean_length,
        "speed-up": speedup,
    }
    truths = {name: measure(population).value for name, measure in measures.items()}
    hits = {(name, method): 0 for name in measures for method in methods}
    for sim in range(sims):
        data = prompts(n, rng)
        for name, measure in measures.items():
            for method in methods:
                sampled = measure(data)
                if method == "ours":
                    found = stats.interval(sampled, seed=sim)
                    assert found is not None
                else:
                    found = {"percentile": percentile, "BCa": bca}[method](sampled, rng)
                hits[name, method] += found[0] <= truths[name] <= found[1]
    return {key: count / sims for key, count in hits.items()}


def claims(sims: int, n: int, drafts: int, ks: int, gain: float) -> tuple[float, float]:
    """Share of sweeps that call some point faster than k = 0, by the points' own intervals and by
    those of a claim. The true gain is `gain` at all points. Times of a prompt are alike at every k
    of a draft, and less so between drafts."""
    rng, called = np.random.default_rng(n + drafts + ks), np.zeros(2)
    for _ in range(sims):
        plain, of_prompt = rng.lognormal(0.0, 0.05, n), rng.normal(0.0, 0.15, n)
        measures = []
        for _ in range(drafts):
            of_draft = of_prompt + rng.normal(0.0, 0.25, n)
            for _ in range(ks):
                away = of_draft + rng.normal(0.0, 0.085, n)
                mean = np.exp((0.15**2 + 0.25**2 + 0.085**2) / 2)
                ours = stats.speed(np.ones(n), plain * np.exp(away) / mean / gain)  # type: ignore[arg-type]
                measures.append(ours.over(stats.speed(np.ones(n), plain)))  # type: ignore[arg-type]
        found = [(m.value, stats.interval(m)) for m in measures]
        for place, reach in enumerate((1.0, reach_of(measures))):
            ends = [claimed(value, own, reach) for value, own in found]
            called[place] += any(one is not None and one[0] > 1.0 for one in ends)
    one, best = called / sims
    return float(one), float(best)


def _print_claims(sims: int) -> None:
    print(
        "| prompts | points | true gain | single intervals | as the best |\n|---|---|---|---|---|"
    )
    for n in (20, 80):
        for drafts, ks in ((1, 1), (1, 8), (3, 8)):
            for gain in (1.0, 1.1, 1.2):
                shares = claims(sims, n, drafts, ks, gain)
                told = " | ".join(f"{100 * one:.1f} %" for one in shares)
                print(f"| {n} | {drafts * ks} | {gain} | {told} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sims", type=int, default=1000)
    parser.add_argument("--prompts", type=int, nargs="+", default=[20, 40, 80, 200])
    parser.add_argument("--claims", action="store_true")
    args = parser.parse_args()
    if args.claims:
        _print_claims(args.sims)
        return
    methods = ["percentile", "BCa", "ours"]
    print(f"coverage of nominal 95 % intervals, {args.sims} simulated sweeps a row")
    print("| prompts | measure | " + " | ".join(methods) + " |")
    print("|---|---|" + "---|" * len(methods))
    worst = 1.0
    for n in args.prompts:
        found = coverage(args.sims, n, seed=n, methods=methods)
        for name in dict.fromkeys(name for name, _ in found):
            row = [found[name, method] for method in methods]
            worst = min(worst, 1 - abs(row[-1] - 0.95))
            print(f"| {n} | {name} | " + " | ".join(f"{100 * c:.1f} %" for c in row) + " |")
    print(f"ours is at most {100 * (1 - worst):.1f} points from 95 %")


if __name__ == "__main__":
    main()
