"""What a round needs of a proposer.

A proposer works on the device's view of a batch, `BatchState`. One that uses tensors only, and
never reads their values on the host, is captured into a CUDA graph with the rest of the round.
"""

from collections.abc import Sequence as Values
from dataclasses import dataclass
from typing import Protocol

import torch

from specdec_cli.core.batch import Span
from specdec_cli.core.candidates import Candidates, TargetOutput, Verdict
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import SamplingParams
from specdec_cli.methods.teacher import Teacher
from specdec_cli.models.paged import PagedModel
from specdec_cli.recipe import SpeculationSection


@dataclass(frozen=True, slots=True)
class MethodParts:
    """What a proposer may be made of, on this rank.

    draft: the draft model; None where the method has none, or this rank holds no part of it.
    draft_max_len: the draft's context length; 0 without a draft.
    """

    speculation: SpeculationSection
    target: PagedModel
    draft: PagedModel | None = None
    draft_max_len: int = 0


class Proposer(Protocol):
    """max_len: tokens of a sequence past which nothing is proposed. feature_layers: hidden states
    of the target that it asks for, in transformers' counting of `hidden_states`. needs_text:
    whether `BatchState.texts` is to hold the sequences' tokens. max_lag: most tokens that may be
    missing from its cache when a round begins; what is missing beyond is prefilled first.
    runs_on_host: whether it reads device data on the host, so that rounds cannot be captured.
    """

    max_len: int
    feature_layers: tuple[int, ...]
    needs_text: bool
    max_lag: int
    runs_on_host: bool

    def prefill(self, spans: list[Span], features: torch.Tensor | None) -> None:
        """Take in tokens of prompts. features: [T, F] of the same tokens, or None."""

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        """At most `draft.caps` tokens of each sequence."""
        ...

    def commit(self, state: BatchState, verdict: Verdict, target: TargetOutput) -> None:
        """Take in the decision of a round; `state` is still as it was before it."""

    def kv_after(self, n: int, k: int, accepted: int) -> int:
        """Leading tokens in the proposer's cache after a round that began with n tokens, proposed
        k >= 1 and accepted some of them."""
        ...

    def forecast(
        self,
        teacher: Teacher,
        prompt: Values[int],
        output: Values[int],
        k: int,
        params: SamplingParams,
    ) -> Forecast:
        """The fate of proposals for `output`, had each of its tokens been proposed.

        k: most tokens a round may propose. With several ranks all of them call this; the answer
        means something on rank 0.
        """
        ...

    def check(self) -> None:
        """Raise for what only the device could see; called as a run ends."""

    def clear(self) -> None:
        """Forget keys and values that are not finite: padding reads them, and 0 * NaN is NaN."""
