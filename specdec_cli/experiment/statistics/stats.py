"""Bootstraps confidence intervals, and compares measures, over the prompts of a sweep.

Every measure of a sweep is a product of sums over prompts, some of them in the denominator. Mean
acceptance length is (accepted + drafts) / drafts. A speed-up is tokens / seconds, divided by tokens
/ seconds at k = 0. The bootstrap resamples whole prompts, because rounds of one prompt are
correlated.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from specdec_cli.core.figures import Metrics
from specdec_cli.experiment.folders.records import FEWEST as FEWEST
from specdec_cli.experiment.folders.records import Sample
from specdec_cli.experiment.folders.samples import Samples

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.uint16]

RESAMPLES = 2000
_FEW = 8  # with fewer prompts there is no bootstrap, since its resamples would be too similar
# 97.5 % points of Student's t for 1 to 6 degrees of freedom.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447)
# Lower bound on a resample's standard error, relative to that of the sample. If the sample has one
# outlier, a resample without it may have nearly identical prompts, and dividing by its tiny error
# would blow up the interval.
_LEAST_ERROR = 0.25
_NO_ERROR = 1e-12  # a smaller standard error is rounding: all prompts are exactly alike
_NORMAL = NormalDist().inv_cdf(0.975)
_DRAWS = 10_000  # random draws for the largest of several errors
_FEW_WITHOUT = 0.1  # report rounds without proposals only if their share exceeds this
_CHUNK = 2_000_000  # the maximum number of resample counts in memory at a time


@dataclass(frozen=True, slots=True)
class SumRatio:
    """A measure that multiplies and divides sums over prompts, one sum for each column.

    columns: fp64 [N, M], a row for each prompt.
    powers: for each column, +1 if its sum is a factor and -1 if it is a divisor. They add up to 0,
        so that the measure does not grow with the number of prompts.
    """

    columns: Array
    powers: tuple[int, ...]

    def __post_init__(self) -> None:
        assert self.columns.ndim == 2 and self.columns.shape[1] == len(self.powers)
        assert sum(self.powers) == 0

    @property
    def value(self) -> float:
        """The measure over all prompts; NaN if a sum is 0."""
        sums = self.columns.sum(axis=0)
        if len(self.columns) == 0 or (sums <= 0).any():
            return float("nan")
        # A quotient, since a product with reciprocals is not exactly 1 for equal sums.
        are_factors = np.array(self.powers) > 0
        return float(np.prod(sums[are_factors]) / np.prod(sums[~are_factors]))

    @property
    def influence(self) -> Array:
        """The effect of each prompt on the logarithm of the measure, to first order, [N]."""
        found: Array = (self.columns / self.columns.mean(axis=0)) @ np.array(self.powers, float)
        return found

    def over(self, other: "SumRatio") -> "SumRatio":
        """Divide this measure by another over the same prompts. Raises `ValueError` if the numbers
        of prompts differ."""
        if len(self.columns) != len(other.columns):
            raise ValueError(
                f"measures of {len(self.columns)} and {len(other.columns)} prompts have no ratio: "
                "take the prompts that both have"
            )
        both = np.concatenate((self.columns, other.columns), axis=1)
        return SumRatio(both, self.powers + tuple(-p for p in other.powers))


def mean_acceptance_length(accepted: Sequence[float], drafts: Sequence[float]) -> SumRatio:
    """Return the mean acceptance length, 1 + accepted / drafts, as a measure.

    accepted, drafts: for each prompt, the number of accepted proposals, and the number of rounds
    with proposals.
    """
    a, d = np.asarray(accepted, float), np.asarray(drafts, float)
    return SumRatio(np.stack((a + d, d), axis=1), (1, -1))


def proposing_rate(metrics: Metrics) -> float | None:
    """Return the share of a run's rounds in which the method proposed anything; None if that is
    nearly every round, or if it is unknown.

    `mean_acceptance_length` covers only these rounds. A draft model proposes in every round except
    the last one of a text, but n-gram lookup may find no proposal in most rounds.
    """
    drafts, without = metrics.num_drafts or 0, metrics.num_rounds_without_proposal
    is_telling = drafts > 0 and without > _FEW_WITHOUT * (drafts + without)
    return drafts / (drafts + without) if is_telling else None


def among_rounds(metrics: Metrics) -> str:
    """Return the suffix that tells the user which rounds a mean acceptance length covers; "" if it
    covers nearly all."""
    rate = proposing_rate(metrics)
    return "" if rate is None else f" in the {100 * rate:.0f}% that proposed"


def speed(tokens: Sequence[float], seconds: Sequence[float]) -> SumRatio:
    """Return tokens per second as a measure.

    tokens, seconds: the number of tokens of each prompt, and its share of the time. Raises
    `ValueError` if they are not as many.
    """
    if len(tokens) != len(seconds):
        raise ValueError(f"{len(tokens)} counts of tokens have {len(seconds)} times")
    return SumRatio(np.stack((np.asarray(tokens, float), np.asarray(seconds, float)), 1), (1, -1))


def interval(measure: SumRatio, seed: int = 0, resamples: int = RESAMPLES) -> list[float] | None:
    """Compute the 95 % interval [low, high] of `measure`. Returns None for fewer than three
    prompts, or if all prompts are exactly alike. They are alike, for example, if they form one
    batch that begins and ends together, since they then share its time equally.

    The method is the bootstrap-t on the logarithm of the measure, with the linearised standard
    error (Efron and Tibshirani, An Introduction to the Bootstrap, chapter 12.5). The percentile
    interval would be too narrow for 20 prompts: `scripts/proofs/intervals.py` measures the coverage
    of both. For fewer than 8 prompts, Student's t replaces resampling.
    """
    x, powers = measure.columns, np.array(measure.powers, float)
    n = len(x)
    if n < FEWEST or not np.isfinite(value := measure.value):
        return None
    log_value = np.log(value)
    error = _error(x, np.ones((1, n)), powers)[1][0]
    if error < _NO_ERROR:
        return None
    if n < _FEW:
        reach = STUDENT[n - 2] * error
        return [float(np.exp(log_value - reach)), float(np.exp(log_value + reach))]
    t = []
    for counts in _resamples(n, seed, resamples):
        logs, errors = _error(x, counts.astype(float), powers)
        errors = np.maximum(errors, _LEAST_ERROR * error)
        usable = np.isfinite(logs)
        t.append((logs[usable] - log_value) / errors[usable])
    low, high = np.quantile(np.concatenate(t), (0.025, 0.975))
    ends = np.exp([log_value - high * error, log_value - low * error])
    return [float(ends[0]), float(ends[1])]


def _resamples(n: int, seed: int, resamples: int) -> Iterable[Counts]:
    """Draw the resamples, and count how often each of the N prompts occurs in each of them.

    Returns uint16 arrays with N columns and one row per resample. The rows are split into several
    arrays to limit memory use.
    """
    step = max(1, _CHUNK // n)
    if resamples <= step:
        return (_kept_resamples(n, seed, resamples),)
    rng = np.random.default_rng(seed)
    sizes = (min(step, resamples - start) for start in range(0, resamples, step))
    return (_drawn(rng, n, size) for size in sizes)


@functools.lru_cache(maxsize=16)
def _kept_resamples(n: int, seed: int, resamples: int) -> Counts:
    """Draw all resamples at once and cache their counts, uint16 [R, N]. Drawing takes most of the
    time of an interval, and a report computes hundreds of intervals over the same prompts."""
    return _drawn(np.random.default_rng(seed), n, resamples)


def _drawn(rng: np.random.Generator, n: int, size: int) -> Counts:
    return rng.multinomial(n, np.full(n, 1.0 / n), size=size).astype(np.uint16)


def linear_interval(measure: SumRatio) -> list[float] | None:
    """Compute the 95 % interval of `measure` from its linearised standard error and Student's t.
    Returns None under the same conditions as `interval`.

    It is fast, but too narrow if prompts are few and skewed. Use it only for figures on which no
    decision depends, such as those in plots.
    """
    x = measure.columns
    if len(x) < FEWEST or not np.isfinite(value := measure.value):
        return None
    error = _error(x, np.ones((1, len(x))), np.array(measure.powers, float))[1][0]
    if error < _NO_ERROR:
        return None
    reach = student(len(x) - 1) * error
    return [value * float(np.exp(-reach)), value * float(np.exp(reach))]


def joint_reach(covariance: Array, freedom: int) -> float:
    """Return the factor by which the lower ends of 95 % intervals must move outwards to keep the
    chance at 2.5 % that any of them exceeds its true value. It is 1 for one measure, and smaller
    for correlated measures than for independent ones.

    The errors are drawn from a multivariate t distribution.

    covariance: that of the errors of M measures, [M, M]; measures without error do not count.
    freedom: the degrees of freedom from which the covariance is estimated.
    """
    varying = np.diag(covariance) > 1e-24
    if freedom < 1 or varying.sum() < 2:
        return 1.0
    covariance = covariance[np.ix_(varying, varying)]
    spread = np.sqrt(np.diag(covariance))
    alike = covariance / np.outer(spread, spread)
    rng = np.random.default_rng(0)
    drawn = rng.multivariate_normal(np.zeros(len(alike)), alike, _DRAWS, "ignore", method="eigh")
    largest = drawn.max(axis=1) / np.sqrt(rng.chisquare(freedom, _DRAWS) / freedom)
    return max(1.0, float(np.quantile(largest, 0.975)) / student(freedom))


def student(freedom: int) -> float:
    """Return the 97.5 % point of Student's t. For few degrees of freedom it comes from a table.
    From 7 degrees on it comes from the Cornish-Fisher expansion, with an error of at most 0.002."""
    if freedom <= len(STUDENT):
        return STUDENT[freedom - 1]
    z, n = _NORMAL, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def _error(x: Array, weights: Array, powers: Array) -> tuple[Array, Array]:
    """Compute the logarithm of a measure and its linearised standard error in each of R resamples.
    Returns two arrays [R].

    x: the measure's columns, [N, M].
    weights: how often each prompt counts in each resample, [R, N].
    powers: the measure's powers, [M].
    """
    n = x.shape[0]
    means = weights @ x / n  # [R, M]
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(means) @ powers
        influence = (powers / means) @ x.T  # [R, N]
        mean = (weights * influence).sum(axis=1, keepdims=True) / n
        variance = (weights * (influence - mean) ** 2).sum(axis=1) / (n - 1)
        return logs, np.sqrt(variance / n)


def measured_speed(samples: Iterable[Sample]) -> SumRatio:
    """Return the measure of decoding speed: output tokens from rounds, divided by the seconds that
    these rounds took."""
    chosen = list(samples)
    return speed([s.decoded_tokens for s in chosen], [s.usual_seconds for s in chosen])


def speedup(samples: Samples, baseline: Samples) -> SumRatio | None:
    """Return the decoding speed relative to k = 0, over the prompts that both have; None if they
    have no prompt in common."""
    common = sorted(samples.keys() & baseline.keys())
    if not common:
        return None
    return measured_speed([samples[i] for i in common]).over(
        measured_speed([baseline[i] for i in common])
    )
