"""Rotary embeddings of a part of each head, made into embeddings of whole heads.

Some families turn the first features of a head and pass the others. Kernels turn the pairs
(i, i + D / 2) of all D features. The order of a head's features changes no score, as long as
queries and keys have the same. So the features are put into an order in which those pairs are the
family's own, and pairs of others, which an angle of zero passes.
"""

from typing import Any

import torch
from torch import Tensor

from specdec_cli.models.held import StoredParameter


def turn_whole_heads(module: Any, turned: int) -> None:
    """Reorder queries and keys of a loaded model, whose rotary embedding then turns whole heads.

    The model computes the same as before; its cached keys have the new order. turned: features of
    a head that turn. Does nothing for a model whose heads turn as a whole.
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
    """int64 [D]: the place at which each feature of a reordered head was before."""
    first, second = torch.arange(turned).chunk(2)
    passed, more_passed = torch.arange(turned, head_dim).chunk(2)
    return torch.cat((first, passed, second, more_passed))


def _widened(table: Tensor, missing: int, value: float) -> Tensor:
    """Cosines or sines [..., D] from [..., turned], of which the halves are equal."""
    half = table.chunk(2, dim=-1)[0]
    half = torch.cat((half, half.new_full((*half.shape[:-1], missing), value)), dim=-1)
    return torch.cat((half, half), dim=-1)
