"""Cases by number: the same seed and number give the same files and the same command line."""

import os
import random
from collections.abc import Callable
from pathlib import Path

from tests.hostile import checkpoints, configs, folders, inputs, tokenizers
from tests.hostile.commands import Found
from tests.hostile.materials import Materials
from tests.hostile.runner import Case

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
}
_MEANWHILE = "meanwhile"
# Kinds by number: those with more places to damage come more often.
ORDER = (
    *("config", "tokenizer", "folder", "recipe", "weights", "data", "options", "config", "index"),
    *("tokenizer", "folder", "recipe", "head", "weights", "data", "options", "files", "tokenizer"),
    *("folder", _MEANWHILE),
)
KINDS = tuple(dict.fromkeys(ORDER))


def kind_of(number: int) -> str:
    return ORDER[number % len(ORDER)]


def case_of(seed: int, number: int, folder: Path, materials: Materials) -> Case:
    """Write the files of a case into `folder`, and return it."""
    rng, kind = random.Random(f"{seed}/{number}"), kind_of(number)
    wants_json, setup, codes = rng.random() < 0.6, None, (0, 1, 2, 3, 5)
    inside = Path.cwd()
    os.chdir(folder)
    try:
        if kind == _MEANWHILE:
            told, arguments, setup = folders.changed_meanwhile(rng, folder, materials)
            codes = (1,)
        else:
            told, arguments = _MAKERS[kind](rng, folder, materials)
    finally:
        os.chdir(inside)
    if wants_json and arguments[0] != "recipe":
        arguments = [*arguments, "--json"]
    return Case(number, kind, told, arguments, codes, setup)
