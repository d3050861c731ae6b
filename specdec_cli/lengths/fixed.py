"""The policy with a fixed length: every round proposes as many tokens as the recipe says."""

from specdec_cli.lengths.base import LengthPolicy
from specdec_cli.recipe import SpeculationSection


class FixedLength(LengthPolicy):
    """Proposes k tokens in every round."""

    is_fixed = True


def from_recipe(speculation: SpeculationSection) -> FixedLength:
    return FixedLength()
