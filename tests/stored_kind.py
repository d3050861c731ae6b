"""A kind of stored weights for tests alone: int8 codes, two of which lie in an int16."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file
from specdec_kernels.linear.stored import KINDS, Kind, Storage, Stored

from specdec_cli.models.formats import FORMATS, Matrices, Scheme

PAIRS = "pairs of int8, for tests"
METHOD = "pairs"


def _decode(codes: torch.Tensor) -> torch.Tensor:
    return codes.contiguous().view(torch.int8).float()


def _encode(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.round().to(torch.int8).view(torch.int16)


def _scheme(settings: dict[str, Any], _: str) -> Scheme:
    high, wide = settings["group"]
    return Scheme((Matrices(Storage(PAIRS, (high, wide))),))


@contextmanager
def known() -> Iterator[None]:
    """Register the kind, and checkpoints of `METHOD`, during the block."""
    kind = Kind(torch.int16, 2, _decode, _encode, 127.0)
    with patch.dict(KINDS, {PAIRS: kind}), patch.dict(FORMATS, {METHOD: _scheme}):
        yield


def store(folder: Path, group: tuple[int, int], plain: tuple[str, ...] = ()) -> dict[str, Stored]:
    """Quantise a checkpoint's projections and experts in place; returns them by name.

    plain: words in the names of those that stay as they are.
    """
    settings = {"quant_method": METHOD, "group": group}
    tensors = load_file(folder / "model.safetensors")
    stored = {}
    for name, matrix in list(tensors.items()):
        if matrix.dim() < 2 or not is_product(name) or any(word in name for word in plain):
            continue
        stored[name] = Storage(PAIRS, group).quantised(matrix)
        tensors |= {name: stored[name].codes, f"{name}_scale": stored[name].scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return stored


def is_product(name: str) -> bool:
    return "_proj" in name or ".experts." in name or name == "lm_head.weight"


def dequantise(folder: Path) -> None:
    """Put plain numbers in place of stored ones."""
    config = json.loads((folder / "config.json").read_text())
    settings = config.pop("quantization_config")
    tensors = load_file(folder / "model.safetensors")
    for ending in [name for name in tensors if name.endswith("_scale")]:
        name, scales = ending.removesuffix("_scale"), tensors.pop(ending)
        storage = Storage(PAIRS, tuple(settings["group"]))
        tensors[name] = Stored(tensors[name], scales, None, storage).plain(torch.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
