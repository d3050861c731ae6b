"""Read a model's settings from its own files: config, dtype, maximum sequence length and
end-of-sequence token ids."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from specdec_cli.errors import SetupError
from specdec_cli.models.config_file import config_file, separate_quantisation
from specdec_cli.models.generation_config import FILE as GENERATION
from specdec_cli.models.generation_config import generation_config
from specdec_cli.models.gguf.config import gguf_config
from specdec_cli.models.gguf.files import read_model
from specdec_cli.models.gguf.header import is_gguf
from specdec_cli.models.refusals import Unsupported
from specdec_cli.text import reason_of, shown


def read_config(name: str, place: Path, *, trust_remote_code: bool) -> Any:
    """Return transformers' config for a model's folder or GGUF file. Raises `SetupError` if it
    cannot be read."""
    if is_gguf(place):
        return gguf_config(name, read_model(place))
    kind = config_file(name, place).get("model_type")
    try:
        config = AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code)
    except Exception as problem:
        if "trust_remote_code" in str(problem):
            raise SetupError(
                f"model {name} needs code from its own repository",
                "pass --trust-remote-code if you trust it",
            ) from None
        if "model type" in str(problem) or "model_type" in str(problem):
            raise Unsupported(name, f"transformers knows no model_type {shown(kind)}") from None
        raise SetupError(
            f"cannot read config.json of {name}: {reason_of(problem)}",
            "it is damaged or was edited, or this is not a model folder",
        ) from None
    apart = separate_quantisation(name, place)
    if apart is not None and getattr(config, "quantization_config", None) is None:
        config.quantization_config = apart
    return config


def dtype_of(wanted: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the torch dtype for a dtype's name. `auto` means the checkpoint's dtype on CUDA, and
    float32 on a CPU, where 16-bit types are slow."""
    if wanted != "auto":
        named: torch.dtype = getattr(torch, wanted)
        return named
    if device.type != "cuda":
        return torch.float32
    stored = getattr(config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) else torch.bfloat16


# Rotary scalings that extend the trained context. With these, max_position_embeddings may be the
# length before scaling. With longrope and llama3 it is the extended length.
_STRETCHED = ("yarn", "linear")


def max_len_of(config: Any) -> int:
    """Return the maximum number of tokens in a sequence, including any extension by rotary scaling.
    It is 2**20 if the config sets no limit."""
    for key in ("max_position_embeddings", "n_positions"):
        value = getattr(config, key, None)
        if isinstance(value, int) and value > 0:
            return max(value, _stretched(config, value))
    return 1 << 20


def _stretched(config: Any, length: int) -> int:
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or rope.get("rope_type") not in _STRETCHED:
        return length
    original: Any = rope.get("original_max_position_embeddings") or length
    factor: Any = rope.get("factor")
    if type(original) is not int or type(factor) not in (int, float) or not 1 <= factor < 2**20:
        return length
    return int(original * factor)


def eos_ids_of(config: Any, place: Path) -> frozenset[int]:
    """Return the end-of-sequence token ids from the generation config or, if it has none, from the
    model's config. Old checkpoints write -1 for none, so negative ids are left out. Raises
    `SetupError` if they are not numbers."""
    eos = getattr(config, "eos_token_id", None)
    stored = generation_config(place).get("eos_token_id")
    eos = eos if stored is None else stored
    ids = eos if isinstance(eos, list) else [eos] if eos is not None else []
    if not all(type(i) is int for i in ids):
        where = place / ("config.json" if stored is None else GENERATION)
        raise SetupError(
            f"{where}: eos_token_id is {json.dumps(eos)}",
            "it must be a number or a list of numbers",
        )
    return frozenset(i for i in ids if i >= 0)
