"""The second half of a decoder layer with experts, on CUDA. This module chooses the kernels by the
number of tokens.

It launches three kernels for a few tokens and four kernels for more tokens. For many tokens it uses
torch's grouped matmuls.
"""

from typing import TypeVar

import torch
from torch import Tensor

from specdec_kernels.comm.peers import Peers
from specdec_kernels.experts.down_triton import down_add_norm_triton, launch_down
from specdec_kernels.experts.gate_up_triton import gate_up_triton
from specdec_kernels.experts.group_triton import group_triton
from specdec_kernels.experts.grouped_triton import grouped_mixture_add_norm
from specdec_kernels.experts.plan import ExpertPlan, are_few
from specdec_kernels.experts.reference import Experts
from specdec_kernels.experts.route_triton import route_triton
from specdec_kernels.experts.sorted_triton import sorted_mixture_add_norm
from specdec_kernels.experts.tiles import (
    ExpertTiles,
    GroupTiles,
    choose_expert_tiles,
    choose_group_tiles,
    most_tokens,
    way_of,
)
from specdec_kernels.gpu import gpu_of
from specdec_kernels.linear.plain_triton import plain_triton
from specdec_kernels.linear.reference import Normed
from specdec_kernels.linear.stored import BLOCK, Stored
from specdec_kernels.linear.tiles import can_be_tiled, slices_for

AnyTiles = TypeVar("AnyTiles", ExpertTiles, GroupTiles)


def mixture_add_norm_triton(x: Normed, experts: Experts, norm_weight: Tensor, eps: float) -> Normed:
    """See `ops.mixture_add_norm`."""
    if has_few_tokens(x, experts):
        down = of_few_tokens(x, experts)
        return down_add_norm_triton(*down, x.hidden, norm_weight, eps)
    return of_many_tokens(x, experts, x.hidden, norm_weight, eps)


def in_tiles_triton(experts: Experts, dtype: torch.dtype) -> Experts:
    """See `ops.in_tiles`."""
    if not can_be_tiled(dtype, experts.router.device, experts.gate_up, experts.down):
        return experts
    gate_up, down = (w.tiled() for w in (experts.gate_up, experts.down) if isinstance(w, Stored))
    return experts._replace(gate_up=gate_up, down=down)


def mixture_to_peers(
    peers: Peers, place: int, x: Normed, experts: Experts, start: Tensor | None
) -> bool:
    """Compute the part of the mixture of x that this rank's features contribute, plus `start`, and
    send or store it. Return as `products_triton.linear_to_peers` does."""
    part = peers.part(place, len(x.hidden))
    if has_few_tokens(x, experts):
        launch_down(*of_few_tokens(x, experts), start, part)
        return part.inbox is not None
    of_many_tokens(x, experts, start, None, 0.0, part.into)
    return False


def has_few_tokens(x: Normed, experts: Experts) -> bool:
    """Return whether the kernels for a few tokens compute the mixture of x."""
    num_rows = len(x.hidden)
    way = way_of(experts.gate_up, experts.down)
    if way == "plain":
        return are_few(num_rows, experts.routing.num_chosen, experts.num_experts)
    return 0 < num_rows <= most_tokens(way)


def of_few_tokens(x: Normed, experts: Experts) -> tuple[Tensor, ExpertPlan, Experts, ExpertTiles]:
    """Route a few tokens and compute the first matmuls of their experts. Return the arguments of
    `down_add_norm_triton` up to the tiles."""
    dtype = x.hidden.dtype
    way = way_of(experts.gate_up, experts.down)
    tiles = choose_expert_tiles(len(x.hidden), dtype.itemsize, way)
    experts, (first, second) = readable(experts, tiles, dtype)
    plan = route_triton(x, experts)
    return gate_up_triton(x.scaled, plan, experts, first), plan, experts, second


def of_many_tokens(
    x: Normed,
    experts: Experts,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    into: Tensor | None = None,
) -> Normed:
    """Add the mixture of many tokens to `residual`. The last four arguments are those of
    `combine_triton`."""
    dtype = x.hidden.dtype
    sizes = len(x.hidden), experts.routing.num_chosen, experts.num_experts
    end = residual, norm_weight, eps, into
    room = gpu_of(x.hidden.device).shared_memory
    way = way_of(experts.gate_up, experts.down)
    grouped = choose_group_tiles(*sizes, dtype.itemsize, room, way)
    if grouped is None:
        gate_up, down = (plain_triton(w, dtype) for w in (experts.gate_up, experts.down))
        experts = experts._replace(gate_up=gate_up, down=down)
        grouped = choose_group_tiles(*sizes, dtype.itemsize, room)
    if grouped is None:
        return sorted_mixture_add_norm(x, experts, *end)
    experts, grouped = readable(experts, grouped, dtype)
    groups = group_triton(x, experts)
    return grouped_mixture_add_norm(x, groups, experts, grouped, *end)


def readable(
    experts: Experts, tiles: tuple[AnyTiles, AnyTiles], dtype: torch.dtype
) -> tuple[Experts, tuple[AnyTiles, AnyTiles]]:
    """Apply `fitted` to both weights of the experts. Return the experts with weights that the
    kernels can read, and the tiles for gate and up, and for down."""
    if way_of(experts.gate_up, experts.down) == "tiled":
        return experts, tiles
    gate_up, first = fitted(experts.gate_up, tiles[0], dtype)
    down, second = fitted(experts.down, tiles[1], dtype)
    return experts._replace(gate_up=gate_up, down=down), (first, second)


def fitted(
    weight: Tensor | Stored, tiles: AnyTiles, dtype: torch.dtype
) -> tuple[Tensor | Stored, AnyTiles]:
    """Return a weight that the kernels can read, and tiles that fit it. A quantised weight stays
    quantised if no group has rows of two experts, and if `block_k` of the tiles can be aligned with
    its groups of columns. Otherwise it is dequantised to `dtype`."""
    if isinstance(weight, Tensor):
        return weight, tiles
    deep = tiles._replace(block_k=max(tiles.block_k, BLOCK))
    slices = slices_for(weight, deep.block_k, deep.slices)
    if slices is None or weight.shape[-2] % weight.storage.group[0]:
        return plain_triton(weight, dtype), tiles
    return weight, deep._replace(slices=slices)
