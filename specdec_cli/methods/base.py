"""The interface between a round and a proposer. A proposer reads `BatchState`. If it uses only
tensor operations, it is captured into a CUDA graph with the rest of the round."""

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from specdec_cli.core.batch import Span
from specdec_cli.core.candidates import Candidates, TargetOutput, Verdict
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import SamplingParams, Sequence
from specdec_cli.methods.teacher import Teacher
from specdec_cli.models.description import Description, DraftPlace
from specdec_cli.models.draft import Draft, Loaded
from specdec_cli.models.paged import PagedModel
from specdec_cli.recipe import SpeculationSection


@dataclass(frozen=True, slots=True)
class MethodParts:
    """The arguments from which a method makes its proposer on this rank.

    speculation: the recipe's `speculation` section.
    draft: a `PagedModel`, or the method's own kind of draft; None if this rank holds no part of it.
    draft_max_len: the draft's context length; 0 without a draft.
    described: the draft's description, which every rank has; None without a draft.
    """

    speculation: SpeculationSection
    target: PagedModel
    draft: Loaded | None = None
    draft_max_len: int = 0
    described: Draft | None = None


class RoundSize(NamedTuple):
    """The sizes that determine how much memory a method takes on this rank.

    longest: the maximum number of tokens in a text.
    vocab_size: the size of the target's vocabulary.
    is_first: whether this rank is rank 0, which verifies.
    draft: None for a method without a draft.
    """

    batch_size: int
    k: int
    longest: int
    vocab_size: int
    is_greedy: bool
    is_first: bool
    is_cuda: bool
    draft: Draft | None = None


class MethodBytes(NamedTuple):
    """The bytes that a method takes in addition to weights, caches and forward passes of the
    models.

    held: the bytes that it holds during the whole run.
    in_round: the additional bytes that it takes at the peak of a round.
    """

    held: int = 0
    in_round: int = 0


@dataclass(frozen=True, slots=True)
class Method:
    """The functions and properties of a method.

    make: makes a proposer.
    estimate_bytes: estimates how much memory the method takes.
    describe: describes the method's own kind of draft. None if the method runs a transformers
        model, or no model.
    runs_on_host: whether the host reads device data during a round, so that rounds cannot be
        captured as CUDA graphs.
    can_share: the weights that `draft.share` may name for the method's kind of draft.
    check: adapts the description of a transformers model to the method. It raises `SetupError` if
        the method cannot run the model. None if nothing needs to be adapted.
    tensors_in_target: returns a pattern for the names of a draft's tensors in a target's files, or
        None if the target's config declares no such draft. Called with the target's name, folder
        and transformers config. None if the method reads no draft there.
    """

    make: Callable[[MethodParts], "Proposer"]
    estimate_bytes: Callable[[RoundSize], MethodBytes]
    describe: Callable[[DraftPlace], Draft] | None = None
    runs_on_host: bool = False
    can_share: tuple[str, ...] = ()
    check: Callable[[Description], Description] | None = None
    tensors_in_target: Callable[[str, Path, Any], re.Pattern[str] | None] | None = None


def text_bytes(size: RoundSize) -> MethodBytes:
    """Estimate the memory of a method that has no model and looks up tokens in the texts instead.
    The texts' token ids are kept on the device, as int32."""
    return MethodBytes(held=4 * size.batch_size * size.longest)


class Proposer:
    """A source of proposals. Subclasses must define `propose`; the defaults of the other methods
    suit a proposer without state.

    max_len: the maximum length of a sequence.
    feature_layers: the target's hidden states that the proposer reads, as indices into
        transformers' `hidden_states`.
    needs_text: whether `BatchState.texts` must hold the sequences' tokens.
    tail: how many tokens of `BatchState.tail` the proposer reads.
    max_lag: how many tokens may be missing from its cache when a round starts. If more are missing,
        they are prefilled first.
    is_paged: whether all its data about a text is in the cache blocks of the text's tokens, so that
        texts with a common prefix may share blocks.
    depends_on_k: whether a proposal depends on how many proposals follow it.
    """

    max_len: int = sys.maxsize
    feature_layers: tuple[int, ...] = ()
    needs_text: bool = False
    tail: int = 2
    max_lag: int = sys.maxsize
    is_paged: bool = False
    depends_on_k: bool = False

    def tail_for(self, k: int) -> int:
        """Return how many tokens of `BatchState.tail` the proposer reads in a run that proposes at
        most k tokens per round."""
        return self.tail

    def up_to(self, k: int) -> "Proposer":
        """Return the proposer of a run with at most k >= 1 proposals per round.

        A proposer that runs parts of its draft only for later proposals returns one without these
        parts. The result shares the draft and its cache, reads the same hidden states, and proposes
        the same tokens. `begin`, `check` and `clear` are called on the original.
        """
        return self

    def begin(self) -> None:
        """Forget the texts of earlier runs. This is called before each run and each forecast, which
        may have the same prompts, with the same `index`, as the one before."""

    def prefill(self, spans: list[Span], features: torch.Tensor | None) -> None:
        """Process prompt tokens. features: [T, F], hidden states of these tokens, or None."""

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """Propose at most `draft.caps` tokens for each sequence."""
        raise NotImplementedError

    def commit(self, state: BatchState, verdict: Verdict, target: TargetOutput) -> None:
        """Update the proposer's own data after a round has accepted or rejected the proposals, but
        before `state` is advanced."""

    @property
    def takes_decisions(self) -> bool:
        """True if this class overrides `commit`."""
        return type(self).commit is not Proposer.commit

    def ahead(self, k: int) -> int:
        """Return how many positions past a text's end need cache blocks in a round with K = k,
        because the proposer's passes write there even if a sequence proposes fewer tokens. Return 0
        if only the positions of proposals need blocks."""
        return 0

    def kv_after(self, n: int, k: int, accepted: int) -> int:
        """Return how many tokens of a sequence, counted from its start, are in the proposer's cache
        after a round. The round began with n tokens and accepted `accepted` of k >= 1 proposals."""
        return n + accepted

    def forecast(self, teacher: Teacher, text: Sequence, params: SamplingParams) -> Forecast | None:
        """Compute the expected acceptance of proposals along the output of `text`, a finished one.

        Returns None if the proposer has no direct way to do this; `methods.forecast` then runs a
        round from each token. All ranks must call this, but only rank 0's result is valid.
        """
        return None

    def check(self) -> None:
        """Raise an error if one was detected on the device, where nothing can be raised. This is
        called when a run ends."""

    def clear(self) -> None:
        """Set the proposer's cache to zero after a pass gave logits that are not finite. Otherwise
        NaN would spread, because padding reads cached values with weight 0, and 0 * NaN is NaN."""
