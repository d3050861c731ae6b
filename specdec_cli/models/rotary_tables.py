"""Makes the tables that kernels use to apply rotary embeddings: cosines and sines by position.

The kernels rotate every pair (i, i + D / 2) of a head's D features, but some families rotate only
the first features. For these, the features of queries and keys are reordered. Each pair in the
kernels is then either a pair that the family rotates, or two features that it leaves alone. The
latter are rotated by an angle of zero.
"""

from typing import Any

import torch
from torch import Tensor

from specdec_cli.models.fused_layer import fusable_family
from specdec_cli.models.held import StoredParameter

_CHUNK = 1 << 16  # positions for which tables are computed at once


def turns_of(module: Any, max_len: int) -> tuple[Tensor, Tensor, list[int]]:
    """Compute the rotary tables of a loaded model that has R different rotary embeddings.

    Returns the cosines, the sines and a list. The cosines and the sines are each [max_len, R * D]:
    the tables of the R embeddings, side by side. The list contains, for each layer, the index
    (0..R-1) of the embedding that the layer uses.
    """
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


def num_turns(module: Any) -> int:
    """Return how many different rotary embeddings a fusable model has. It may be on the meta
    device."""
    return len(set(_kinds(module)))


def _kinds(module: Any) -> list[str | None]:
    """Return the type of each layer, such as `sliding_attention`, if the family has a separate
    rotary embedding for each type. If all layers share one embedding, return None for each."""
    count = len(module.model.layers)
    by_type = fusable_family(module).turns_by_type
    return list(module.config.layer_types[:count]) if by_type else [None] * count


def table_of(
    rotary: Any, kind: tuple[str, ...], dtype: torch.dtype, device: torch.device, max_len: int
) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines that a transformers rotary module computes for positions
    0..max_len - 1, each [max_len, D].

    kind: the arguments to pass to the module after the positions: the type of the layers, or no
    argument if the module has only one embedding.
    """
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


def turn_whole_heads(module: Any) -> None:
    """Reorder the features of queries and keys of a loaded model that rotates only the first
    features of a head, and widen its tables of cosines and sines to whole heads.

    Queries and keys are reordered in the same way, so the results of attention do not change.
    Cached keys have the new order.
    """
    head_dim = int(module.model.layers[0].self_attn.head_dim)
    cos, _ = table_of(module.model.rotary_emb, (), module.dtype, module.device, 1)
    turned = cos.shape[1]
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
    """Return the index that each feature of a reordered head had before, int64 [D]. turned: the
    number of features per head that the family rotates."""
    first, second = torch.arange(turned).chunk(2)
    passed, more_passed = torch.arange(turned, head_dim).chunk(2)
    return torch.cat((first, passed, second, more_passed))


def _widened(table: Tensor, missing: int, value: float) -> Tensor:
    """Widen cosines or sines from [..., turned] to [..., D]. The table's two halves are equal;
    append `missing` columns with `value` to each of them."""
    half = table.chunk(2, dim=-1)[0]
    half = torch.cat((half, half.new_full((*half.shape[:-1], missing), value)), dim=-1)
    return torch.cat((half, half), dim=-1)
