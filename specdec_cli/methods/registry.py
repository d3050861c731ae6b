"""Finds the code of methods by their names in recipes."""

from importlib import import_module

from specdec_cli.methods.base import Method
from specdec_cli.recipe import SpeculationSection
from specdec_cli.recipe.choices.registry import METHODS


def method_of(speculation: SpeculationSection) -> Method:
    """The method that a recipe names: `METHOD` of the module of this name, or a plugin's."""
    name = speculation.method
    found: Method = METHODS[name].code or import_module(f"specdec_cli.methods.{name}").METHOD
    return found
