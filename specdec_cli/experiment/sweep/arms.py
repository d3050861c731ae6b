"""Opens the sessions of a sweep's arms. An arm is one of the alternatives that the sweep compares:
a draft, or a method that needs no draft.

All arms share one copy of the target. If the drafts do not all fit in memory, arms are loaded one
at a time. All ranks must make the same calls in the same order.
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

    begin: called with the name of each stage of loading when it begins.
    failures: why arms could not be loaded, by the name of the arm's draft or method.
    alternates: whether arms are loaded one at a time, because they do not fit in memory together.
    """

    plan: SweepPlan
    world: World
    begin: Callable[[str], None]
    failures: dict[str | None, Failure] = field(default_factory=dict)
    alternates: bool = False
    _sessions: dict[str | None, Session] = field(default_factory=dict)
    _weights: object = None

    def together(self, jobs: Sequence[Job]) -> dict[str | None, Session] | None:
        """Load these arms together and return their sessions by name. Arms that cannot be loaded
        are left out.

        If the arms do not fit in memory together, this call and all later ones return None.
        """
        for job in jobs:
            name = job.plan.proposer
            if self.alternates or name in self._sessions or name in self.failures:
                continue
            first = next(iter(self._sessions.values()), None)
            self._load(job, first)
            failure = self.failures.get(name)
            is_memory = failure is None or failure.status == "oom"
            if first is not None and name not in self._sessions and is_memory:
                self.failures.pop(name, None)
                self.alternates = True
                self._forget()
        if self.alternates:
            return None
        names = [job.plan.proposer for job in jobs]
        return {name: self._sessions[name] for name in names if name in self._sessions}

    def alone(self, job: Job) -> Session | None:
        """Free all other arms, then load this one and return its session; None if it cannot be
        loaded."""
        self._forget()
        name = job.plan.proposer
        if name not in self.failures:
            self._load(job)
        return self._sessions.get(name)

    def _load(self, job: Job, first: Session | None = None) -> None:
        """Load an arm and store its session, or its failure. If `first` is given, load the arm
        beside that session, and store nothing if they do not fit in memory together.

        Raises the error instead of storing it if this is the only arm, or if there are several
        ranks: if only some ranks failed, for example those that hold a part of the draft, the ranks
        would no longer make the same calls.
        """
        self.begin("loading models")
        self.world.loading()
        name, common = job.plan.proposer, (job.plan, job.longest_prompt)
        try:
            if first is not None:
                found = job.backend.open_beside(*common, first, self.begin)
            else:
                found = job.backend.open_session(*common, self.begin, self._weights)
                self._weights = found.weights
            self.world.ready()
        except SetupError as problem:
            if len(self.plan.jobs) == 1 or self.world.size > 1:
                raise
            told, is_memory = problem.message, problem.message.startswith("out of memory")
            self.failures[name] = Failure("oom" if is_memory else "failed", told, problem.code)
            return
        if found is not None:
            self._sessions[name] = found

    def _forget(self) -> None:
        """Free all sessions, but keep the target's weights."""
        for session in self._sessions.values():
            session.forget_rounds()
        self._sessions.clear()
        job = self.plan.jobs[0]
        job.backend.free_memory(job.plan)
