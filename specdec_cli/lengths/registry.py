"""Finds the code of length policies by their names in recipes."""

from importlib import import_module

from specdec_cli.lengths.base import LengthPolicy
from specdec_cli.recipe import SpeculationSection
from specdec_cli.recipe.choices.registry import POLICIES


def policy_of(speculation: SpeculationSection) -> LengthPolicy:
    """The policy that a recipe names: made by its module's `from_recipe`, or a plugin's."""
    name = speculation.length.policy
    make = POLICIES[name].code or import_module(f"specdec_cli.lengths.{name}").from_recipe
    made: LengthPolicy = make(speculation)
    return made
