"""Length policies by their names in a recipe."""

from collections.abc import Callable

from specdec_cli.lengths import adaptive, confidence
from specdec_cli.lengths.base import LengthPolicy
from specdec_cli.lengths.fixed import FixedLength
from specdec_cli.recipe import SpeculationSection

POLICIES: dict[str, Callable[[SpeculationSection], LengthPolicy]] = {
    "fixed": lambda _: FixedLength(),
    "confidence": confidence.from_recipe,
    "adaptive": adaptive.from_recipe,
}


def policy_of(speculation: SpeculationSection) -> LengthPolicy:
    """The policy that a recipe names."""
    return POLICIES[speculation.length.policy](speculation)
