"""Records, progress and points at rates, which sweeps share however their arms come to run."""

import logging
from collections.abc import Callable, Sequence
from functools import partial

from specdec_cli.backends.base import Session
from specdec_cli.core.figures import Rate
from specdec_cli.errors import RunError
from specdec_cli.experiment.folders.records import Key, Point, Sample
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.load.measuring import measure_at_rate
from specdec_cli.experiment.lossless_check import LosslessCheck
from specdec_cli.experiment.measure import MeasuringLoop, Watcher
from specdec_cli.experiment.points import Failure
from specdec_cli.experiment.sweep.document import points_at
from specdec_cli.experiment.sweep.sweep_plan import SweepPlan
from specdec_cli.experiment.sweep.sweep_records import SweepClock, SweepRecords
from specdec_cli.launch.world import World

_log = logging.getLogger("specdec")


class Running:
    """Runs a plan; `records` holds everything that is finished.

    records: the same on every rank except for the folder, since they determine what is left to do.
    """

    check: LosslessCheck | None = None

    def __init__(
        self, plan: SweepPlan, records: SweepRecords, watcher: Watcher, world: World
    ) -> None:
        self.plan = plan
        self.records = records
        self.watcher = watcher
        self.world = world
        self.failures: dict[Key, Failure] = {}
        self.clock = SweepClock()
        self._warm = set[tuple[str | None, int]]()  # arms and ks, of points at rates

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

    def _keep(self, key: Key, samples: Sequence[Sample]) -> None:
        self.records.add(*samples)
        with self.world.outside():
            for sample in samples:
                self.watcher.sample(key, sample)

    def _most_memory(self) -> int:
        return 0

    def _loop(self, session_of: Callable[[Key], Session]) -> MeasuringLoop:
        return MeasuringLoop(session_of, self.world, self._keep, self._most_memory, self._guarded)

    def _measure_at_rate(self, key: Key, job: Job, session: Session) -> None:
        """Measure a point in one stretch, warmed up by a closed batch where its k is new."""
        if (key.draft, key.k) not in self._warm:
            self._begin("warming up")
            self._loop(lambda _: session).warm_up({key: job})
            self._warm.add((key.draft, key.k))
        self._begin("measuring")
        with self.clock.measures():
            self._guarded(key, partial(self._stretch, key, job, session))

    def _stretch(self, key: Key, job: Job, session: Session) -> None:
        offered = self.plan.settings.offered
        assert offered is not None
        samples, stretch, seconds = measure_at_rate(
            key, job, offered, session, self._most_memory, self.world.beat
        )
        self.clock.rounds += seconds
        self._keep(key, samples)
        self.records.add(stretch)  # with which they count

    def _guarded(self, key: Key, run: Callable[[], object]) -> None:
        """Run a part of a point, unless its server died in an earlier one."""
        if key in self.failures:
            return
        try:
            run()
        except RunError as problem:
            _log.debug("k = %d at batch size %d", key.k, key.batch_size, exc_info=problem)
            self.failures[key] = Failure("failed", problem.message)
