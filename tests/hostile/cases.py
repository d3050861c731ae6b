"""Cases by number: the same seed and number give the same files and the same command line."""

import os
import random
from collections.abc import Callable
from pathlib import Path

from tests.hostile import (
    checkpoints,
    configs,
    data_folders,
    folders,
    inputs,
    surroundings,
    tokenizers,
)
from tests.hostile.commands import Found
from tests.hostile.materials import Materials
from tests.hostile.runner import Case
from tests.hostile.surroundings import Set

_MAKERS: dict[str, Callable[[random.Random, Path, Materials], Found]] = {
    "config": configs.config,
    "index": checkpoints.index,
    "tokenizer": tokenizers.tokenizer,
    "weights": checkpoints.weights,
    "head": configs.head,
    "files": checkpoints.files,
    "recipe": inputs.recipe,
    "data": inputs.data,
    "options": inputs.options,
    "folder": folders.run_folder,
    "dataset": data_folders.data_folder,
}
_SETTERS: dict[str, Callable[[random.Random, Path, Materials], Set]] = {
    "meanwhile": folders.changed_meanwhile,
    "environment": surroundings.environment,
    "piped": surroundings.piped,
    "output": surroundings.output,
}
# The streams of the last are not there to be judged by.
_CODES = {"meanwhile": (1,), "output": (0, 1, 2, 5)}
# Kinds by number: those with more places to damage come more often.
ORDER = (
    *("config", "tokenizer", "folder", "recipe", "weights", "data", "options", "config", "index"),
    *("tokenizer", "folder", "recipe", "head", "weights", "data", "options", "files", "tokenizer"),
    *("folder", "meanwhile", "environment", "piped", "output", "dataset"),
)
KINDS = tuple(dict.fromkeys(ORDER))


def kind_of(number: int) -> str:
    return ORDER[number % len(ORDER)]


def case_of(seed: int, number: int, folder: Path, materials: Materials) -> Case:
    """Write the files of a case into `folder`, and return it."""
    rng, kind = random.Random(f"{seed}/{number}"), kind_of(number)
    wants_json, setup = rng.random() < 0.6, None
    inside = Path.cwd()
    os.chdir(folder)
    try:
        if kind in _SETTERS:
            told, arguments, setup = _SETTERS[kind](rng, folder, materials)
        else:
            told, arguments = _MAKERS[kind](rng, folder, materials)
    finally:
        os.chdir(inside)
    has_json = arguments[0] != "recipe" and "help" not in arguments[-1] and kind != "output"
    if wants_json and has_json:
        arguments = [*arguments, "--json"]
    return Case(number, kind, told, arguments, _CODES.get(kind, (0, 1, 2, 3, 5)), setup)
