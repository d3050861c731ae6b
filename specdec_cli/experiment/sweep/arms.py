"""The sessions of a sweep's arms: all over one target, or one at a time where memory lacks.

Every rank calls this in the same order. Knows no samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specdec_cli.backends.base import Session
from specdec_cli.errors import SetupError
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.points import Failure
from specdec_cli.experiment.sweep.sweep_plan import SweepPlan
from specdec_cli.launch.world import World


@dataclass(slots=True)
class Arms:
    """Loads the arms of a plan.

    begin: called with what is loaded. failures: of arms that cannot be loaded, by name. alternates:
    whether arms are loaded one at a time, because they do not fit in memory together.
    """

    plan: SweepPlan
    world: World
    begin: Callable[[str], None]
    failures: dict[str | None, Failure] = field(default_factory=dict)
    alternates: bool = False
    _sessions: dict[str | None, Session] = field(default_factory=dict)
    _weights: object = None

    def together(self, jobs: Sequence[Job]) -> dict[str | None, Session] | None:
        """The sessions of these arms, by name, without those that cannot be loaded.

        None, now and from then on, if the arms do not fit in memory together.
        """
        for job in jobs:
            name = job.plan.proposer
            if not self.alternates and name not in self._sessions and name not in self.failures:
                self._load_beside(job)
        if self.alternates:
            return None
        names = [job.plan.proposer for job in jobs]
        return {name: self._sessions[name] for name in names if name in self._sessions}

    def alone(self, job: Job) -> Session | None:
        """The session of one arm, in place of the one before; None if it cannot be loaded."""
        self._forget()
        name = job.plan.proposer
        if name not in self.failures:
            self._load(job)
        return self._sessions.get(name)

    def _load_beside(self, job: Job) -> None:
        if not self._sessions:
            self._load(job)
            return
        first = next(iter(self._sessions.values()))
        found = self._or_failure(
            job, lambda: job.backend.open_beside(job.plan, job.longest_prompt, first, self.begin)
        )
        if found is not None:
            self._sessions[job.plan.proposer] = found
        elif (failure := self.failures.get(job.plan.proposer)) is None or failure.status == "oom":
            self.failures.pop(job.plan.proposer, None)
            self.alternates = True
            self._forget()

    def _load(self, job: Job) -> None:
        weights = self._weights
        found = self._or_failure(
            job,
            lambda: job.backend.open_session(job.plan, job.longest_prompt, self.begin, weights),
        )
        if found is not None:
            self._sessions[job.plan.proposer] = found
            self._weights = found.weights

    def _or_failure(self, job: Job, load: Callable[[], Session | None]) -> Session | None:
        """The result of `load`; None where an arm among several cannot be loaded.

        Raises if it is the only arm, and with several ranks: a rank with a part of the draft may
        fail while the others do not.
        """
        self.begin("loading models")
        self.world.loading()
        try:
            found = load()
            self.world.ready()
            return found
        except SetupError as problem:
            if len(self.plan.jobs) == 1 or self.world.size > 1:
                raise
            is_memory = problem.message.startswith("out of memory")
            self.failures[job.plan.proposer] = Failure(
                "oom" if is_memory else "failed", problem.message, problem.code
            )
            return None

    def _forget(self) -> None:
        """Give up all sessions, except for the target's weights."""
        for session in self._sessions.values():
            session.forget_rounds()
        self._sessions.clear()
        job = self.plan.jobs[0]
        job.backend.free_memory(job.plan)
