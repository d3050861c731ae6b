"""The engine's inputs and outputs: requests, a run's state and its result."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from specdec_cli.core.figures import Metrics
from specdec_cli.core.packed import Tokens
from specdec_cli.core.types import SamplingParams, Sequence
from specdec_cli.engine.detokenize import StopFinder
from specdec_cli.engine.graphs import Rounds
from specdec_cli.engine.metrics import Moment, RunClock
from specdec_cli.engine.scheduler import Scheduler
from specdec_cli.lengths.base import LastRounds


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `index` is global: with the seed it keys the random numbers.

    stop_finder: makes a finder. Each run makes a new one, since a finder remembers its tokens.
    """

    index: int
    token_ids: tuple[int, ...]
    stop_finder: Callable[[], StopFinder] | None = None


@dataclass(frozen=True, slots=True)
class Emission:
    """Tokens that one round, or a prefill pass, added to one sequence; the first `num_accepted`
    were proposals.

    A sequence that could not run has an emission without tokens.
    """

    seq: Sequence
    token_ids: list[int]
    num_accepted: int


@dataclass(frozen=True, slots=True)
class Drawn:
    """The next token of each of `seqs`, decided by a prefill pass.

    on_device, on_host: int64 [R] and at least [R], -1 where logits were not finite. What is on the
    host is valid when the pass has ended, what is on the device until the next pass.
    """

    seqs: list[Sequence]
    on_device: torch.Tensor
    on_host: Tokens


@dataclass(frozen=True, slots=True)
class PrefillStep:
    """Passes over a chunk of prompts that were queued and whose time is not known yet.

    begun: when the step began, seconds on the host's clock. halfway, end: of the target's passes
    and of all. seqs: those that took part. waiting: those without a first token. drawn: None if the
    passes decided nothing.
    """

    begun: float
    halfway: Moment
    end: Moment
    seqs: list[Sequence]
    waiting: list[Sequence]
    drawn: Drawn | None = None


@dataclass(slots=True)
class Run:
    """The state of one pass over a list of prompts; `Engine.step` advances it.

    k: the longest proposal. by_slots: rounds by number of slots, rising. rounds: the ones in use.
    prefill: passes in flight. prefilled_at: the end of those before, on the host's clock.
    """

    k: int
    params: SamplingParams
    scheduler: Scheduler
    clock: RunClock
    by_slots: tuple[Rounds, ...]
    rounds: Rounds
    started_at: float  # host clock, seconds
    prefill: PrefillStep | None = None
    prefilled_at: float = 0.0
    last: LastRounds = field(default_factory=LastRounds)
    seqs: list[Sequence] = field(default_factory=list)
    stop_finders: dict[int, StopFinder] = field(default_factory=dict)

    @property
    def drawn(self) -> Drawn | None:
        """Tokens that prefill passes in flight decide."""
        return self.prefill.drawn if self.prefill is not None else None


@dataclass(frozen=True, slots=True)
class RunResult:
    """Every sequence of a run in the order of its prompts, and the run's metrics."""

    seqs: list[Sequence]
    metrics: Metrics
