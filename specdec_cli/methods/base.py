"""The interface between a round and a proposer, which works on `BatchState`. A proposer that uses
only tensors is captured into a CUDA graph with the rest of the round."""

import sys
from collections.abc import Callable
from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec_cli.core.batch import Span
from specdec_cli.core.candidates import Candidates, TargetOutput, Verdict
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import SamplingParams
from specdec_cli.methods.teacher import Teacher
from specdec_cli.models.description import Description, DraftPlace
from specdec_cli.models.draft import Draft, Loaded
from specdec_cli.models.paged import PagedModel
from specdec_cli.recipe import SpeculationSection


@dataclass(frozen=True, slots=True)
class MethodParts:
    """The recipe section and the models for making a proposer on this rank.

    draft: a `PagedModel`, or the method's own kind of draft; None if this rank holds no part of it.
    described: the draft's description, on every rank. draft_max_len: its context length, or 0.
    """

    speculation: SpeculationSection
    target: PagedModel
    draft: Loaded | None = None
    draft_max_len: int = 0
    described: Draft | None = None


class RoundSize(NamedTuple):
    """The sizes that determine a method's memory on this rank. longest: the maximum length of a
    text."""

    batch_size: int
    k: int
    longest: int
    vocab_size: int
    is_greedy: bool
    is_first: bool
    is_cuda: bool
    draft: Draft | None = None


class MethodBytes(NamedTuple):
    """Bytes in addition to weights, caches and passes: those held throughout, and those at the peak
    of a round."""

    held: int = 0
    in_round: int = 0


@dataclass(frozen=True, slots=True)
class Method:
    """The code of a method. make: makes a proposer. estimate_bytes: its memory. describe: describes
    its own kind of draft; None for a method that runs a transformers model, or no model.
    runs_on_host: whether the host reads device data, so that rounds cannot be captured. can_share:
    the weights that `draft.share` may name for its kind of draft. check: returns a model's
    description adapted to the method; raises `SetupError` if the method cannot run it."""

    make: Callable[[MethodParts], "Proposer"]
    estimate_bytes: Callable[[RoundSize], MethodBytes]
    describe: Callable[[DraftPlace], Draft] | None = None
    runs_on_host: bool = False
    can_share: tuple[str, ...] = ()
    check: Callable[[Description], Description] | None = None


def text_bytes(size: RoundSize) -> MethodBytes:
    """Memory of a method that looks up texts, without a model: int32 ids on the device."""
    return MethodBytes(held=4 * size.batch_size * size.longest)


class Proposer:
    """A source of proposals. max_len: maximum length of a sequence. feature_layers: the hidden
    states of the target that it reads, as transformers counts them in `hidden_states`. needs_text:
    whether `BatchState.texts` must hold the sequences' tokens. tail: the number of tokens of
    `BatchState.tail` that it reads. max_lag: how many tokens its cache may lack when a round
    starts; if it lacks more, they are prefilled first. is_paged: whether it keeps all data of a
    text in the blocks of its tokens, so that texts with a common prefix may share blocks.
    depends_on_k: whether a proposal depends on the number of proposals after it.

    A subclass inherits the defaults below, which keep no state, and must define `propose`.
    """

    max_len: int = sys.maxsize
    feature_layers: tuple[int, ...] = ()
    needs_text: bool = False
    tail: int = 2
    max_lag: int = sys.maxsize
    is_paged: bool = False
    depends_on_k: bool = False

    def tail_for(self, k: int) -> int:
        """The number of tokens of `BatchState.tail` that it reads in a run whose longest proposals
        have k tokens."""
        return self.tail

    def prefill(self, spans: list[Span], features: torch.Tensor | None) -> None:
        """Process prompt tokens. features: [T, F], hidden states of these tokens, or None."""

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """Propose at most `draft.caps` tokens for each sequence."""
        raise NotImplementedError

    def commit(self, state: BatchState, verdict: Verdict, target: TargetOutput) -> None:
        """Process a round's decision, before `state` is advanced."""

    @property
    def takes_decisions(self) -> bool:
        """Whether `commit` does anything."""
        return type(self).commit is not Proposer.commit

    def ahead(self, k: int) -> int:
        """The number of positions after a text that need cache blocks in a round of k, because
        passes write them even if the sequence proposes fewer tokens; 0 if only proposals need
        blocks."""
        return 0

    def kv_after(self, n: int, k: int, accepted: int) -> int:
        """Number of leading tokens in the proposer's cache after a round that began with n tokens
        and accepted `accepted` of k >= 1 proposals."""
        return n + accepted

    def forecast(
        self,
        teacher: Teacher,
        prompt: Values[int],
        output: Values[int],
        k: int,
        params: SamplingParams,
    ) -> Forecast | None:
        """The expected acceptance of proposals along `output`, an existing text; None if only
        running the rounds can tell. All ranks call this; rank 0's result is valid."""
        return None

    def check(self) -> None:
        """Raise for errors that only the device could detect; called when a run ends."""

    def clear(self) -> None:
        """Clear cached values that are not finite, because padding reads them and 0 * NaN is
        NaN."""
