"""Runs a sweep: chooses the order of its points and handles failures.

Every rank runs the same points in the same order and keeps the same records in memory. Only rank 0
has a run folder and computes points.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from specdec_cli.backends.base import Session
from specdec_cli.core.figures import STAGES
from specdec_cli.core.types import Request
from specdec_cli.errors import Notice, is_out_of_memory
from specdec_cli.experiment.folders.records import CurvePart, Key, Point, given
from specdec_cli.experiment.folders.samples import without_errors
from specdec_cli.experiment.forecasts import ReplayText
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.lossless_check import PROMPTS, LosslessCheck, greedy_texts, texts_of
from specdec_cli.experiment.machine import MachineWatch
from specdec_cli.experiment.measure import MeasuringLoop, balanced, units_of
from specdec_cli.experiment.statistics.noise import seams_in
from specdec_cli.experiment.sweep.arms import Arms
from specdec_cli.experiment.sweep.running import Running
from specdec_cli.experiment.sweep.time_curve import curve_parts, curve_unit

_log = logging.getLogger("specdec")
_MOST_PASSES = 4  # maximum number of loads of each arm per batch size, if arms are loaded in turn


@dataclass(eq=False)
class Sweep(Running):
    """A sweep that goes through the batch sizes in turn and uses the same sessions for all of
    them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        plan, samples = self.plan, self.records.samples
        if plan.check_lossless:
            self.check = LosslessCheck(plan.settings.dtype, self._own.params)
        self._watch = MachineWatch(self._own.device, idles=plan.settings.offered is not None)
        self._arms = Arms(plan, self.world, self._begin)
        plain = [of for of in samples if of.k == 0 and of.request_rate is None]
        self._earlier = {of: frozenset(samples[of]) for of in plain}

    @property
    def of_machine(self) -> list[Notice]:
        return self._watch.notices()

    @property
    def notices(self) -> list[Notice]:
        """Warnings about the machine, about jumps in speed where the run was resumed, and about
        arms that were loaded one at a time."""
        found = self.of_machine
        # The machine may be faster or slower now than when an earlier process measured `earlier`.
        for key, earlier in self._earlier.items():
            size = key.batch_size
            own = {of: s for of, s in self.records.samples.items() if of.batch_size == size}
            found += seams_in(own, earlier)
        if not self._arms.alternates:
            return found
        told = (
            "the drafts do not fit in memory together: they were loaded in turn and measured in "
            f"at most {_MOST_PASSES} passes over the prompts, so the machine's speed may differ "
            "between drafts; a smaller --batch-size may let them fit"
        )
        return [*found, Notice("arms_alternate", told, {"most_passes": _MOST_PASSES})]

    def run(self) -> list[Point]:
        """Measure everything that is not recorded yet. Returns the points of the whole sweep on
        rank 0, and an empty list on other ranks.

        If a draft cannot be loaded, its points are recorded as failed. But if it is the only draft,
        or if there are several ranks, the error is raised.
        """
        points: list[Point] = []
        if self.plan.settings.offered is not None:
            return self._run_at_rates()
        for batch_size in self.plan.settings.batch_sizes:
            if jobs := self._open_jobs(batch_size):
                self._measure_all(jobs, batch_size)
                self._give_up_arms(batch_size)
            if self.world.is_first:
                points += self._points(batch_size)
        return points

    def _run_at_rates(self) -> list[Point]:
        """Measure the points at which requests arrive at a given rate. Each point is measured
        without interruption, so arms alternate after each point rather than after each group of
        prompts."""
        settings, jobs, points = self.plan.settings, self.plan.jobs, list[Point]()
        size, loads = settings.batch_sizes[0], {job.plan.proposer: job for job in jobs}
        keys = [key for key in settings.measured_keys if not self.records.stretches[key]]
        groups: list[list[Job]] = []
        if keys:
            groups = [jobs] if self._arms.together(jobs) is not None else [[job] for job in jobs]
        for group in groups:
            sessions = self._arms.together(group)
            if sessions is None:
                alone = self._arms.alone(group[0])
                sessions = {} if alone is None else {group[0].plan.proposer: alone}
            if not sessions:
                continue
            first = next(job for job in group if job.plan.proposer in sessions)
            hosts = {name: loads[name] for name in sessions} | {None: first}
            here = {name: one.resized(size) for name, one in sessions.items()}
            own = [k for k in keys if k.draft in hosts and not self.records.stretches[k]]
            for number, (_, rate) in enumerate(settings.levels):
                at = [key for key in own if key.request_rate == rate]
                for key in balanced(at, number, settings.seed):
                    job = hosts[key.draft]
                    self._measure_at_rate(key, job, here[job.plan.proposer])
            for one in here.values():
                one.forget_rounds()
        if keys:
            self._give_up_arms(size)
        for size, rate in settings.levels if self.world.is_first else ():
            points += self._points(size, rate)
        return points

    def _stretch(self, key: Key, job: Job, session: Session) -> None:
        self._watch.begin()
        super()._stretch(key, job, session)
        self._watch.look(at_end=True)

    def _sign(self) -> None:
        super()._sign()
        self._watch.look()

    def _keys_of(self, job: Job, batch_size: int, ks: Iterable[int]) -> list[Key]:
        """Return the keys of one arm's points, except k = 0, which all arms share."""
        return [Key(job.plan.proposer, batch_size, k) for k in ks if k]

    def _open_jobs(self, batch_size: int) -> list[Job]:
        """Return the arms that still lack samples or data for predictions at a batch size. If all
        are complete except for the k = 0 point that they share, return the first arm, which can
        measure it."""
        jobs, plain = self.plan.jobs, [Key(None, batch_size, 0)]
        found = [job for job in jobs if self._is_open(job, batch_size)]
        if not found and self._lack(jobs[0], plain, plain):
            return jobs[:1]
        return found

    def _is_open(self, job: Job, batch_size: int) -> bool:
        settings = self.plan.settings
        keys = self._keys_of(job, batch_size, settings.measured_ks)
        return (
            self.check is not None
            or self._lack(job, keys, self._keys_of(job, batch_size, settings.ks))
            # Predictions at every batch size use the texts of the first one.
            or (batch_size == settings.batch_sizes[0] and bool(self._without_text(job)))
        )

    def _lack(self, job: Job, measured: Iterable[Key], timed: Iterable[Key]) -> bool:
        """Return True if an arm lacks samples at a point in `measured`, or parts of the time curve
        at a point in `timed`."""
        return any(self._missing(key, job) for key in measured) or any(
            len(self.records.costs[key]) < curve_parts(job, key.batch_size) for key in timed
        )

    def _measure_all(self, jobs: Sequence[Job], batch_size: int) -> None:
        """Measure all arms together. If they do not fit in memory together, load them in turn: each
        arm runs a part of the prompts before the next arm is loaded."""
        units = range(len(units_of(jobs[0], batch_size)))
        if (sessions := self._arms.together(jobs)) is not None:
            self._measure(jobs, sessions, batch_size, units)
            return
        seed, most = self.plan.settings.seed, min(_MOST_PASSES, len(units))
        for number, (start, stop) in enumerate(
            pairwise(place * len(units) // most for place in range(most + 1))
        ):
            for job in balanced(jobs, number, seed):
                if (session := self._arms.alone(job)) is not None:
                    sessions = {job.plan.proposer: session}
                    self._measure([job], sessions, batch_size, units[start:stop])

    def _give_up_arms(self, batch_size: int) -> None:
        """Record a failure for every point of the arms that could not be loaded."""
        failed = self._arms.failures
        for key in self.plan.settings.measured_keys:
            if key.batch_size != batch_size:
                continue
            if key.draft in failed:
                self.failures[key] = failed[key.draft]
            elif key.k == 0 and len(failed) == len(self.plan.jobs):
                self.failures.setdefault(key, next(iter(failed.values())))

    def _measure(
        self,
        jobs: Sequence[Job],
        whole: Mapping[str | None, Session],
        batch_size: int,
        numbers: Sequence[int],
    ) -> None:
        """Measure the points at one batch size on some groups of prompts. Each group runs at all
        points of the loaded arms before the next group starts. Afterwards, release the CUDA graphs
        of these sessions.

        whole: the sessions by arm, opened for the largest batch; arms without a session are
            skipped.
        numbers: the indices of the groups in `units_of`.
        """
        jobs = [job for job in jobs if job.plan.proposer in whole]
        if not jobs:
            return
        settings = self.plan.settings
        sessions = {}
        for name, session in whole.items():
            sessions[name] = session.resized(batch_size)
            if sessions[name] is not session:
                session.forget_rounds()  # frees CUDA graphs captured for the largest batch
        # A k = 0 point that all arms share is measured in the session of one arm. Choose the first
        # arm whose target need not output hidden states for the draft. If there is no such arm,
        # choose the first one.
        plain = min(jobs, key=lambda job: job.plan.reads_hidden)
        hosts = {job.plan.proposer: job for job in jobs} | {None: plain}

        def session_of(key: Key) -> Session:
            return sessions[hosts[key.draft].plan.proposer]

        keys = [key for key in settings.keys(batch_size, settings.ks) if key.draft in hosts]
        loop = self._loop(session_of)
        self._begin("warming up")
        cold = keys
        if not self._backend.is_native:  # warm up servers only for points that lack samples
            cold = [key for key in keys if self._lack(hosts[key.draft], [key], [])]
        loop.warm_up({key: hosts[key.draft] for key in cold})
        self._begin("measuring")
        self._watch.begin()
        units = {name: units_of(job, batch_size) for name, job in hosts.items()}
        parts = range(curve_parts(plain, batch_size))
        with self.clock.measures():
            for number in numbers:
                # Subtract the time spent on the time curve, which is not part of measuring.
                with self.clock.measures(-1):
                    for part in parts:
                        if curve_unit(plain, batch_size, part) == number:
                            # Each part has its own order of points, as in `loop.measure`.
                            for key in balanced(keys, part, settings.seed):
                                if part not in self.records.costs[key]:
                                    unit = units[key.draft][number]
                                    self._guarded(key, partial(self._cost, loop, unit, key, part))
                left = dict[Key, Job]()
                for key in keys:
                    unit = units[key.draft][number]
                    missing = self._missing(key, unit)
                    if missing and key.k in settings.measured_ks:
                        left[key] = unit.only(missing.__contains__)
                loop.measure(left, number)
                self._watch.look()
                if batch_size == settings.batch_sizes[0]:
                    for name, session in sessions.items():
                        self._forecast(units[name][number], session)
            self._watch.look(at_end=True)
        self.clock.rounds += loop.seconds
        if numbers and numbers[-1] == len(units[plain.plan.proposer]) - 1:
            self._check(hosts, session_of, batch_size)
        for session in sessions.values():
            session.forget_rounds()
        self._backend.free_memory(self._own)

    def _check(
        self, hosts: Mapping[str | None, Job], session_of: Callable[[Key], Session], batch_size: int
    ) -> None:
        """Compare the texts at every k > 0 to those of the target alone, if `--check-lossless` is
        given. A greedy run compares the texts that it has measured. Any other run decodes a few
        prompts greedily for the check, at the first batch size.

        hosts: the job of each arm that was measured at this batch size.
        """
        settings = self.plan.settings
        if self.check is None or not (settings.is_greedy or batch_size == settings.batch_sizes[0]):
            return
        self._begin("checking losslessness")
        for key in settings.keys(batch_size, settings.measured_ks):
            if key.k == 0 or key.draft not in hosts or key in self.failures:
                continue
            job, session = hosts[key.draft], session_of(key)
            if settings.is_greedy:
                samples = self.records.samples
                written, plain = (
                    {i: s.token_ids for i, s in without_errors(of).items()}
                    for of in (samples[key], samples.get(key.plain, {}))
                )
            else:
                job = job.part(0, PROMPTS)
                written, plain = (greedy_texts(session, job, k, self.world) for k in (key.k, 0))
            self.check.compare(session, key, texts_of(job, written, plain))

    def _cost(self, loop: MeasuringLoop, unit: Job, key: Key, part: int) -> None:
        """Measure the cost of rounds at one point on a group of prompts, and record it as one part
        of the time curve."""
        m = loop.run(key, unit, unit.plan.params)
        assert m is not None and m.num_drafts is not None and m.num_rounds is not None
        without = m.num_rounds_without_proposal - m.num_tokens_from_prefill
        stages: dict[str, Any] = {f"{s}_ms": m.stage_ms(s) * m.num_rounds for s in STAGES}
        self.records.add(
            CurvePart(
                **key.as_dict(),
                part=part,
                sequence_rounds=m.num_drafts + without,
                rounds=m.num_rounds,
                decode_seconds=m.decode_seconds,
                **stages,
                **given(distinct_experts=m.distinct_experts and m.distinct_experts * m.num_rounds),
            )
        )

    def _forecast(self, unit: Job, session: Session) -> None:
        """Compute and record how likely the target is to accept each proposal at every position of
        the texts that were generated at the largest k. Speeds at smaller k are predicted from this.

        unit: the group of prompts.
        """
        k = max(self.plan.settings.ks)
        key = Key(unit.plan.proposer, session.batch_size, k)
        for index in self._without_text(unit):
            sample = self.records.samples[key][index]
            self.world.beat()
            prompt = tuple(sample.prompt_token_ids)
            request = Request(index, prompt)
            try:
                found = session.forecast(request, sample.token_ids, k, unit.plan.params)
            except Exception as problem:
                # With several ranks, the others may still wait for this rank inside the same pass,
                # so that the sweep cannot go on.
                if self.world.size > 1 or not is_out_of_memory(problem):
                    raise
                _log.warning("prompt %d: no memory to predict from it", index)
                self._backend.free_memory(self._own)
                continue
            if found is None:
                return  # the acceptance rule, the policy or the method supports no predictions
            reach = min(session.reach, 2**31)
            self.records.add(
                ReplayText(
                    draft=unit.plan.proposer,
                    index=index,
                    limit=min(unit.plan.params.max_new_tokens, session.max_model_len - len(prompt)),
                    draft_limit=reach - len(prompt),
                    **dict(found),
                )
            )

    def _without_text(self, job: Job) -> list[int]:
        """Return the indices of the prompts that have a sample at the largest k, but no record for
        predictions yet."""
        settings, draft = self.plan.settings, job.plan.proposer
        if max(settings.ks) == 0 or not self._backend.is_native:
            return []
        samples = self.records.samples[Key(draft, settings.batch_sizes[0], max(settings.ks))]
        return [
            p.index
            for p in job.prompts
            if p.index not in self.records.texts[draft]
            and p.index in samples
            and samples[p.index].could_run
        ]
