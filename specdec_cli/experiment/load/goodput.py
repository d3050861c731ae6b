"""Computes the share of requests that meet the latency objectives, and its confidence interval.

Neighbouring requests share a queue, so they are not independent observations. Intervals are
therefore computed over the means of long blocks of consecutive requests, which are nearly
independent.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from specdec_cli.experiment.statistics.stats import student

FEWEST = 16  # minimum number of requests for an interval
_FEWEST_BLOCKS, _MOST_BLOCKS = 8, 20
_LONG = 200  # more than `_FEWEST_BLOCKS` blocks are used only if each has this many requests
_MOST_LIKENESS = 0.8
# The constants below were tuned on simulated servers. `scripts/proofs/load.py` measures the
# coverage of the intervals on these servers and on others.
# The lower end of an interval assumes that the window missed some failing requests by chance. In
# the shortest allowed window (crowding 1), it assumes this many for each measured request.
_MISSED = 6.0
# At the upper end, Student's t is multiplied by `_UPPER` in long windows, and by `_UPPER - _LESS`
# in the shortest. Factors below 1 are possible because the lower end rarely exceeds the true share,
# and even more rarely in short windows, so that most of the allowed 5 % of misses are left to the
# upper end.
_UPPER, _LESS = 0.92, 0.25
# For each unit of crowding, the end of a ratio's interval that is nearer to 1 moves outwards by
# _NEARER, and the other end by _FARTHER. The latter is larger, because a window without bursts of
# requests shows too small a difference: the slower point does not queue in it.
_NEARER, _FARTHER = 0.2, 2.0


def meets(objectives: Mapping[str, float], latencies: Mapping[str, float | None]) -> bool:
    """Return True if an answered request meets every objective. Objectives and latencies
    are in milliseconds, by name.

    A request fails an objective whose latency is missing. The exception is `tpot_ms`, which is
    undefined for a text of one token.
    """
    return all(
        name == "tpot_ms" if (found := latencies.get(name)) is None else found <= most
        for name, most in objectives.items()
    )


def blocks(count: int) -> list[slice]:
    """Split `count` requests into 8 to 20 blocks of consecutive ones, whose sizes differ by at most
    one. Return an empty list for fewer than 16 requests."""
    if count < FEWEST:
        return []
    number = min(_MOST_BLOCKS, max(_FEWEST_BLOCKS, count // _LONG))
    ends = [place * count // number for place in range(number + 1)]
    return [slice(*pair) for pair in pairwise(ends)]


def block_means(values: Sequence[float]) -> list[float]:
    """Return the mean of the values in each block; an empty list for too few requests."""
    return [float(np.mean(values[block])) for block in blocks(len(values))]


def mean_interval(
    means: Sequence[float], crowding: float = 0.0, reach: float = 1.0
) -> list[float] | None:
    """Return Student's 95 % interval of the mean over blocks; None without blocks.

    crowding: the result of `measuring.crowding`.
    reach: the factor by which the ends move away from the mean; see `stats.joint_reach`.

    The interval is widened to allow for the correlation of neighbouring blocks, which are modelled
    as a first-order autoregressive process. The estimated correlation is on average too low by
    1 / (number of blocks) (Kendall 1954), so this amount is added to it.
    """
    if len(means) < _FEWEST_BLOCKS:
        return None
    middle, half = float(np.mean(means)), reach * (1 + _NEARER * crowding) * _reach(means)
    return [middle - half, middle + half]


def _reach(means: Sequence[float]) -> float:
    """Return half the width of the interval that `mean_interval` computes."""
    count, away = len(means), np.asarray(means, float) - np.mean(means)
    if not (spread := float(away @ away)):
        return 0.0
    likeness = float(away[1:] @ away[:-1]) / spread + 1 / count
    likeness = min(max(likeness, 0.0), _MOST_LIKENESS)
    error = float(np.std(means, ddof=1) * np.sqrt((1 + likeness) / (1 - likeness) / count))
    return student(count - 1) * error


def differences(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the block means of the difference `one[i] / mean(one) - other[i] / mean(other)`. To
    first order, the logarithm of the ratio of the two means varies like the mean of it."""
    upper, lower = (float(np.mean(of)) if len(of) else 1.0 for of in (one, other))
    pairs = zip(block_means(one), block_means(other), strict=True)
    return [a / upper - b / lower for a, b in pairs]


def ratio_interval(
    one: Sequence[float], other: Sequence[float], crowding: float = 0.0, reach: float = 1.0
) -> list[float] | None:
    """Return the 95 % interval of the ratio of two means over the same requests, such as their
    times at two k. Return None for too few requests.

    crowding: the larger result of `measuring.crowding` of the two. Above 1, only the end that is
        nearer to 1 holds.
    reach: the factor by which the ends move away from the ratio; see `stats.joint_reach`.
    """
    if len(one) < FEWEST:
        return None
    value = float(np.mean(one)) / float(np.mean(other))
    half = reach * _reach(differences(one, other))
    low, high = half * (1 + _NEARER * crowding), half * (1 + _FARTHER * crowding)
    if value < 1:
        low, high = high, low
    return [value / float(np.exp(low)), value * float(np.exp(high))]


def share_interval(met: Sequence[bool], crowding: float = 0.0) -> list[float] | None:
    """Return the 95 % interval of the share of requests that meet the objectives, clipped
    to [0, 1]. Return None if there are too few requests, or if `crowding` exceeds 1.

    met: for each request, in order of arrival, whether it met the objectives.
    crowding: the result of `measuring.crowding`.

    The ends are those of Wilson's interval (1927), with Student's t and the variance over blocks.
    Failures cluster while the queue is long, so a short window may miss them by chance. The lower
    end is therefore computed as if some more requests had failed.
    """
    means = block_means([float(one) for one in met])
    if not means or crowding > 1:
        return None
    count, share, freedom = len(met), float(np.mean(met)), len(means)
    # The variance of `share` if requests were independent. It is added like one more block, so that
    # blocks that happen to be equal do not give a variance of 0.
    alone = share * (1 - share) / count
    variance = (float(np.var(means)) + alone) / freedom
    size = count * alone / variance if alone else float(count)
    reach = student(freedom)
    low, _ = _wilson(share / (1 + _MISSED * crowding**2), size, reach)
    _, high = _wilson(share, size, (_UPPER - _LESS * crowding) * reach)
    return [low, max(share, high)]  # for a share of 1, rounding may put `high` below 1


def _wilson(share: float, size: float, reach: float) -> tuple[float, float]:
    """Compute Wilson's interval for a share of `size` independent requests.

    reach: the half-width in standard errors.
    """
    rare = reach**2 / size
    middle = (share + rare / 2) / (1 + rare)
    half = (rare * (share * (1 - share) + rare / 4)) ** 0.5 / (1 + rare)
    return max(0.0, middle - half), min(1.0, middle + half)
