"""What the engine is given and gives back: requests, proposers, a run's state and its outcome."""

from collections.abc import Callable
from collections.abc import Sequence as Values
from dataclasses import dataclass, field
from typing import Protocol

from specdec_cli.core.batch import Span
from specdec_cli.core.types import Proposal, RoundNoise, SamplingParams, Sequence
from specdec_cli.engine.metrics import Metrics, RunClock
from specdec_cli.engine.pipeline import Pipeline
from specdec_cli.engine.scheduler import Scheduler


class Proposer(Protocol):
    """What a round needs of a proposer: `engine.draft.DraftWorker`, `engine.ngram.NgramProposer`.

    `propose` is asked for lens[b] tokens of sequence b and says in the proposal's own `lens` how
    many it found; no sequence may get more than was asked.
    """

    max_len: int

    def prefill(self, spans: list[Span]) -> None: ...

    def propose(
        self, seqs: list[Sequence], lens: list[int], noise: RoundNoise, params: SamplingParams
    ) -> Proposal: ...


class StopFinder(Protocol):
    """Says how many of a sequence's new tokens to keep, or None to go on."""

    def feed(self, tokens: Values[int]) -> int | None: ...


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `index` is global: with the seed it keys the random numbers.

    stop_finder: makes a finder, which each run has a new one of: it remembers what it has seen.
    """

    index: int
    token_ids: tuple[int, ...]
    stop_finder: Callable[[], StopFinder] | None = None


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens that one round added to one sequence; the first `num_accepted` were proposals.

    Empty for a sequence that could not run.
    """

    seq: Sequence
    token_ids: list[int]
    num_accepted: int


@dataclass(slots=True)
class Run:
    """One pass over a list of prompts: what `Engine.step` advances."""

    k: int
    params: SamplingParams
    scheduler: Scheduler
    clock: RunClock
    pipelines: tuple[Pipeline, ...] = ()  # by number of slots; none where rounds are ragged
    pipeline: Pipeline | None = None  # the one of them in use
    seqs: list[Sequence] = field(default_factory=list)
    stop_finders: dict[int, StopFinder] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunResult:
    """Every sequence of a run in the order of its prompts, and what was measured."""

    seqs: list[Sequence]
    metrics: Metrics
