"""Rotary embeddings of fused passes: tables of cosines and sines by position.

Some families rotate only the first features of a head, but kernels rotate the pairs (i, i + D / 2)
of all D. So the features of queries and keys are reordered. Each pair of the kernels is then a pair
that the family rotates, or two features that it does not rotate, with an angle of zero.
"""

from typing import Any

import torch
from torch import Tensor

from specdec_cli.models.fused_layer import fusable_family
from specdec_cli.models.held import StoredParameter

_CHUNK = 1 << 16  # positions


def turns_of(module: Any, max_len: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return the cosines and the sines of a loaded model, each [max_len, R * D] with its R
    different embeddings side by side, and the index of each layer's embedding."""
    rotary = module.model.rotary_emb
    kinds = _kinds(module)
    distinct = sorted(set(kinds), key=str)
    tables = [
        table_of(rotary, () if kind is None else (kind,), module.dtype, module.device, max_len)
        for kind in distinct
    ]
    if fusable_family(module).halves_turns:
        tables = [(cos.repeat(1, 2), sin.repeat(1, 2)) for cos, sin in tables]
    cos, sin = (torch.cat(halves, dim=1) for halves in zip(*tables, strict=True))
    return cos, sin, [distinct.index(kind) for kind in kinds]


def turned_features(module: Any) -> int:
    """Return the number of features per head that a loaded model's rotary embedding rotates."""
    cos, _ = table_of(module.model.rotary_emb, (), module.dtype, module.device, 1)
    return int(cos.shape[1])


def num_turns(module: Any) -> int:
    """Return the number of different rotary embeddings of a fusable model, which may be on meta."""
    return len(set(_kinds(module)))


def _kinds(module: Any) -> list[str | None]:
    """Return the type of each layer if types have their own rotary embeddings; else None for each
    layer."""
    count = len(module.model.layers)
    by_type = fusable_family(module).turns_by_type
    return list(module.config.layer_types[:count]) if by_type else [None] * count


def table_of(
    rotary: Any, kind: tuple[str, ...], dtype: torch.dtype, device: torch.device, max_len: int
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of a transformers rotary module, each [max_len, D]. kind: the
    type of the layers, as a tuple of one; empty if the module does not take types."""
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


def turn_whole_heads(module: Any, turned: int) -> None:
    """Reorder the queries and keys of a loaded model, so that its rotary embedding rotates whole
    heads. The results do not change, but cached keys have the new order. turned: the number of
    features that rotate.
    """
    head_dim = int(module.model.layers[0].self_attn.head_dim)
    if turned == head_dim:
        return
    order = order_of(head_dim, turned).to(module.device)
    for layer in module.model.layers:
        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj):
            for rows in (projection.weight, projection.bias):
                if rows is None:
                    continue
                if isinstance(rows, StoredParameter):
                    assert rows.value is not None
                    rows.value = rows.value.reordered(order)
                    continue
                heads = rows.data.unflatten(0, (-1, head_dim))
                rows.data = heads[:, order].flatten(0, 1)
        for norm in (getattr(attention, name, None) for name in ("q_norm", "k_norm")):
            if norm is not None:
                norm.weight.data = norm.weight.data[order]
    missing = (head_dim - turned) // 2
    module.model.rotary_emb.register_forward_hook(
        lambda _, args, out: (_widened(out[0], missing, 1.0), _widened(out[1], missing, 0.0))
    )


def order_of(head_dim: int, turned: int) -> Tensor:
    """Return the previous index of each feature of a reordered head, int64 [D]."""
    first, second = torch.arange(turned).chunk(2)
    passed, more_passed = torch.arange(turned, head_dim).chunk(2)
    return torch.cat((first, passed, second, more_passed))


def _widened(table: Tensor, missing: int, value: float) -> Tensor:
    """Widen cosines or sines [..., turned], whose halves are equal, to [..., D]. Each half gets
    `missing` times `value` at its end."""
    half = table.chunk(2, dim=-1)[0]
    half = torch.cat((half, half.new_full((*half.shape[:-1], missing), value)), dim=-1)
    return torch.cat((half, half), dim=-1)
