"""Check the numbers in a model's config before transformers reads it and makes a module for each
layer.

This module does not import torch.
"""

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from specdec_cli.errors import SetupError
from specdec_cli.models.gguf.files import read_model
from specdec_cli.models.gguf.header import is_gguf
from specdec_cli.text import reason_of, shown

MAX_BYTES = 16 * 2**20
LFS_HINT = "run `git lfs pull` in the model's repository, or download the model again"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/v1"
_LAYERS = re.compile(r"(num_)?((hidden|encoder|decoder)_)?layers|n_layers?")
_EXPERTS = re.compile(r"(n|num|moe_num)_(local_|routed_|shared_)?experts(_per_tok)?")
_SIZES = set(
    "vocab_size hidden_size n_embd intermediate_size moe_intermediate_size num_attention_heads "
    "n_head num_key_value_heads head_dim max_position_embeddings n_positions".split()
)
_SPREAD = "initializer_range"  # of random weights; transformers rarely checks it
SEPARATE = "hf_quant_config.json"
_MOST = {"layers": 1000, "experts": 10_000, "sizes": 2**40}


def config_file(name: str, place: Path) -> dict[str, Any]:
    """Return the contents of a folder's config.json. For a GGUF file, return a dict that has only
    `num_attention_heads`. Raises `SetupError` if the file is not a config, or if a number in it is
    impossible; the message then names the key.
    """
    if is_gguf(place):
        values = read_model(place).values
        family = values.get("general.architecture")
        return {"num_attention_heads": values.get(f"{family}.attention.head_count")}
    config = json_object(place / "config.json", f"config.json of {name}")
    check_numbers(name, config, "config.json")
    return config


def separate_quantisation(name: str, place: Path) -> dict[str, Any] | None:
    """Return the settings in a folder's hf_quant_config.json, which Model-Optimizer writes, in the
    form of config.json's `quantization_config`. Returns None if there is no such file, or if it
    says that no weight is quantised. Raises `SetupError` if the file is damaged."""
    file = place / SEPARATE
    if not file.is_file():
        return None
    found = json_object(file, f"{file.name} of {name}")
    inner = found.get("quantization")
    if isinstance(inner, dict) and inner.get("quant_algo", inner) is None:
        return None
    return {"quant_method": "modelopt"} | found


def head_config_file(name: str, place: Path) -> dict[str, Any]:
    """Return what `config_file` does for a draft head's folder. The settings of
    hf_quant_config.json are in it as `quantization_config`, unless config.json has its own."""
    config = config_file(name, place)
    apart = separate_quantisation(name, place)
    return config if config.get("quantization_config") else config | {"quantization_config": apart}


def json_object(file: Path, told: str) -> dict[str, Any]:
    """Read one of a model's JSON files, and return the object in it. told: the name that error
    messages use for the file. Raises `SetupError` if the file cannot be read or does not hold an
    object."""
    try:
        if not file.is_file():
            raise ValueError("it is not a regular file")
        if file.stat().st_size > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
        config = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as problem:
        hint = "it is damaged or was edited, or this is not a model folder"
        raise unreadable(file, told, problem, hint) from None
    return config


def unreadable(file: Path, told: str, problem: Exception, hint: str) -> SetupError:
    """Return the error for a file of a model that could not be read.

    told: the name that the message uses for the file.
    problem: what was raised. Libraries say that a file is missing if it may not be read, so the
        file is opened again for the reason.
    hint: what to do if the file can be opened and is no Git LFS pointer.
    """
    try:
        if file.is_file():
            file.open("rb").close()
    except OSError as closed:
        problem = closed
    if isinstance(problem, OSError):
        reason = problem.strerror or reason_of(problem)
        hint = "check that the file exists and may be read"
    elif is_lfs_pointer(file):
        reason, hint = "it is a Git LFS pointer, not the file itself", LFS_HINT
    else:
        reason = reason_of(problem)
    return SetupError(f"cannot read {told}: {reason}", hint)


def is_lfs_pointer(file: Path) -> bool:
    """Return True if the file is the short text that replaces a large file in a clone without Git
    LFS."""
    if file.is_file():  # opening a pipe would wait for its writer
        with suppress(OSError), file.open("rb") as opened:
            return opened.read(len(_LFS_POINTER)) == _LFS_POINTER
    return False


def check_numbers(name: str, config: dict[str, Any], where: str) -> None:
    """Raise `SetupError` if a config has an impossible number. where: the name that the error
    message uses for the file."""
    inner = [config]
    while inner:
        for key, value in inner.pop().items():
            kind = "layers" if _LAYERS.fullmatch(key) else "sizes"
            kind = "experts" if _EXPERTS.fullmatch(key) else kind
            if isinstance(value, dict):
                inner.append(value)
            elif key == _SPREAD:
                if type(value) not in (int, float) or not 0 <= value <= 1:
                    what = f"{where} of {name}: {key} is {shown(value)}"
                    raise SetupError(what, "it must be a number from 0 to 1")
            elif kind != "sizes" or key in _SIZES:
                _check(f"{where} of {name}: {key}", value, int(kind == "sizes"), _MOST[kind])


def _check(what: str, value: Any, least: int, most: int) -> None:
    """Raise `SetupError` unless the value is null or from `least` to `most`. A list is checked
    value by value."""
    for count in value if isinstance(value, list) else [value]:
        if count is not None and not (type(count) is int and least <= count <= most):
            raise SetupError(
                f"{what} is {shown(count)}",
                f"it must be a whole number from {least} to {most}",
            )
