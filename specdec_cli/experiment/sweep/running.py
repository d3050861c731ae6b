"""Two classes of sweeps: the base class `Running`, and `StartedSweep`, which starts its servers.

`Running` keeps records, shows progress and measures load points, at which requests arrive at a
given rate. `StartedSweep` starts a server for each draft and k, and measures it at all batch sizes.
Its points therefore alternate less often than in other sweeps: only when the server changes, not
after each group of prompts.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from specdec_cli.backends.base import Prepared, Session
from specdec_cli.core.figures import Rate
from specdec_cli.errors import ExitCode, Notice, RunError, SetupError, UsageError, is_out_of_memory
from specdec_cli.experiment.folders.records import Key, Point, Sample
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.load.measuring import measure_at_rate
from specdec_cli.experiment.lossless_check import LosslessCheck
from specdec_cli.experiment.measure import MeasuringLoop, Watcher, units_of
from specdec_cli.experiment.points import Failure
from specdec_cli.experiment.sweep.document import points_at
from specdec_cli.experiment.sweep.sweep_plan import SweepPlan
from specdec_cli.experiment.sweep.sweep_records import SweepClock, SweepRecords
from specdec_cli.launch.world import World
from specdec_cli.text import first_line, unexpected

_log = logging.getLogger("specdec")


@dataclass(eq=False)
class Running:
    """Measures the points of a plan; the base class of all sweeps.

    records: the records of all finished work. They must be the same on every rank, because each
        rank derives the remaining work from them. Only rank 0 writes them to a folder.
    """

    plan: SweepPlan
    records: SweepRecords
    watcher: Watcher
    world: World
    check: LosslessCheck | None = field(default=None, init=False)
    failures: dict[Key, Failure] = field(default_factory=dict, init=False)
    clock: SweepClock = field(default_factory=SweepClock, init=False)
    # The pairs of draft and k that have been warmed up for load points.
    _warm: set[tuple[str | None, int]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self._backend, self._own = self.plan.jobs[0].backend, self.plan.jobs[0].plan
        self._agreement = self.world.agreement()
        self._peak_memory = 0  # in bytes, the maximum over ranks; updated by `_guarded`

    def _points(self, batch_size: int, rate: Rate | None = None) -> list[Point]:
        found = points_at(self.plan.settings, self.records, batch_size, self.failures, rate)
        for point in found:
            self.records.add_point(point)
        with self.world.outside():
            self.watcher.points(found)
        return found

    def _begin(self, what: str) -> None:
        with self.world.outside():
            self.watcher.begin(what)

    @property
    def of_machine(self) -> list[Notice]:
        """Warnings about the machine on which points were measured."""
        return []

    def _keep(self, key: Key, samples: Sequence[Sample]) -> None:
        self.records.add(*samples)
        with self.world.outside():
            for sample in samples:
                self.watcher.sample(key, sample)

    def _most_memory(self) -> int:
        return max(self._backend.peak_memory(self._own), self._peak_memory)

    def _loop(self, session_of: Callable[[Key], Session]) -> MeasuringLoop:
        return MeasuringLoop(session_of, self.world, self._keep, self._most_memory, self._guarded)

    def _measure_at_rate(self, key: Key, job: Job, session: Session) -> None:
        """Measure a load point without interruption. Before the first load point with this draft
        and k, warm up with a batch in which all requests wait from the start."""
        if (key.draft, key.k) not in self._warm:
            self._begin("warming up")
            self._loop(lambda _: session).warm_up({key: job})
            self._warm.add((key.draft, key.k))
        self._begin("measuring")
        with self.clock.measures():
            self._guarded(key, partial(self._stretch, key, job, session))

    def _missing(self, key: Key, job: Job) -> set[int]:
        """Return the prompts of a job that still lack a sample at a point."""
        if key.request_rate is not None and self.records.stretches[key]:
            return set()
        return {p.index for p in job.prompts} - self.records.samples[key].keys()

    def _sign(self) -> None:
        """Show that work goes on. Called from time to time while requests arrive."""
        self.world.beat()

    def _stretch(self, key: Key, job: Job, session: Session) -> None:
        offered = self.plan.settings.offered
        assert offered is not None
        samples, stretch, seconds = measure_at_rate(
            key, job, offered, session, self._most_memory, self._sign
        )
        self.clock.rounds += seconds
        self._keep(key, samples)
        self.records.add(stretch)  # write it last: resumed runs drop samples without it

    def _guarded(self, key: Key, run: Callable[[], object]) -> None:
        """Run a part of a point, and record the point as failed if it raises `RunError`. Do nothing
        if the point has failed already."""
        if key in self.failures:
            return
        problem: Exception | None = None
        try:
            run()
        except (SetupError, UsageError):
            raise
        except Exception as caught:
            # Two kinds of errors occur on all ranks at the same step: failures found by rank 0, and
            # a lack of memory in a pass. Any other error may occur on only some of several ranks,
            # so it ends the sweep.
            is_common = isinstance(caught, RunError) or is_out_of_memory(caught)
            if self.world.size > 1 and not is_common:
                raise
            problem = caught
        has_failed, peaks = self._agreement.settle(problem, self._backend.peak_memory(self._own))
        self._peak_memory = max(peaks)
        if has_failed:
            assert problem is not None
            _log.debug("k = %d at batch size %d", key.k, key.batch_size, exc_info=problem)
            is_told = isinstance(problem, RunError) or is_out_of_memory(problem)
            reason = (is_told and first_line(problem)) or unexpected(problem)
            if is_out_of_memory(problem):
                self.failures[key] = Failure("oom", reason, ExitCode.ENVIRONMENT)
            else:
                self.failures[key] = Failure("failed", reason)
            problem = None  # its traceback keeps the failed call's tensors alive
            self._backend.free_memory(self._own)


class Starter(Protocol):
    """Starts and stops servers."""

    notices: list[Notice]

    def start(self, plan: Prepared, k: int, told: Callable[[str], None]) -> None:
        """Start the server for proposal length `k`, and wait until it is healthy. Raises `RunError`
        if it exits first, or does not become healthy in time."""

    def stop(self) -> None:
        """Stop the running server, if any."""


@dataclass(eq=False)
class StartedSweep(Running):
    """A sweep that starts its own servers, one after another."""

    starter: Starter

    @property
    def notices(self) -> list[Notice]:
        return self.starter.notices

    def run(self) -> list[Point]:
        """Measure everything that is not recorded yet. Returns the points of the whole sweep."""
        settings = self.plan.settings
        jobs = {job.plan.proposer: job for job in self.plan.jobs}
        for first in settings.keys(settings.batch_sizes[0], settings.ks):
            job = jobs.get(first.draft, self.plan.jobs[0])
            keys = [replace(first, batch_size=b, request_rate=r) for b, r in settings.levels]
            if missing := [key for key in keys if self._missing(key, job)]:
                self._on_a_server(missing, job)
        return [point for level in settings.levels for point in self._points(*level)]

    def _on_a_server(self, keys: list[Key], job: Job) -> None:
        """Start the server for these points, which differ only in batch size or request rate, and
        measure them. If the server fails, record the points as failed."""
        try:
            self._begin("starting a server")
            self.starter.start(job.plan, keys[0].k, self.watcher.told)
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
            self.starter.stop()
