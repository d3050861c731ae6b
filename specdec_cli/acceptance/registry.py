"""Finds the code of the acceptance rule that a recipe names."""

from importlib import import_module

from specdec_cli.acceptance.base import AcceptanceRule, Rule
from specdec_cli.recipe import SpeculationSection
from specdec_cli.recipe.choices.registry import RULES


def rule_of(speculation: SpeculationSection) -> AcceptanceRule:
    """Return the acceptance rule that a recipe names."""
    return _named(speculation.acceptance).make(speculation)


def for_k(speculation: SpeculationSection, k: int) -> SpeculationSection:
    """Adapt a recipe's speculation section to a different largest k; see `Rule`."""
    return _named(speculation.acceptance).for_k(speculation, k)


def _named(name: str) -> Rule:
    """Return the rule of this name: a plugin's rule, or else `RULE` in the built-in module of that
    name."""
    found: Rule = RULES[name].code or import_module(f"specdec_cli.acceptance.{name}").RULE
    return found
