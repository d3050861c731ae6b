"""The measured window of one point at a rate, from the times of all its requests.

It says too whether arrivals outran the server: its queue grew over the window, and answers fell
behind; and how much requests crowd each other. The number of them under way drifts back to its mean
at the rate (1 - elasticity) / latency, by Little's law, where elasticity says by how many per cent
a request takes longer if one per cent more are under way: 0 where none disturbs another, near 1
where a server is nearly full.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specdec_cli.experiment.folders.records import Key, Stretch
from specdec_cli.experiment.load.goodput import FEWEST

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


_ERRORS, _GROWTH, _REQUESTS = 2.0, 1.2, 2.0
_SHARE = 0.95
_BLOCKS = 4  # of each third


def stretch_of(
    key: Key, num_measured: int, due: Mapping[int, float], done: Mapping[int, float]
) -> Stretch:
    """due, done: by number, in seconds on one clock; the measured ones have the first numbers. What
    is due once these are answered was not sent."""
    measured = [due[number] for number in range(num_measured)]
    begin, span = measured[0], measured[-1] - measured[0]
    end = max(done[number] for number in range(num_measured))
    window = span * num_measured / (num_measured - 1) if num_measured > 1 else 0.0
    if not window:
        window = end - begin
    due = {number: at for number, at in due.items() if at <= max(end, measured[-1])}
    num_answered = sum(begin <= at <= begin + window for at in done.values())
    arrived = [due[number] for number in sorted(due, key=due.__getitem__)]
    ends = [done.get(number, float("inf")) for number in due]
    under_way = in_flight(arrived, ends, measured)
    took = [done[number] - due[number] for number in range(num_measured)]
    order = sorted(range(num_measured), key=measured.__getitem__)
    crowd = crowding([took[i] for i in order], [under_way[i] for i in order])
    return Stretch(
        **key.as_dict(),
        window_seconds=window,
        num_requests=num_measured,
        num_answered=num_answered,
        num_unmeasured=len(due) - num_measured,
        max_in_flight=max(in_flight(arrived, ends, arrived)),
        overloaded=key.request_rate != "inf" and is_overloaded(under_way, num_answered),
        widening=crowd.widening,
        autocorrelated=crowd.is_lasting,
    )


def in_flight(due: Sequence[float], done: Sequence[float], at: Sequence[float]) -> list[int]:
    """Requests under way at each of some times: due by then, and not done. done: infinity if
    never."""
    times = np.asarray(at, float)
    arrived, answered = (
        np.searchsorted(np.sort(np.asarray(of, float)), times, side="right") for of in (due, done)
    )
    return [int(count) for count in arrived - answered]


def is_overloaded(under_way: Sequence[int], num_answered: int) -> bool:
    """Whether requests under way keep growing beyond chance, and answers come more slowly.

    under_way: at each measured arrival, in order. num_answered: answers within the window, which
    has one arrival for each. They have to grow from the first third to the last by two requests,
    a fifth, and two standard errors of the means of blocks. These errors are too small, since a
    queue remembers: so answers also have to fall behind by two standard errors of the difference of
    two Poisson counts of the requests under way, and by 5 %.
    """
    count = len(under_way)
    if count < FEWEST or num_answered >= _SHARE * count:
        return False
    thirds = under_way[: count // 3], under_way[-(count // 3) :]
    first, last = (
        np.array([part.mean() for part in np.array_split(np.asarray(third, float), _BLOCKS)])
        for third in thirds
    )
    grown = last.mean() - first.mean()
    error = ((first.var(ddof=1) + last.var(ddof=1)) / _BLOCKS) ** 0.5
    behind = _ERRORS * (2 * max(1.0, first.mean())) ** 0.5
    return bool(
        grown >= max(_REQUESTS, (_GROWTH - 1) * first.mean())
        and grown > _ERRORS * error
        and count - num_answered > behind
    )
