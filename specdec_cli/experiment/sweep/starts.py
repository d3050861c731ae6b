"""Running a sweep on servers that are started for it, one after another, each for all batch sizes.

A server has one k, so arms take turns by starts, not by prompts. Knows no server's commands.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from specdec_cli.backends.base import Prepared
from specdec_cli.errors import Notice, RunError
from specdec_cli.experiment.folders.records import Key, Point, Sample
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.measure import MeasuringLoop, Watcher, units_of
from specdec_cli.experiment.points import Failure
from specdec_cli.experiment.sweep.document import points_at
from specdec_cli.experiment.sweep.rated import Rated
from specdec_cli.experiment.sweep.sweep_plan import SweepPlan
from specdec_cli.experiment.sweep.sweep_records import SweepClock, SweepRecords
from specdec_cli.launch.world import World

_log = logging.getLogger("specdec")


class Starter(Protocol):
    """Starts and stops servers."""

    notices: list[Notice]

    def start(self, plan: Prepared, k: int, told: Callable[[str], None]) -> None:
        """Start the server of a k, and wait until it is healthy. Raises `RunError` if it ends
        before, or is not in time."""

    def stop(self) -> None:
        """End the server that runs, if any."""


class StartedSweep:
    """Runs a plan as `Sweep` does; its jobs' backend starts servers."""

    def __init__(
        self,
        plan: SweepPlan,
        records: SweepRecords,
        watcher: Watcher,
        world: World,
        starter: Starter,
    ) -> None:
        self.plan = plan
        self.records = records
        self.watcher = watcher
        self.world = world
        self.failures: dict[Key, Failure] = {}
        self.clock = SweepClock()
        self.check = None
        self._starter = starter

    @property
    def notices(self) -> list[Notice]:
        return self._starter.notices

    def run(self) -> list[Point]:
        """Measure what is not recorded yet. Returns the points of the whole sweep."""
        settings = self.plan.settings
        jobs = {job.plan.proposer: job for job in self.plan.jobs}
        for first in settings.keys(settings.batch_sizes[0], settings.ks):
            job = jobs.get(first.draft, self.plan.jobs[0])
            keys = [replace(first, batch_size=b, request_rate=r) for b, r in settings.levels]
            if missing := [key for key in keys if self._missing(key, job)]:
                self._on_a_server(missing, job)
        points: list[Point] = []
        for size, rate in settings.levels:
            found = points_at(settings, self.records, size, self.failures, rate)
            for point in found:
                self.records.add_point(point)
            self.watcher.points(found)
            points += found
        return points

    def _missing(self, key: Key, job: Job) -> set[int]:
        if key.request_rate is not None and self.records.stretches[key]:
            return set()
        return {p.index for p in job.prompts} - self.records.samples[key].keys()

    def _on_a_server(self, keys: list[Key], job: Job) -> None:
        """Start the server of these points, of several batch sizes or rates, and measure them."""
        try:
            self.watcher.begin("starting a server")
            self._starter.start(job.plan, keys[0].k, self.watcher.told)
            began, processor = time.perf_counter(), time.process_time()
            session = job.backend.open_session(job.plan, job.longest_prompt, self.watcher.begin)
            loop = MeasuringLoop(
                lambda key: session.resized(key.batch_size),
                self.world,
                self._keep,
                lambda: 0,
                self._guarded,
            )
            rated = Rated(
                *(self.plan.settings, self.world, self.records, self.watcher),
                *(self._guarded, lambda: 0, self.clock),
            )
            for key in keys:
                if key.request_rate is not None:
                    rated.measure(key, job, session.resized(key.batch_size))
                    continue
                self.watcher.begin("warming up")
                loop.warm_up({key: job})
                self.watcher.begin("measuring")
                for number, unit in enumerate(units_of(job, key.batch_size)):
                    left = unit.only(self._missing(key, job).__contains__)
                    loop.measure({key: left} if left.prompts else {}, number)
            if keys[0].request_rate is None:
                self.clock.rounds += loop.seconds
                self.clock.measuring += time.perf_counter() - began
                self.clock.processor += time.process_time() - processor
        except RunError as problem:
            for key in keys:
                self.failures.setdefault(key, Failure("failed", problem.message))
        finally:
            self._starter.stop()

    def _guarded(self, key: Key, run: Callable[[], object]) -> None:
        """Run a part of a point, unless its server died in an earlier one."""
        if key in self.failures:
            return
        try:
            run()
        except RunError as problem:
            _log.debug("k = %d at batch size %d", key.k, key.batch_size, exc_info=problem)
            self.failures[key] = Failure("failed", problem.message)

    def _keep(self, key: Key, samples: list[Sample]) -> None:
        self.records.add(*samples)
        for sample in samples:
            self.watcher.sample(key, sample)
