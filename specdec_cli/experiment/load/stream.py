"""The requests of one point at a rate: those before the measured ones, these, and those after."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, islice

from specdec_cli.core.figures import Rate
from specdec_cli.core.types import Request
from specdec_cli.experiment.load.arrivals import BEFORE, MEASURED, Process, gaps

_BEFORE = 10  # one request before so many that are measured


@dataclass(slots=True, eq=False)
class Stream:
    """Requests as they come, prompts in turn; see `core.types.Arrivals`.

    The measured ones have numbers from 0, and those after them go on; numbers of those before lie
    behind both. Requests come before until so many are answered as were under way at the first
    answer, so that the queue is as full as it gets: at least a tenth, and at most as many as are
    measured. Then the measured ones begin, at due times that are the same in every stream of a
    rate. At most as many come after them, until all measured ones are answered.

    due: by number, in seconds after the start. done: by number, on `time.perf_counter`.
    """

    prompts: Sequence[Request]
    process: Process
    rate: Rate
    num_measured: int
    seed: int
    due: dict[int, float] = field(default_factory=dict)
    done: dict[int, float] = field(default_factory=dict)
    _left: int = 0
    _first: frozenset[int] | None = None  # under way at the first answer
    _requests: Iterator[Request] = field(init=False)

    def __post_init__(self) -> None:
        self._left, self._requests = self.num_measured, self._all()

    def __iter__(self) -> Iterator[Request]:
        return self._requests

    @property
    def is_over(self) -> bool:
        return not self._left

    def answered(self, number: int) -> None:
        self.done[number] = time.perf_counter()
        self._left -= number < self.num_measured
        if self._first is None:
            self._first = frozenset(list(self.due)[:-1])  # the last is not due yet

    def _all(self) -> Iterator[Request]:
        whole, at = self.num_measured, 0.0
        if self.rate != "inf":
            before = gaps(self.process, self.rate, self.seed, BEFORE)
            fewest = -(-whole // _BEFORE)
            for place, gap in enumerate(islice(before, whole)):
                if place >= fewest and self._first is not None and self._first <= self.done.keys():
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
