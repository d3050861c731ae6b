"""A policy that ends a sequence's proposals before a token that the draft's own head doubts, as
DeepSpec cuts DSpark's blocks. The doubt depends on earlier tokens only, so the policy changes no
text."""

from specdec_cli.core.drafting import Doubt
from specdec_cli.lengths.base import LengthPolicy
from specdec_cli.recipe import SpeculationSection


class HeadsConfidence(LengthPolicy):
    """Ends a sequence's proposals before the first token whose confidence is below the
    threshold."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold

    @property
    def doubt(self) -> Doubt:
        return lambda confidences: confidences < self.threshold


def from_recipe(speculation: SpeculationSection) -> HeadsConfidence:
    return HeadsConfidence(speculation.length.threshold)
