"""A policy that ends a sequence's proposals before a token for which the draft's confidence head
gives a low score. DeepSpec truncates DSpark's blocks like this. The score depends only on earlier
tokens, so the policy does not change the output distribution."""

from specdec_cli.core.drafting import Doubt
from specdec_cli.lengths.base import LengthPolicy
from specdec_cli.recipe import SpeculationSection


class HeadsConfidence(LengthPolicy):
    """Ends a sequence's proposals before the first token whose confidence score is below the
    threshold."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    @property
    def doubt(self) -> Doubt:
        return lambda confidences: confidences < self.threshold


def from_recipe(speculation: SpeculationSection) -> HeadsConfidence:
    return HeadsConfidence(speculation.length.threshold)
