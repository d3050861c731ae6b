"""Running a sweep: which points run in which order, and what becomes of failures.

Every rank runs the same points in the same order and keeps the same records in memory; only rank 0
has a folder and computes points. Knows nothing of terminals.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from specdec_cli.acceptance.base import NoForecast
from specdec_cli.core.figures import STAGES
from specdec_cli.engine.build import build
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.measure import release
from specdec_cli.engine.run import Request
from specdec_cli.errors import ExitCode, RunError, SetupError, UsageError, is_out_of_memory
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.measure import MeasuringLoop, Watcher, peak_memory, turned, units_of
from specdec_cli.experiment.points import Failure
from specdec_cli.experiment.predict import ReplayText
from specdec_cli.experiment.records import CurvePart, Key, Point, Sample, given
from specdec_cli.experiment.sweep.document import points_of_block
from specdec_cli.experiment.sweep.sweep_plan import SweepPlan
from specdec_cli.experiment.sweep.sweep_records import SweepClock, SweepRecords
from specdec_cli.experiment.sweep.time_curve import curve_parts, curve_unit
from specdec_cli.launch.world import World
from specdec_cli.models.paged import PagedModel
from specdec_cli.text import first_line

_log = logging.getLogger("specdec")


class Sweep:
    """Runs a plan; `records` holds everything that is finished.

    records: the same on every rank except for the folder, since they determine what is left to do.
    """

    def __init__(
        self, plan: SweepPlan, records: SweepRecords, watcher: Watcher, world: World
    ) -> None:
        self.plan = plan
        self.records = records
        self.watcher = watcher
        self.world = world
        self.failures: dict[Key, Failure] = {}
        self.clock = SweepClock()
        self._agreement = world.agreement()
        self._device = plan.jobs[0].plan.device
        self._peak_memory = 0  # the largest of all ranks, updated after each part of a point

    def run(self) -> list[Point]:
        """Measure what is not recorded yet. Returns the points of the whole sweep, on rank 0.

        Raises if the only draft cannot be loaded. One of several drafts, on one rank, becomes
        failed points.
        """
        points: list[Point] = []
        target: PagedModel | None = None
        for job in self.plan.jobs:
            engine: Engine | None = None
            if any(self._is_open(job, b) for b in self.plan.settings.batch_sizes):
                self._begin("loading models")
                engine = self._build(job, target)
                target = engine.target if engine is not None else None
            for batch_size in self.plan.settings.batch_sizes:
                if engine is not None and self._is_open(job, batch_size):
                    sized = engine.with_batch_size(batch_size)
                    if sized is not engine:
                        engine.forget_rounds()  # captured for the largest batch
                    self._measure(job, sized)
                if self.world.is_first:
                    points += self._points(job.plan.proposer, batch_size)
        return points

    def _points(self, draft: str | None, batch_size: int) -> list[Point]:
        found = points_of_block(
            self.plan.settings, self.records, (draft, batch_size), self.failures
        )
        for point in found:
            self.records.add_point(point)
        with self.world.outside():
            self.watcher.points(found)
        return found

    def _begin(self, what: str) -> None:
        with self.world.outside():
            self.watcher.begin(what)

    def _build(self, job: Job, target: PagedModel | None) -> Engine | None:
        self.world.loading()
        try:
            engine = build(job.plan, job.longest_prompt, self._begin, target)
            self.world.ready()
            return engine
        except SetupError as problem:
            # A rank may fail alone: ranks without a part of the draft do not.
            if len(self.plan.jobs) == 1 or self.world.size > 1:
                raise
            is_memory = problem.message.startswith("out of memory")
            for batch_size in self.plan.settings.batch_sizes:
                for k in self.plan.settings.measured_ks:
                    key = Key(job.plan.proposer, batch_size, k)
                    self.failures[key] = Failure(
                        "oom" if is_memory else "failed", problem.message, problem.code
                    )
            return None

    def _is_open(self, job: Job, batch_size: int) -> bool:
        """Whether samples or data for predictions are missing at a batch size."""
        draft = job.plan.proposer
        keys = [Key(draft, batch_size, k) for k in self.plan.settings.measured_ks]
        return (
            any(p.index not in self.records.samples[key] for key in keys for p in job.prompts)
            or any(
                len(self.records.costs[Key(draft, batch_size, k)]) < curve_parts(job, batch_size)
                for k in self.plan.settings.ks
            )
            # Predictions at every batch size use the texts of the first one.
            or (batch_size == self.plan.settings.batch_sizes[0] and bool(self._without_text(job)))
        )

    def _measure(self, job: Job, engine: Engine) -> None:
        """Measure all points of one draft and batch size, then release their captured rounds."""
        settings, batch_size = self.plan.settings, engine.batch_size
        keys = [Key(job.plan.proposer, batch_size, k) for k in settings.ks]
        loop = MeasuringLoop(engine, self.world, self._keep, self._most_memory, self._guarded)
        self._begin("warming up")
        loop.warm_up(job, keys)
        self._begin("measuring")
        began, processor = time.perf_counter(), time.process_time()
        parts = range(curve_parts(job, batch_size))
        for number, unit in enumerate(units_of(job, batch_size)):
            curve_began = time.perf_counter(), time.process_time()
            for part in parts:
                if curve_unit(job, batch_size, part) == number:
                    # In a rotating order, like the points that it predicts.
                    for key in turned(keys, part * len(keys) // len(parts)):
                        if part not in self.records.costs[key]:
                            self._guarded(key, partial(self._cost, loop, unit, key, part))
            # The time curve counts neither as measuring nor as recording.
            began += time.perf_counter() - curve_began[0]
            processor += time.process_time() - curve_began[1]
            loop.measure(self._without_samples(unit, batch_size), number)
            if batch_size == settings.batch_sizes[0]:
                self._forecast(unit, engine)
        self.clock.rounds += loop.seconds
        self.clock.measuring += time.perf_counter() - began
        self.clock.processor += time.process_time() - processor
        engine.forget_rounds()
        release(job.plan.device)

    def _without_samples(self, unit: Job, batch_size: int) -> dict[Key, Job]:
        """The prompts of a unit that have no sample yet, by point."""
        found = {}
        for k in self.plan.settings.measured_ks:
            key = Key(unit.plan.proposer, batch_size, k)
            missing = {p.index for p in unit.prompts} - self.records.samples[key].keys()
            if missing:
                found[key] = unit.only(missing.__contains__)
        return found

    def _cost(self, loop: MeasuringLoop, unit: Job, key: Key, part: int) -> None:
        """Measure one part of the time curve at one k, on the prompts of a unit."""
        m = loop.run(unit, key.k, unit.plan.params).metrics
        stages: dict[str, Any] = {f"{s}_ms": m.stage_ms(s) * m.num_rounds for s in STAGES}
        self.records.add(
            CurvePart(
                **asdict(key),
                part=part,
                sequence_rounds=m.num_drafts + m.num_rounds_without_proposal,
                rounds=m.num_rounds,
                decode_seconds=m.decode_seconds,
                **stages,
                **given(distinct_experts=m.distinct_experts and m.distinct_experts * m.num_rounds),
            )
        )

    def _most_memory(self) -> int:
        return max(peak_memory(self._device), self._peak_memory)

    def _keep(self, key: Key, samples: list[Sample]) -> None:
        self.records.add(*samples)
        with self.world.outside():
            for sample in samples:
                self.watcher.sample(key, sample)

    def _forecast(self, unit: Job, engine: Engine) -> None:
        """Record the acceptance of proposals for the outputs of the largest k, for predictions."""
        k = max(self.plan.settings.ks)
        key = Key(unit.plan.proposer, engine.batch_size, k)
        for index in self._without_text(unit):
            sample = self.records.samples[key][index]
            self.world.beat()
            prompt = tuple(sample.prompt_token_ids)
            request = Request(index, prompt)
            try:
                found = engine.forecast(request, sample.token_ids, k, unit.plan.params)
            except NoForecast:
                return  # points of this acceptance rule have no predictions
            except (torch.OutOfMemoryError, MemoryError):
                if self.world.size > 1:  # the others may be inside the same pass
                    raise
                _log.warning("prompt %d: no memory to predict from it", index)
                release(unit.plan.device)
                continue
            assert engine.proposer is not None
            reach = min(engine.proposer.max_len, 2**31)
            self.records.add(
                ReplayText(
                    draft=unit.plan.proposer,
                    index=index,
                    limit=min(unit.plan.params.max_new_tokens, engine.max_model_len - len(prompt)),
                    draft_limit=reach - len(prompt),
                    **asdict(found),
                )
            )

    def _without_text(self, job: Job) -> list[int]:
        """Prompts with a sample at the largest k but without a replay record."""
        settings, draft = self.plan.settings, job.plan.proposer
        if max(settings.ks) == 0:
            return []
        samples = self.records.samples[Key(draft, settings.batch_sizes[0], max(settings.ks))]
        return [
            p.index
            for p in job.prompts
            if p.index not in self.records.texts[draft]
            and p.index in samples
            and samples[p.index].could_run
        ]

    def _guarded(self, key: Key, run: Callable[[], object]) -> None:
        """Run a part of a point. If it fails, the point has failed and the sweep goes on.

        With several ranks, all of them have to fail in the same place.
        """
        if key in self.failures:
            return
        problem: Exception | None = None
        try:
            run()
        except (SetupError, UsageError):
            raise
        except Exception as caught:
            if self.world.size > 1 and not _may_be_common(caught):
                raise
            problem = caught
        has_failed, peaks = self._agreement.settle(problem, peak_memory(self._device))
        self._peak_memory = max(peaks)
        if has_failed:
            assert problem is not None
            _log.debug("k = %d at batch size %d", key.k, key.batch_size, exc_info=problem)
            reason = first_line(problem) or type(problem).__name__
            if is_out_of_memory(problem):
                self.failures[key] = Failure("oom", reason, ExitCode.ENVIRONMENT)
            else:
                self.failures[key] = Failure("failed", reason)
            problem = None  # its traceback holds the tensors of what failed
            release(self._device)


def _may_be_common(problem: Exception) -> bool:
    """Whether all ranks fail like this together: out of memory in one pass, or rank 0's verdict."""
    return isinstance(problem, RunError) or is_out_of_memory(problem)
