"""Acceptance rules by their names in a recipe."""

from collections.abc import Callable

from specdec_cli.acceptance import synthetic, typical
from specdec_cli.acceptance.base import AcceptanceRule
from specdec_cli.acceptance.block import Block
from specdec_cli.acceptance.rejection import Rejection
from specdec_cli.recipe import SpeculationSection

RULES: dict[str, Callable[[SpeculationSection], AcceptanceRule]] = {
    "rejection": lambda _: Rejection(),
    "block": lambda _: Block(),
    "synthetic": synthetic.from_recipe,
    "typical": typical.from_recipe,
}


def rule_of(speculation: SpeculationSection) -> AcceptanceRule:
    """The rule that a recipe names."""
    return RULES[speculation.acceptance](speculation)
