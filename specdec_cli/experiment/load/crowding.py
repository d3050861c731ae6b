"""Crowding: requests that wait for each other, and a queue that remembers longer than a window.

The number of requests under way drifts back to its mean at the rate (1 - elasticity) / latency, by
Little's law, where elasticity says by how many per cent a request takes longer if one per cent more
are under way: 0 where none disturbs another, near 1 where a server is nearly full.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_FREE = 0.15  # elasticity up to which any window will do
_NEEDED = 150.0  # memories that a window has to last, for each unit of elasticity above that
_MOST = 0.9  # elasticity that intervals are widened for
_POWER = 0.75  # of 1 / (1 - elasticity), by which they are widened


@dataclass(frozen=True, slots=True)
class Crowding:
    """widening: by which intervals over blocks are too narrow. is_lasting: whether the window is
    too short for an interval.

    The constants are those with which `scripts/proofs/load.py` finds honest intervals.
    """

    widening: float = 1.0
    is_lasting: bool = False


def crowding(latencies: Sequence[float], under_way: Sequence[int]) -> Crowding:
    """The crowding of a window, from its requests in order.

    latencies: seconds that each took. under_way: requests under way when it came, itself included.
    """
    took, beside = np.asarray(latencies, float), np.asarray(under_way, float)
    if not len(took) or not (spread := float(beside.var())) or not took.mean():
        return Crowding()
    away, scale = beside - beside.mean(), float(beside.mean() / took.mean())
    slope = float(np.mean(away * took) / spread)
    rest = took - took.mean() - slope * away
    elasticity = slope * scale
    error = float((rest.var() / spread / len(took)) ** 0.5) * scale
    upper = min(max(elasticity + error / 2, 0.0), 1.0)
    memories = len(took) * (1 - upper) / (2 * float(beside.mean()))
    return Crowding(
        widening=(1 - min(max(elasticity, 0.0), _MOST)) ** -_POWER,
        is_lasting=memories < _NEEDED * (upper - _FREE),
    )
