"""Finds the code of the length policy that a recipe names."""

from importlib import import_module

from specdec_cli.lengths.base import LengthPolicy
from specdec_cli.recipe import SpeculationSection
from specdec_cli.recipe.choices.registry import POLICIES


def policy_of(speculation: SpeculationSection) -> LengthPolicy:
    """Make the length policy that a recipe names. If a plugin provides this policy, call the
    plugin's function. Otherwise call `from_recipe` in the module with the policy's name."""
    name = speculation.length.policy
    make = POLICIES[name].code or import_module(f"specdec_cli.lengths.{name}").from_recipe
    made: LengthPolicy = make(speculation)
    return made
