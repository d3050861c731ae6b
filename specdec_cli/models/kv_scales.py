"""The scales of a KV cache in fp8: the checkpoint's own, or 1.

A checkpoint has one scale for keys and one for values, per layer or per head. Keys and values are
divided by their scale. The scales are found by the names that compressed-tensors, Model-Optimizer
and AutoFP8 give them.
"""

import re
from pathlib import Path
from typing import Any

import torch
from specdec_kernels import ops

from specdec_cli.core.kv_cache import LayerShape
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.errors import SetupError
from specdec_cli.models.gguf.header import is_gguf
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.weights import open_checkpoint, tensor_names
from specdec_cli.text import one_line

_NAMES = re.compile(
    r"(?:^|\.)layers\.(\d+)\.self_attn\."
    r"(?:attn\.|[kv]_proj\.)?(?:(kv|k|v)_scale|(?<=[kv]_proj\.)output_scale)$"
)
_WITHOUT = "cache.dtype: auto needs no scales"


def cache_dtype(spec: ModelSpec, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the cache's elements for a model in `dtype`."""
    return ops.FP8 if spec.cache == "fp8" else dtype


def cache_note(spec: ModelSpec, place: Path | None = None) -> dict[str, str]:
    """Return a note on the cache for the record of a run, or an empty dict if there is nothing to
    say. place: the checkpoint, which may contain scales."""
    has_scales = place is not None and bool(_scales_in(spec, place))
    if spec.cache == "fp8":
        told = "the checkpoint's scales" if has_scales else "scales of 1"
        return {"kv_cache": f"float8_e4m3fn, {told}"}
    told = "the checkpoint's scales for a cache in fp8 are not used"
    return {"kv_cache": told} if has_scales else {}


def read_scales(
    spec: ModelSpec,
    place: Path,
    config: Any,
    layers: list[LayerShape],
    parallel: TensorParallel,
    device: torch.device,
) -> list[torch.Tensor] | None:
    """Return the scales of each layer on this rank, fp32 [2, Hkv] as in `ops.LayerCache`, or None
    if there are no scales. Raises a `SetupError` that names the tensor or the key for scales that
    do not fit or are not for fp8.
    """
    names = _scales_in(spec, place) if spec.cache == "fp8" else {}
    if not names:
        return None
    settings = getattr(config, "quantization_config", None) or {}
    scheme = settings.get("kv_cache_scheme") or {}
    if (scheme.get("num_bits", 8), scheme.get("type", "float")) != (8, "float"):
        raise SetupError(
            f"config.json of {spec.name}: quantization_config.kv_cache_scheme is "
            f"{one_line(repr(scheme))}, but cache.dtype: fp8 needs 8-bit floats",
            _WITHOUT,
        )
    found = []
    with open_checkpoint(place, spec.allow_pickle) as tensors:
        for index, shape in enumerate(layers):
            sides = []
            for side in "kv":
                if (name := names.get((index, side))) is None:
                    raise SetupError(
                        f"{spec.name} has scales for its KV cache, but layer {index} lacks "
                        f"{side}_scale",
                        _WITHOUT,
                    )
                told = f"{one_line(name)} of {spec.name}"
                sides.append(_of_heads(tensors[name](), told, shape.num_kv_heads, parallel))
            found.append(torch.stack(sides).to(device))
    return found


def _of_heads(
    stored: torch.Tensor, told: str, heads: int, parallel: TensorParallel
) -> torch.Tensor:
    """Convert a stored scale to one value for each KV head of this rank, fp32 [heads].

    stored: a single scale for the layer, or one for each of the model's KV heads.
    told: the scale's name in messages.
    heads: the number of KV heads that this rank caches.
    """
    found, size = stored.float().flatten(), parallel.size
    if not (count := len(found)) or not bool(((found > 0) & found.isfinite()).all()):
        raise SetupError(f"{told} must have finite values above 0, not {stored.tolist()}", _WITHOUT)
    # A rank caches its share of the heads or, if there are more ranks than heads, one head that
    # several ranks share. In some families each rank caches all heads, so `count` equals `heads`.
    if count in (1, heads):
        return found.expand(heads)
    if count != heads * size and (heads != 1 or size % count):
        whole = heads * size
        told = f"{told} has shape {list(stored.shape)}, but the model has {whole} KV heads"
        raise SetupError(told, _WITHOUT)
    first = parallel.rank * count // size
    return found[first : first + heads]


def _scales_in(spec: ModelSpec, place: Path) -> dict[tuple[int, str], str]:
    """Return the names of a checkpoint's cache scales, by (layer index, "k" for keys or "v" for
    values). Dummy weights and GGUF files have none."""
    if spec.load_format == "dummy" or is_gguf(place):
        return {}
    found: dict[tuple[int, str], str] = {}
    for name in tensor_names(place):
        if (match := _NAMES.search(name)) is not None:
            sides = match[2] or name.removesuffix("_proj.output_scale")[-1]
            found |= {(int(match[1]), side): name for side in sides}
    return found
