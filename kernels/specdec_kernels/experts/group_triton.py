"""The router for larger inputs than those of `route_triton`. One kernel computes the logits, the
chosen experts and their weights, and groups the (token, expert) pairs by expert.

Each program computes the logits of some tokens and experts. The last program to finish a tile of
tokens chooses their experts, and appends each pair of a token and an expert to the expert's list.
The order of an expert's pairs thus varies between runs, but no result depends on it. No result is
copied to the host, so the host does not wait.
"""

from functools import partial

import torch
import triton
import triton.language as tl

from specdec_kernels.experts.plan import PairGroups
from specdec_kernels.experts.reference import Experts
from specdec_kernels.experts.route_triton import (
    launch_router,
    load_choice_bias,
    load_routes,
    store_logits,
)
from specdec_kernels.experts.tiles import router_tiles
from specdec_kernels.launch_triton import is_last
from specdec_kernels.linear.reference import Normed

# Counters before this index count finished programs. The others count each expert's pairs.
SIZES = tl.constexpr(1024)


@triton.jit(do_not_specialize=["num_rows"])
def group_kernel(
    x_ptr,  # [T, K]
    squares_ptr,  # [T, PARTS] fp32, partial sums of each row's squares; None if PARTS is 0
    router_ptr,  # [E, K]
    bias_ptr,  # [E], or None
    choice_bias_ptr,  # [E], or None
    logits_ptr,  # [T, E], out
    counters_ptr,  # [>= SIZES + E] int32, zeros
    sizes_ptr,  # out; this and the next 3: fields of `PairGroups`; factors_ptr only if PARTS > 0
    pairs_ptr,
    weights_ptr,
    factors_ptr,
    read_ptr,  # [1] int32, out: the number of experts with at least one pair; or None
    num_rows,
    num_experts,  # E
    x_stride,
    eps,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_ALL: tl.constexpr,  # at least E
    BLOCK_P: tl.constexpr,
    ROUTING: tl.constexpr,
    TILES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    choice_bias = load_choice_bias(choice_bias_ptr, num_experts, BLOCK_ALL)
    store_logits(
        *(x_ptr, squares_ptr, router_ptr, bias_ptr, logits_ptr, factors_ptr),
        *(num_rows, num_experts, x_stride, eps, K, PARTS, BLOCK_P, TILES, DEPENDENT),
    )
    block = tl.program_id(1)
    if not is_last(counters_ptr + 1 + block, tl.num_programs(0)):
        return

    column = tl.arange(0, BLOCK_ALL)
    known = column < num_experts
    row = block * TILES.block_m + tl.arange(0, TILES.block_m)
    row_live = row < num_rows
    chosen, weights = load_routes(logits_ptr, choice_bias, row, num_rows, num_experts, ROUTING)
    pair = row[:, None] * ROUTING.num_chosen + tl.cumsum(chosen, axis=1) - 1
    is_pair = (chosen != 0) & row_live[:, None]
    tl.store(weights_ptr + pair, weights, mask=is_pair)
    sums_ptr = counters_ptr + SIZES + column
    every = tl.broadcast_to(sums_ptr[None, :], chosen.shape)
    place = tl.atomic_add(every, 1, mask=is_pair, sem="relaxed", scope="gpu")
    tl.store(pairs_ptr + column[None, :] * num_rows + place, pair, mask=is_pair)
    if not is_last(counters_ptr, tl.num_programs(1)):
        return

    size = tl.load(sums_ptr, mask=known, other=0, cache_modifier=".cg")
    tl.store(sizes_ptr + column, size, mask=known)
    tl.store(sums_ptr, 0, mask=known)
    if read_ptr is not None:
        tl.store(read_ptr, tl.sum((size > 0).to(tl.int32)))


def group_triton(x: Normed, experts: Experts) -> PairGroups:
    """Choose the experts of the tokens x [T, K], and return the pairs grouped by expert."""
    num_rows, width = x.scaled.shape
    tiles = router_tiles(width, x.scaled.element_size())
    assert triton.cdiv(num_rows, tiles.block_m) < SIZES.value
    empty = partial(torch.empty, dtype=torch.float32, device=x.scaled.device)
    groups = PairGroups(
        sizes=empty(experts.num_experts, dtype=torch.int32),
        pairs=empty(experts.num_experts, num_rows, dtype=torch.int32),
        weights=empty(num_rows, experts.routing.num_chosen),
        factors=None if x.squares is None else empty(num_rows),
    )
    launch_router(group_kernel, x, experts, (*groups, experts.read))
    return groups
