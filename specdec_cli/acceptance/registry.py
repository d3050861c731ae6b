"""Finds the code of acceptance rules by their names in recipes."""

from importlib import import_module

from specdec_cli.acceptance.base import AcceptanceRule, Rule
from specdec_cli.recipe import SpeculationSection
from specdec_cli.recipe.choices.registry import RULES


def rule_of(speculation: SpeculationSection) -> AcceptanceRule:
    """The rule that a recipe names."""
    return _named(speculation.acceptance).make(speculation)


def for_k(speculation: SpeculationSection, k: int) -> SpeculationSection:
    """A recipe's speculation, adapted to a different largest k; see `Rule`."""
    return _named(speculation.acceptance).for_k(speculation, k)


def _named(name: str) -> Rule:
    """`RULE` of the module of this name, or a plugin's."""
    found: Rule = RULES[name].code or import_module(f"specdec_cli.acceptance.{name}").RULE
    return found
