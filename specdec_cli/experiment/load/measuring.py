"""Measures one load point: requests that arrive at a set rate.

Requests arrive before, during and after the measured window. Only those in the window become
samples. The window also shows whether the server was overloaded, so that its queue grew and answers
fell behind, and whether the window was long enough for a confidence interval of goodput.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice

import numpy as np
import numpy.typing as npt

from specdec_cli.backends.base import Finished, Session
from specdec_cli.core.figures import Rate
from specdec_cli.core.types import Request
from specdec_cli.experiment.folders.records import Key, Sample, Stretch, given
from specdec_cli.experiment.generation import Job, requests
from specdec_cli.experiment.load.arrivals import (
    BEFORE,
    MEASURED,
    Offered,
    Process,
    gaps,
    process_of,
)
from specdec_cli.experiment.load.goodput import FEWEST
from specdec_cli.experiment.measure import sample_of

# For each request that is in flight on average, an interval needs
# `_NEEDED + _FOLLOWING * r**2` requests, where r is the correlation of latencies with the number of
# requests in flight.
_NEEDED, _FOLLOWING = 10.0, 200.0


def crowding(latencies: Iterable[Sequence[float | None]], under_way: Sequence[int]) -> float:
    """Return the number of requests that an interval needs, divided by the number in the window.
    Above 1, the window is too short.

    latencies: the latencies of every request, of each kind; None for a request without one.
    under_way: the number of requests in flight when each request arrived, itself included.

    Requests in flight together affect each other, so they are not independent observations. By
    Little's law, the mean number in flight is the number of requests that arrive while one is
    answered, and the window must hold many times as many. It must be longer still if latencies
    depend on the queue, that is, correlate with the number in flight: a queue lasts longer than one
    request.
    """
    beside = np.asarray(under_way, float)
    follows = max([0.0, *(_correlation(np.array(one, float), beside) for one in latencies)])
    return float(beside.mean()) * (_NEEDED + _FOLLOWING * follows**2) / len(beside)


def _correlation(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    """Return the correlation over the entries where `one` is known; 0 if either is constant
    there."""
    known = np.isfinite(one)
    one, other = one[known], other[known]
    spread = float(one.std() * other.std()) if len(one) else 0.0
    return float(np.mean((one - one.mean()) * (other - other.mean()))) / spread if spread else 0.0


_ERRORS, _GROWTH, _REQUESTS = 2.0, 1.2, 2.0
_SHARE = 0.95
_BLOCKS = 4  # blocks in each third of the arrivals


def stretch_of(
    key: Key,
    num_measured: int,
    due: Mapping[int, float],
    done: Mapping[int, float],
    latencies: Iterable[Sequence[float | None]] = (),
    failed: Collection[int] = (),
) -> Stretch:
    """Make the record of a point's measured window.

    due, done: when each request was due, and when it was answered, by the request's number, in
    seconds on one clock. The measured requests have the lowest numbers. Requests that were due
    after the last measured request was answered were never sent, and are ignored.
    latencies: the latencies of the measured requests, of each kind.
    failed: the numbers of requests whose answers are errors. They are no longer in flight, but do
    not count as answered.
    """
    measured = [due[number] for number in range(num_measured)]
    begin, span = measured[0], measured[-1] - measured[0]
    end = max(done[number] for number in range(num_measured))
    window = span * num_measured / (num_measured - 1) if num_measured > 1 else 0.0
    if not window:
        window = end - begin
    due = {number: at for number, at in due.items() if at <= max(end, measured[-1])}
    ended = [number for number, at in done.items() if begin <= at <= begin + window]
    num_answered = sum(number not in failed for number in ended)
    arrived = [due[number] for number in sorted(due, key=due.__getitem__)]
    ends = [done.get(number, float("inf")) for number in due]
    under_way = in_flight(arrived, ends, measured)
    at_rate = key.request_rate != "inf"
    return Stretch(
        **key.as_dict(),
        window_seconds=window,
        num_requests=num_measured,
        num_answered=num_answered,
        num_unmeasured=len(due) - num_measured,
        max_in_flight=max(in_flight(arrived, ends, arrived)),
        overloaded=at_rate and is_overloaded(under_way, num_answered),
        crowding=crowding(latencies, under_way) if at_rate else 0.0,
    )


def in_flight(due: Sequence[float], done: Sequence[float], at: Sequence[float]) -> list[int]:
    """Count the requests in flight at each time in `at`: those that were due by then but not yet
    answered.

    due: when each request was due.
    done: when each request was answered; infinity if it never was.
    """
    times = np.asarray(at, float)
    arrived, answered = (
        np.searchsorted(np.sort(np.asarray(of, float)), times, side="right") for of in (due, done)
    )
    return [int(count) for count in arrived - answered]


def is_overloaded(under_way: Sequence[int], num_answered: int) -> bool:
    """Return True if the queue kept growing and answers fell behind arrivals, both beyond chance.

    under_way: the number of requests in flight at each measured arrival, in order.
    num_answered: the number of answers within the window.

    The mean number in flight must grow from the first third of arrivals to the last by at
    least two requests, at least a fifth, and more than two standard errors of block means. It must
    also grow from the second third to the last, since it would fall again after a mere burst.

    Successive queue lengths are correlated, which makes these standard errors too small. A second
    sign is therefore required: fewer than 95 % of the requests are answered within the window, and
    the number of missing answers exceeds two standard errors of the difference of two Poisson
    counts whose mean is the number in flight in the first third.
    """
    count = len(under_way)
    if count < FEWEST or num_answered >= _SHARE * count:
        return False
    first, middle, last = (
        np.array([part.mean() for part in np.array_split(third, _BLOCKS)])
        for third in np.array_split(np.asarray(under_way, float), 3)
    )
    grown = last.mean() - first.mean()
    error = ((first.var(ddof=1) + last.var(ddof=1)) / _BLOCKS) ** 0.5
    behind = _ERRORS * (2 * max(1.0, first.mean())) ** 0.5
    return bool(
        grown >= max(_REQUESTS, (_GROWTH - 1) * first.mean())
        and grown > _ERRORS * error
        and last.mean() > middle.mean()
        and count - num_answered > behind
    )


_BEFORE = 10  # at least one request before the window for every `_BEFORE` measured ones


@dataclass(slots=True, eq=False)
class Stream:
    """The requests of a load point in the order of their arrival, cycling through the prompts; see
    `core.types.Arrivals`.

    They arrive in three phases:
    - Before the window, to fill the queue. This phase ends once all requests that were under way at
      the first answer are answered. It has at least a tenth as many requests as the window, and at
      most as many, unless the first answer takes even longer.
    - The measured window. The gaps between its requests are the same in every stream at this rate.
    - After the window, to keep up the load until all measured requests are answered. This phase has
      at most as many requests as the window.
    At the rate inf, only the measured requests arrive.

    Measured requests are numbered from 0, those after the window continue the numbers, and those
    before the window have the highest numbers.

    due: when each request is due, in seconds after the start, by its number.
    done: when it was answered, on the clock `time.perf_counter`, by its number.
    failed: the numbers of requests whose answers are errors.
    """

    prompts: Sequence[Request]
    process: Process
    rate: Rate
    num_measured: int
    seed: int
    due: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    _left: int = 0
    _first: frozenset[int] | None = None  # requests under way at the first answer
    _requests: Iterator[Request] = field(init=False)

    def __post_init__(self) -> None:
        self._left, self._requests = self.num_measured, self._all()

    def __iter__(self) -> Iterator[Request]:
        return self._requests

    @property
    def is_over(self) -> bool:
        return not self._left

    def answered(self, number: int, *, has_failed: bool = False) -> None:
        self.done[number] = time.perf_counter()
        if has_failed:
            self.failed.add(number)
        self._left -= number < self.num_measured
        if self._first is None:
            self._first = frozenset(list(self.due)[:-1])  # the last request is not due yet

    def _all(self) -> Iterator[Request]:
        whole, at = self.num_measured, 0.0
        if self.rate != "inf":
            before = gaps(self.process, self.rate, self.seed, BEFORE)
            fewest = -(-whole // _BEFORE)
            for place, gap in enumerate(before):
                is_full = self._first is not None and (
                    place >= whole or self._first <= self.done.keys()
                )
                if place >= fewest and is_full:
                    break
                at += gap
                yield self._request(2 * whole + place, place, at)
        most = whole if self.rate == "inf" else 2 * whole
        following = gaps(self.process, self.rate, self.seed, MEASURED)
        for number, gap in zip(count(), islice(following, most), strict=False):
            if self.is_over:
                return
            at += gap
            yield self._request(number, number, at)

    def _request(self, number: int, place: int, due: float) -> Request:
        self.due[number] = due
        return replace(self.prompts[place % len(self.prompts)], index=number, arrives_at=due)


def measure_at_rate(
    key: Key,
    job: Job,
    offered: Offered,
    session: Session,
    peak_memory: Callable[[], int],
    on_sign: Callable[[], None],
) -> tuple[list[Sample], Stretch, float]:
    """Measure requests that arrive at the key's rate. Every rank calls this.

    Return the point's samples, the record of its window, and the seconds spent in rounds and
    prefill passes, including those of requests that are not measured.
    """
    assert key.request_rate is not None
    repeats, params = job.plan.recipe.run.repeats, job.plan.params
    stream = Stream(
        prompts=requests(job),
        process=process_of(offered.arrivals),
        rate=key.request_rate,
        num_measured=offered.num_measured(len(job.prompts), repeats, key.request_rate),
        seed=offered.seed,
    )
    found = {one.index: one for one in session.arrive(stream, key.k, params, on_sign)}
    start = found[0].arrived_at - stream.due[0]
    due = {number: start + at for number, at in stream.due.items()}
    samples = []
    for number in range(stream.num_measured):
        prompt = job.prompts[number % len(job.prompts)]
        own = found[number]
        made = sample_of(key, prompt.category, [own], params.max_new_tokens, peak_memory())
        update: dict[str, object] = {"index": prompt.index, "request": number}
        update |= {"due": own.arrived_at - due[0], **_from_due(own)}
        if made.counted is not None:
            update["counted"] = None
        samples.append(made.model_copy(update=update))
    last = next((n for n in reversed(range(len(samples))) if samples[n].could_run), None)
    if last is not None:
        samples[last] = _with_common(samples[last], list(found.values()))
    names = {"e2el_ms", *offered.slo}
    latencies = [[next(iter(getattr(s, name)), None) for s in samples] for name in names]
    stretch = stretch_of(
        key, stream.num_measured, due, stream.done, latencies, failed=stream.failed
    )
    return samples, stretch, sum(one.seconds for one in found.values())


def _with_common(sample: Sample, found: Sequence[Finished]) -> Sample:
    """Add to a sample the acceptance that the server counted and the codes of warnings about the
    server, taken from the answers to all requests of its point.

    Only one of the answers carries the counts. They include requests that are not measured, and are
    added only if acceptance is known from counters alone, not from the rounds of each request.
    """
    served = [one.served for one in found if one.served is not None]
    remarks = sorted({code for one in served for code in one.remarks} - {*sample.remarks})
    counted = next((one.counted for one in served if one.counted is not None), None)
    if sample.engine is None or sample.engine.acceptance_source != "counters":
        counted = None
    every = [*sample.remarks, *remarks] or None
    return sample.model_copy(update=given(counted=counted, remarks=every))


def _from_due(own: Finished) -> dict[str, object]:
    """Compute a request's latencies from its due time on, so that they include the wait for a slot.

    `ttft_ms` and `e2el_ms` are lists, which are empty if the request failed or the time is unknown.
    """
    lag = own.served.send_lag_ms if own.served is not None else None
    first, last = (
        [] if at is None or own.error is not None else [(at - own.arrived_at) * 1e3]
        for at in (own.first_token_at, own.finished_at)
    )
    return {"ttft_ms": first, "e2el_ms": last, **given(send_lag_ms=lag)}
