"""Length policies by their names in a recipe."""

from collections.abc import Callable

from specdec_cli.lengths import adaptive, confidence
from specdec_cli.lengths.base import LengthPolicy
from specdec_cli.lengths.fixed import FixedLength
from specdec_cli.recipe import LengthSection

POLICIES: dict[str, Callable[[LengthSection], LengthPolicy]] = {
    "fixed": lambda _: FixedLength(),
    "confidence": confidence.from_recipe,
    "adaptive": adaptive.from_recipe,
}


def policy_of(section: LengthSection) -> LengthPolicy:
    """The policy that a recipe names."""
    return POLICIES[section.policy](section)
