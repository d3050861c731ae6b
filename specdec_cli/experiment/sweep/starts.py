"""Running a sweep on servers that are started for it, one after another, each for all batch sizes.

A server has one k, so arms take turns by starts, not by prompts. Knows no server's commands.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from specdec_cli.backends.base import Prepared
from specdec_cli.errors import Notice, RunError
from specdec_cli.experiment.folders.records import Key, Point
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.measure import Watcher, units_of
from specdec_cli.experiment.points import Failure
from specdec_cli.experiment.sweep.running import Running
from specdec_cli.experiment.sweep.sweep_plan import SweepPlan
from specdec_cli.experiment.sweep.sweep_records import SweepRecords
from specdec_cli.launch.world import World


class Starter(Protocol):
    """Starts and stops servers."""

    notices: list[Notice]

    def start(self, plan: Prepared, k: int, told: Callable[[str], None]) -> None:
        """Start the server of a k, and wait until it is healthy. Raises `RunError` if it ends
        before, or is not in time."""

    def stop(self) -> None:
        """End the server that runs, if any."""


class StartedSweep(Running):
    """Sweeps whose jobs' backend starts servers."""

    def __init__(
        self,
        plan: SweepPlan,
        records: SweepRecords,
        watcher: Watcher,
        world: World,
        starter: Starter,
    ) -> None:
        super().__init__(plan, records, watcher, world)
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
        return [point for level in settings.levels for point in self._points(*level)]

    def _missing(self, key: Key, job: Job) -> set[int]:
        if key.request_rate is not None and self.records.stretches[key]:
            return set()
        return {p.index for p in job.prompts} - self.records.samples[key].keys()

    def _on_a_server(self, keys: list[Key], job: Job) -> None:
        """Start the server of these points, of several batch sizes or rates, and measure them."""
        try:
            self._begin("starting a server")
            self._starter.start(job.plan, keys[0].k, self.watcher.told)
            session = job.backend.open_session(job.plan, job.longest_prompt, self.watcher.begin)
            loop = self._loop(lambda key: session.resized(key.batch_size))
            for key in keys:
                if key.request_rate is not None:
                    self._measure_at_rate(key, job, session.resized(key.batch_size))
                    continue
                self._begin("warming up")
                loop.warm_up({key: job})
                self._begin("measuring")
                with self.clock.measures():
                    for number, unit in enumerate(units_of(job, key.batch_size)):
                        left = unit.only(self._missing(key, job).__contains__)
                        loop.measure({key: left} if left.prompts else {}, number)
            self.clock.rounds += loop.seconds
        except RunError as problem:
            for key in keys:
                self.failures.setdefault(key, Failure("failed", problem.message, problem.code))
        finally:
            self._starter.stop()
