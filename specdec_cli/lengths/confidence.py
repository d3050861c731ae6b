"""A policy that stops a sequence's drafting after a token that the draft finds unlikely.

As in transformers' `assistant_confidence_threshold` (after DISCO, arXiv 2405.04304), the unlikely
token stays proposed. The decision to stop so depends on no token that is dropped.
"""

import torch

from specdec_cli.core.drafting import Stop
from specdec_cli.core.state import BatchState
from specdec_cli.lengths.base import LastRounds
from specdec_cli.lengths.costs import RoundCosts
from specdec_cli.recipe import SpeculationSection


class Confidence:
    """threshold: a drawn token is its sequence's last proposal if its probability, in the draft's
    softmax at temperature 1, is lower."""

    is_fixed = False

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    @property
    def stop(self) -> Stop:
        return self._is_unsure

    def _is_unsure(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        drawn = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
        return (drawn - logits.logsumexp(dim=1)).exp() < self.threshold

    def lengths(self, k: int) -> tuple[int, ...]:
        return (k,)

    def next_k(
        self, lengths: tuple[int, ...], last: LastRounds, costs: RoundCosts, slots: int
    ) -> int:
        return lengths[-1]

    def caps(self, state: BatchState, caps: torch.Tensor) -> torch.Tensor:
        return caps


def from_recipe(speculation: SpeculationSection) -> Confidence:
    return Confidence(speculation.length.threshold)
