"""Finds the code of the method that a recipe names."""

from importlib import import_module

from specdec_cli.methods.base import Method
from specdec_cli.recipe import SpeculationSection
from specdec_cli.recipe.choices.registry import METHODS


def method_of(speculation: SpeculationSection) -> Method:
    """Return the method that a recipe names: a plugin's method, or else `METHOD` in the built-in
    module of that name."""
    name = speculation.method
    found: Method = METHODS[name].code or import_module(f"specdec_cli.methods.{name}").METHOD
    return found
