"""Shares of requests that meet objectives, with intervals over blocks of consecutive arrivals.

Neighbours share a queue, so requests are not independent observations. Long blocks are nearly
independent.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from specdec_cli.experiment.statistics.stats import student

FEWEST = 16  # fewest requests for an interval
_FEWEST_BLOCKS, _MOST_BLOCKS = 8, 20
_LONG = 200  # a larger block is split into more blocks
_MOST_LIKENESS = 0.8
_FEW = 10  # good requests, or bad ones, below which blocks tell too little


def meets(objectives: Mapping[str, float], latencies: Mapping[str, float | None]) -> bool:
    """Whether an answered request meets every objective, both in milliseconds by name.

    A text of one token has no `tpot_ms` and meets any objective for it. With any other missing
    figure a request fails its objective.
    """
    return all(
        name == "tpot_ms" if (found := latencies.get(name)) is None else found <= most
        for name, most in objectives.items()
    )


def blocks(count: int) -> list[slice]:
    """8 to 20 blocks of consecutive requests, whose sizes differ by at most one; none below 16
    requests."""
    if count < FEWEST:
        return []
    number = min(_MOST_BLOCKS, max(_FEWEST_BLOCKS, count // _LONG))
    ends = [place * count // number for place in range(number + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def block_means(values: Sequence[float]) -> list[float]:
    """The mean of each block; none for too few requests."""
    return [float(np.mean(values[block])) for block in blocks(len(values))]


def mean_interval(means: Sequence[float]) -> list[float] | None:
    """Student's 95 % interval of the mean over blocks; None without blocks.

    The interval is widened by the correlation of neighbouring blocks, as for an autoregressive
    process. 1 / blocks is added to the correlation, which is too low by as much on average (Kendall
    1954). `scripts/proofs/load.py` has the coverage with queues.
    """
    if len(means) < _FEWEST_BLOCKS:
        return None
    middle, reach = float(np.mean(means)), _reach(means)
    return [middle - reach, middle + reach]


def _reach(means: Sequence[float]) -> float:
    """Half the width of the interval."""
    count, away = len(means), np.asarray(means, float) - np.mean(means)
    if not (spread := float(away @ away)):
        return 0.0
    likeness = float(away[1:] @ away[:-1]) / spread + 1 / count
    likeness = min(max(likeness, 0.0), _MOST_LIKENESS)
    error = (spread / (count - 1) / count * (1 + likeness) / (1 - likeness)) ** 0.5
    return float(student(count - 1) * error)


def ratio_interval(one: Sequence[float], other: Sequence[float]) -> list[float] | None:
    """The interval of a ratio of two means over the same requests, such as times at two k. It uses
    the linearised difference of each block. None for too few requests."""
    if len(one) < FEWEST:
        return None
    upper, lower = float(np.mean(one)), float(np.mean(other))
    pairs = zip(block_means(one), block_means(other), strict=True)
    reach = float(np.exp(_reach([a / upper - b / lower for a, b in pairs])))
    return [upper / lower / reach, upper / lower * reach]


def share_interval(met: Sequence[bool], widening: float = 1.0) -> list[float] | None:
    """The interval of a share, within 0 and 1. widening: that of `crowding`.

    Blocks with few good requests, or few bad ones, are alike by chance. So the interval then
    reaches at least as far as that of independent requests.
    """
    found = mean_interval(block_means([float(one) for one in met]))
    if found is None:
        return None
    middle, reach = sum(found) / 2, (found[1] - found[0]) / 2 * widening
    low, high = max(0.0, middle - reach), min(1.0, middle + reach)
    if min(sum(met), len(met) - sum(met)) < _FEW:
        ends = _of_independent(sum(met), len(met))
        low, high = min(low, ends[0]), max(high, ends[1])
    return [low, high]


def _of_independent(good: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share of independent requests (Wilson 1927)."""
    share, rare = good / count, student(1 << 30) ** 2 / count
    middle = (share + rare / 2) / (1 + rare)
    reach = (rare * (share * (1 - share) + rare / 4)) ** 0.5 / (1 + rare)
    return max(0.0, middle - reach), min(1.0, middle + reach)
