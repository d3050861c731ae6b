"""Finds the code of the method that a recipe names."""

import re
from importlib import import_module

from specdec_cli.methods.base import Method
from specdec_cli.models.description import Description
from specdec_cli.recipe import SpeculationSection
from specdec_cli.recipe.choices.registry import METHODS


def method_of(speculation: SpeculationSection) -> Method:
    """Return the method that a recipe names: a plugin's method, or else `METHOD` in the built-in
    module of that name."""
    return _method(speculation.method)


def draft_tensors_of(target: Description) -> re.Pattern[str] | None:
    """Return a pattern for the names of tensors in a target's files that are drafts of any method;
    None if the target's config declares no draft, or if its files have other tensor names."""
    found = []
    for name, choice in METHODS.items():
        if target.names is None and choice.weights_from == "target":
            read = _method(name).tensors_in_target
            found.append(read and read(target.spec.name, target.place, target.module.config))
    patterns = [pattern.pattern for pattern in found if pattern is not None]
    return re.compile("|".join(patterns)) if patterns else None


def _method(name: str) -> Method:
    found: Method = METHODS[name].code or import_module(f"specdec_cli.methods.{name}").METHOD
    return found
