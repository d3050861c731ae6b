"""A policy that ends a sequence's proposals after a token that the draft finds unlikely.

The unlikely token itself is still proposed, as with transformers' `assistant_confidence_threshold`
(after DISCO, arXiv 2405.04304). If a token were dropped because of its own probability, the output
distribution would change.
"""

import torch

from specdec_cli.core.drafting import Stop
from specdec_cli.lengths.base import LengthPolicy
from specdec_cli.recipe import SpeculationSection


class Confidence(LengthPolicy):
    """Ends a sequence's proposals after the first token whose probability is below the threshold.
    The probability is the draft's, at temperature 1."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    @property
    def stop(self) -> Stop:
        return self._is_unsure

    def _is_unsure(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits = logits.float()
        drawn = logits.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
        return (drawn - logits.logsumexp(dim=1)).exp() < self.threshold


def from_recipe(speculation: SpeculationSection) -> Confidence:
    return Confidence(speculation.length.threshold)
