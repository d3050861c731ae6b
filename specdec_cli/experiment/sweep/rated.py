"""A sweep's points at rates, each in one stretch."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from specdec_cli.backends.base import Session
from specdec_cli.experiment.folders.records import Key
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.load.measuring import measure_at_rate
from specdec_cli.experiment.measure import Guard, MeasuringLoop, Watcher
from specdec_cli.experiment.sweep.sweep_records import SweepClock, SweepRecords, SweepSettings
from specdec_cli.launch.world import World


@dataclass(slots=True)
class Rated:
    """Measures points at rates and keeps their records. guard: as of `MeasuringLoop`."""

    settings: SweepSettings
    world: World
    records: SweepRecords
    watcher: Watcher
    guard: Guard
    peak_memory: Callable[[], int]
    clock: SweepClock
    _warm: set[tuple[str | None, int]] = field(default_factory=set)

    def measure(self, key: Key, job: Job, session: Session) -> None:
        """Measure a point, warmed up by a closed batch where its k is new."""
        if (key.draft, key.k) not in self._warm:
            self._begin("warming up")
            loop = MeasuringLoop(
                lambda _: session, self.world, lambda *_: None, self.peak_memory, self.guard
            )
            loop.warm_up({key: job})
            self._warm.add((key.draft, key.k))
        self._begin("measuring")
        began, processor = time.perf_counter(), time.process_time()
        self.guard(key, partial(self._stretch, key, job, session))
        self.clock.measuring += time.perf_counter() - began
        self.clock.processor += time.process_time() - processor

    def _stretch(self, key: Key, job: Job, session: Session) -> None:
        offered = self.settings.offered
        assert offered is not None
        found = measure_at_rate(key, job, offered, session, self.peak_memory, self.world.beat)
        self.clock.rounds += found.seconds
        self.records.add(*found.samples)
        self.records.add(found.stretch)  # with which they count
        with self.world.outside():
            for sample in found.samples:
                self.watcher.sample(key, sample)

    def _begin(self, what: str) -> None:
        with self.world.outside():
            self.watcher.begin(what)
