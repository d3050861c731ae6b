"""Acceptance rules by their names in a recipe."""

from collections.abc import Callable
from dataclasses import dataclass

from specdec_cli.acceptance import synthetic, typical
from specdec_cli.acceptance.base import AcceptanceRule
from specdec_cli.acceptance.block import Block
from specdec_cli.acceptance.rejection import Rejection
from specdec_cli.recipe import SpeculationSection


def _as_it_is(speculation: SpeculationSection, k: int) -> SpeculationSection:
    return speculation


@dataclass(frozen=True, slots=True)
class Rule:
    """make: the rule of a recipe. for_k: the recipe's speculation when k reaches up to another
    number, for rules whose keys belong to one k; raises `UsageError` where it cannot.
    """

    make: Callable[[SpeculationSection], AcceptanceRule]
    for_k: Callable[[SpeculationSection, int], SpeculationSection] = _as_it_is


RULES: dict[str, Rule] = {
    "rejection": Rule(lambda _: Rejection()),
    "block": Rule(lambda _: Block()),
    "synthetic": Rule(synthetic.from_recipe, synthetic.for_k),
    "typical": Rule(typical.from_recipe),
}


def rule_of(speculation: SpeculationSection) -> AcceptanceRule:
    """The rule that a recipe names."""
    return RULES[speculation.acceptance].make(speculation)
