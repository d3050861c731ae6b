"""Tables of cosines and sines by position, which fused passes look up."""

from typing import Any

import torch
from torch import Tensor

from specdec_cli.models.fused_layer import Family, family_of

_CHUNK = 1 << 16  # positions


def turns_of(module: Any, max_len: int) -> tuple[Tensor, Tensor, list[int]]:
    """The rotary embeddings of a loaded model's layers at its first `max_len` positions.

    Returns cosines and sines [max_len, R * D], R embeddings side by side, and the index of each
    layer's embedding.
    """
    rotary = module.model.rotary_emb
    kinds = _kinds(module)
    distinct = sorted(set(kinds), key=str)
    tables = [
        table_of(rotary, () if kind is None else (kind,), module.dtype, module.device, max_len)
        for kind in distinct
    ]
    if _family(module).halves_turns:
        tables = [(cos.repeat(1, 2), sin.repeat(1, 2)) for cos, sin in tables]
    cos, sin = (torch.cat(halves, dim=1) for halves in zip(*tables, strict=True))
    return cos, sin, [distinct.index(kind) for kind in kinds]


def turned_features(module: Any) -> int:
    """The number of features of a head that the rotary embedding of a loaded model turns."""
    cos, _ = table_of(module.model.rotary_emb, (), module.dtype, module.device, 1)
    return int(cos.shape[1])


def num_turns(module: Any) -> int:
    """The number of rotary embeddings of a fusable model; needs no weights."""
    return len(set(_kinds(module)))


def _kinds(module: Any) -> list[str | None]:
    """The type of each layer, where that selects its rotary embedding, else None."""
    count = len(module.model.layers)
    by_type = _family(module).turns_by_type
    return list(module.config.layer_types[:count]) if by_type else [None] * count


def _family(module: Any) -> Family:
    family = family_of(module)
    assert family is not None
    return family


def table_of(
    rotary: Any, kind: tuple[str, ...], dtype: torch.dtype, device: torch.device, max_len: int
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_len, D] of a transformers rotary module, for layers of this kind."""
    like = torch.empty(0, dtype=dtype, device=device)
    with torch.inference_mode():
        parts = [
            rotary(
                like,
                torch.arange(start, min(start + _CHUNK, max_len), device=device)[None],
                *kind,
            )
            for start in range(0, max_len, _CHUNK)
        ]
    return torch.cat([cos[0] for cos, _ in parts]), torch.cat([sin[0] for _, sin in parts])
