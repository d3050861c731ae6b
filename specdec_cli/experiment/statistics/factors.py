"""Defines the quantities that are estimated from one or two kinds of observations, and finds the
largest of several.

A measured speed-up has one kind of observation: prompts. A prediction has two: the rounds of each
prompt, and the costs of a round in each part of a time curve, which is measured in several parts
spread over the sweep. This module does not depend on engines or files.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from specdec_cli.experiment.statistics import stats
from specdec_cli.experiment.statistics.stats import Array, SumRatio

_FEW = 8  # minimum number of observations for a trimmed interval


@dataclass(frozen=True, slots=True)
class MidRatio:
    """A product or quotient of midmeans, each over one column of observations.

    A midmean is a mean without the lowest and the highest quarter, which may be outliers.

    columns: fp64 [N, M], a row for each of N observations.
    powers: for each column, +1 if its midmean is a factor, or -1 if it is a divisor.
    """

    columns: Array
    powers: tuple[int, ...]

    @property
    def value(self) -> float:
        found = list(zip(map(midmean, self.columns.T), self.powers, strict=True))
        factors, divisors = (prod(m for m, p in found if p == of) for of in (1, -1))
        return factors / divisors

    def over(self, other: "MidRatio") -> "MidRatio":
        """Divide this measure by another over the same observations."""
        both = np.concatenate((self.columns, other.columns), axis=1)
        return MidRatio(both, self.powers + tuple(-p for p in other.powers))

    def interval(self) -> list[float] | None:
        """Compute the 95 % interval; None for fewer than two observations.

        This is Yuen's interval for trimmed means (The two-sample trimmed t for unequal population
        variances, Biometrika 1974), applied to the logarithm with winsorised influence values and
        Student's t. Fewer than 8 observations are not trimmed: trimming 4, for example, would leave
        two, and therefore only one degree of freedom.
        """
        if len(self.columns) < 2:
            return None
        influence, kept = self.influence()
        error = np.sqrt(_covariance(influence[None], kept)[0, 0])
        reach = float(stats.student(kept - 1) * error)
        return [self.value * float(np.exp(-reach)), self.value * float(np.exp(reach))]

    def influence(self) -> tuple[Array, int]:
        """Return the winsorised effect of each observation on the logarithm of the measure, and the
        number of observations that are not trimmed."""
        n = len(self.columns)
        cut = n // 4 if n >= _FEW else 0
        ordered = np.sort(self.columns, axis=0)
        held = np.clip(self.columns, ordered[cut], ordered[n - 1 - cut])
        middles = np.array([midmean(column) for column in self.columns.T])
        return (held / middles) @ np.array(self.powers, float), n - 2 * cut


@dataclass(frozen=True, slots=True)
class Product:
    """A product of two independent quantities: one estimated over prompts, and one over the
    parts in which a time curve is measured."""

    prompts: SumRatio
    parts: MidRatio

    @property
    def value(self) -> float:
        return self.prompts.value * self.parts.value

    def over(self, other: "Product") -> "Product":
        """Divide this measure by another over the same prompts and parts."""
        return Product(self.prompts.over(other.prompts), self.parts.over(other.parts))

    def interval(self, seed: int) -> list[float] | None:
        """Compute the 95 % interval; None if one of the factors has none.

        The distances from the factors' values to the ends of their intervals are combined on a
        logarithmic scale, by the root of the sum of squares (Zou and Donner, Construction of
        confidence limits about effect measures, Statistics in Medicine 2008). If all prompts are
        alike, their factor has an interval of width 0.
        """
        prompts, parts = stats.interval(self.prompts, seed), self.parts.interval()
        if prompts is None and len(self.prompts.columns) >= stats.FEWEST:
            prompts = [self.prompts.value] * 2
        if prompts is None or parts is None:
            return None
        factors = np.array([[self.prompts.value], [self.parts.value]])
        low, high = np.exp(np.hypot(*np.log([prompts, parts] / factors)))
        return [self.value / float(low), self.value * float(high)]


Measure = SumRatio | Product


def interval_of(measure: Measure, seed: int) -> list[float] | None:
    """Compute the 95 % interval of either kind of measure; None if it has no interval."""
    return measure.interval(seed) if isinstance(measure, Product) else stats.interval(measure, seed)


def reach_of(measures: Sequence[Measure]) -> float:
    """Return `stats.joint_reach` of several measures of one kind over the same observations.

    Half the degrees of freedom are taken, because the errors of few, skewed prompts have longer
    tails than Student's t: `scripts/proofs/intervals.py --claims` measures the effect.
    """
    usable = [m for m in measures if np.isfinite(m.value)]
    prompts = [m.prompts if isinstance(m, Product) else m for m in usable]
    if not prompts or (count := len(prompts[0].columns)) < stats.FEWEST:
        return 1.0
    covariance = _covariance(np.stack([m.influence for m in prompts]), count)
    parts = [m.parts.influence() for m in usable if isinstance(m, Product)]
    if parts and (count := min(count, parts[0][1])) > 1:
        covariance = covariance + _covariance(np.stack([own for own, _ in parts]), parts[0][1])
    return stats.joint_reach(covariance, max(1, (count - 1) // 2))


def _covariance(influences: Array, kept: int) -> Array:
    """Compute the covariance [M, M] of the errors of M measures.

    influences: the effect of each observation on each measure, [M, N].
    kept: the number of observations that are not trimmed.
    """
    away = influences - influences.mean(axis=1, keepdims=True)
    found: Array = away @ away.T / (kept * (kept - 1))
    return found


def midmean(values: Sequence[float] | Array) -> float:
    """Compute the mean without the lowest and the highest quarter, which may be outliers."""
    ordered = np.sort(np.asarray(values, float))
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def choose(measures: Sequence[Measure], seed: int = 0) -> tuple[int, tuple[int, ...]]:
    """Find the largest of several measures over the same observations, and those tied with it at
    the 95 % level. Return its index, and the indices of all of them.

    A measure is tied if the interval of its ratio to the largest contains 1. If there is no
    interval, it is tied only if both values are equal. A measure whose value is NaN is left out,
    unless all values are NaN.
    """
    values = [m.value for m in measures]
    best = max(range(len(values)), key=lambda i: -np.inf if np.isnan(values[i]) else values[i])

    def is_tied(measure: Measure) -> bool:
        ratio = ratio_of(measure, measures[best])
        low, high = interval_of(ratio, seed) or (ratio.value, ratio.value)
        return low <= 1.0 <= high

    places = range(len(measures))
    return best, tuple(p for p in places if p == best or is_tied(measures[p]))


def ratio_of(measure: Measure, other: Measure) -> Measure:
    """Divide a measure by another of the same kind over the same observations."""
    if isinstance(measure, Product):
        assert isinstance(other, Product)
        return measure.over(other)
    assert isinstance(other, SumRatio)
    return measure.over(other)
