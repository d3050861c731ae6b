"""Shares of requests that meet objectives, with intervals over blocks of consecutive arrivals.

Neighbours share a queue, so requests are not independent observations. Long blocks are nearly
independent.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from specdec_cli.experiment.statistics.stats import student

FEWEST = 16  # fewest requests for an interval
WIDEST = 2.3  # largest widening with which an interval is given
_FEWEST_BLOCKS, _MOST_BLOCKS = 8, 20
_LONG = 200  # a larger block is split into more blocks
_MOST_LIKENESS = 0.8
_FEW = 10  # with fewer good or fewer bad requests, blocks show too little


def meets(objectives: Mapping[str, float], latencies: Mapping[str, float | None]) -> bool:
    """True if an answered request meets every objective. Objectives and latencies are in
    milliseconds, by name.

    A request fails an objective whose figure is missing. The exception is `tpot_ms`, which a text
    of one token does not have.
    """
    return all(
        name == "tpot_ms" if (found := latencies.get(name)) is None else found <= most
        for name, most in objectives.items()
    )


def blocks(count: int) -> list[slice]:
    """8 to 20 blocks of consecutive requests, whose sizes differ by at most one. The list is empty
    for fewer than 16 requests."""
    if count < FEWEST:
        return []
    number = min(_MOST_BLOCKS, max(_FEWEST_BLOCKS, count // _LONG))
    ends = [place * count // number for place in range(number + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def block_means(values: Sequence[float]) -> list[float]:
    """The mean of each block; empty for too few requests."""
    return [float(np.mean(values[block])) for block in blocks(len(values))]


def mean_interval(means: Sequence[float]) -> list[float] | None:
    """Student's 95 % interval of the mean over blocks; None without blocks.

    The interval is widened by the correlation of neighbouring blocks, as for an autoregressive
    process. The estimated correlation is too low by 1 / blocks on average, so this is added to it
    (Kendall 1954).
    """
    if len(means) < _FEWEST_BLOCKS:
        return None
    middle, reach = float(np.mean(means)), _reach(means)
    return [middle - reach, middle + reach]


def _reach(means: Sequence[float]) -> float:
    """Half the width of the interval that `mean_interval` returns."""
    count, away = len(means), np.asarray(means, float) - np.mean(means)
    if not (spread := float(away @ away)):
        return 0.0
    likeness = float(away[1:] @ away[:-1]) / spread + 1 / count
    likeness = min(max(likeness, 0.0), _MOST_LIKENESS)
    return _student_reach(means) * float(np.sqrt((1 + likeness) / (1 - likeness)))


def _student_reach(means: Sequence[float]) -> float:
    """Half the width of Student's 95 % interval over blocks that are independent of each other."""
    return float(student(len(means) - 1) * np.std(means, ddof=1) / len(means) ** 0.5)


def ratio_interval(one: Sequence[float], other: Sequence[float]) -> list[float] | None:
    """The 95 % interval of the ratio of two means over the same requests, such as times at two k.
    It uses the linearised difference of each block. None for too few requests."""
    if len(one) < FEWEST:
        return None
    upper, lower = float(np.mean(one)), float(np.mean(other))
    pairs = zip(block_means(one), block_means(other), strict=True)
    reach = float(np.exp(_reach([a / upper - b / lower for a, b in pairs])))
    return [upper / lower / reach, upper / lower * reach]


def share_interval(met: Sequence[bool], widening: float = 1.0) -> list[float] | None:
    """The 95 % interval of a share of requests, within 0 and 1; None for too few requests.
    widening: that of `Crowding`.

    The more requests are good, the more the interval is widened: few bad requests come together
    when the server is crowded. If few requests are good, or few are bad, blocks may be alike by
    chance. Then the interval reaches at least as far as for independent requests.
    `scripts/proofs/load.py` shows the coverage on simulated servers.
    """
    if not (means := block_means([float(one) for one in met])):
        return None
    middle = float(np.mean(met))
    reach = _student_reach(means) * (1 + (widening - 1) * middle)
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
