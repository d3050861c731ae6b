"""The router for a few tokens. One kernel computes the logits, chooses the experts, computes their
weights and writes the `ExpertPlan`.

Each program computes the logits of some tokens and experts. The last program to finish reads all
logits, chooses the experts and writes the plan. Each program reads only a few rows of the router's
weight, so it loads them into registers before it waits for the preceding kernel.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.experts.plan import FEW_TOKENS, ExpertPlan
from specdec_kernels.experts.reference import TINY, Experts
from specdec_kernels.experts.tiles import router_tiles
from specdec_kernels.gpu import power_of_2_from
from specdec_kernels.launch_triton import after_predecessor, counters, dependence, is_last
from specdec_kernels.linear.few_rows_triton import (
    add_product,
    along_depth,
    along_rows,
    depth_of,
    load_squares,
    tile_at,
    whole_sums,
    zero_sums,
)
from specdec_kernels.linear.reference import Normed

NONE = tl.constexpr(-(1 << 62))  # lower than the key of any score: see `chosen_of`
LEAST = tl.constexpr(TINY)


@triton.jit
def load_tile(rows_ptr, live, start, K: tl.constexpr, DEPTH: tl.constexpr, SLICES: tl.constexpr):
    """Load DEPTH values of each row, from column `start` on, with zeros past the end of the row.

    rows_ptr: [R], pointers to rows of K values.
    live: [R], False for rows that are not loaded but returned as zeros.
    """
    k = depth_of(start, DEPTH, SLICES)
    mask = along_rows(live, SLICES) & along_depth(k < K, SLICES)
    return tl.load(tile_at(rows_ptr, k, SLICES), mask=mask, other=0.0)


@triton.jit
def chosen_of(scores, known, NUM_CHOSEN: tl.constexpr):
    """Choose the NUM_CHOSEN experts with the highest scores in each row. If scores are equal, the
    expert with the lower index is chosen first.

    scores: fp32 [M, E].
    known: [1, E], False for columns past the last expert.

    Returns int32 [M, E], 1 for chosen experts, else 0.
    """
    column = tl.arange(0, scores.shape[1])
    # Combine score and column into one integer key. The maximum of such keys is faster to compute
    # than the maximum of scores together with its column.
    bits = scores.to(tl.int32, bitcast=True)
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)
    # Even a row of NaNs must not choose an index past the last expert, where there is no weight.
    left = tl.where(known, (order << 16) - column[None, :], NONE)
    chosen = tl.zeros(scores.shape, tl.int32)
    for _ in range(NUM_CHOSEN):
        is_best = (left == tl.max(left, axis=1)[:, None]) & known
        chosen = tl.where(is_best, 1, chosen)
        left = tl.where(is_best, NONE, left)
    return chosen


@triton.jit
def in_best_groups(scores, num_experts, ROUTING: tl.constexpr):
    """Return a mask [M, E] of the scores [M, E] that belong to each row's `Routing.kept_groups`
    best groups of experts. Groups are ranked by the sum of their two highest scores. If two groups
    have the same sum, the one with the lower index ranks higher."""
    column = tl.arange(0, scores.shape[1])[None, :]
    group = column // (num_experts // ROUTING.num_groups)
    totals = tl.full(scores.shape, float("-inf"), tl.float32)
    for index in range(ROUTING.num_groups):
        inside = tl.where(group == index, scores, float("-inf"))
        best = tl.max(inside, axis=1)[:, None]
        place = tl.min(tl.where(inside == best, column, scores.shape[1]), axis=1)[:, None]
        second = tl.max(tl.where(column == place, float("-inf"), inside), axis=1)[:, None]
        totals = tl.where(group == index, best + second, totals)
    before = tl.zeros(scores.shape, tl.int32)
    for index in range(ROUTING.num_groups):
        total = tl.max(tl.where(group == index, totals, float("-inf")), axis=1)[:, None]
        before += ((total > totals) | ((total == totals) & (index < group))).to(tl.int32)
    return before < ROUTING.kept_groups


@triton.jit
def weights_by_sigmoids(logits, known, choice_bias, num_experts, ROUTING: tl.constexpr):
    """Compute `weights_of` for routers with `Routing.sigmoid`."""
    scores = tl.sigmoid(logits)
    ranks = scores + choice_bias[None, :]
    if ROUTING.num_groups > 1:
        ranks = tl.where(in_best_groups(ranks, num_experts, ROUTING), ranks, float("-inf"))
    chosen = chosen_of(ranks, known, ROUTING.num_chosen)
    weights = tl.where(chosen != 0, scores, 0.0)
    if ROUTING.renormalise:
        weights /= (tl.sum(weights, axis=1) + LEAST)[:, None]
    return chosen, weights * ROUTING.scaling


@triton.jit
def weights_of(logits, known, choice_bias, num_experts, dtype: tl.constexpr, ROUTING: tl.constexpr):
    """Choose experts and compute their weights, by the same rules as `routes_of`.

    logits: fp32 [M, E].
    known: [1, E], False for columns past the last expert.
    choice_bias: fp32 [E].
    dtype: the dtype to which weights are rounded with `Routing.rounds`.

    Returns int32 [M, E], 1 for chosen experts, else 0, and fp32 weights [M, E], 0 for the others.
    """
    if ROUTING.sigmoid:
        chosen, weights = weights_by_sigmoids(logits, known, choice_bias, num_experts, ROUTING)
    else:
        masses = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        if ROUTING.softmax_first:
            scores = masses / tl.sum(masses, axis=1)[:, None]
            chosen = chosen_of(scores, known, ROUTING.num_chosen)
            weights = tl.where(chosen != 0, scores, 0.0)
            if ROUTING.renormalise:
                weights /= tl.sum(weights, axis=1)[:, None]
        else:
            chosen = chosen_of(logits, known, ROUTING.num_chosen)
            weights = tl.where(chosen != 0, masses, 0.0)
            weights /= tl.sum(weights, axis=1)[:, None]
        if ROUTING.rounds:
            weights = weights.to(dtype).to(tl.float32)
    return chosen, weights


@triton.jit
def load_choice_bias(choice_bias_ptr, num_experts, BLOCK_ALL: tl.constexpr):
    """Load `Experts.choice_bias` as fp32 [BLOCK_ALL], or return zeros if there is none."""
    column = tl.arange(0, BLOCK_ALL)
    bias = tl.zeros([BLOCK_ALL], tl.float32)
    if choice_bias_ptr is not None:
        bias += tl.load(choice_bias_ptr + column, mask=column < num_experts, other=0.0).to(
            tl.float32
        )
    return bias


@triton.jit
def load_routes(logits_ptr, choice_bias, row, num_rows, num_experts, ROUTING: tl.constexpr):
    """Load the logits of the tokens with indices `row` [M], and return `weights_of` for them. Call
    this only after all programs have stored their logits."""
    column = tl.arange(0, choice_bias.shape[0])
    known = (column < num_experts)[None, :]
    # Rows past the last token repeat its logits, because a row of only -inf would give NaNs.
    place = tl.minimum(row, num_rows - 1)[:, None] * num_experts + column[None, :]
    logits = tl.load(logits_ptr + place, mask=known, other=float("-inf"), cache_modifier=".cg")
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    return weights_of(logits.to(tl.float32), known, choice_bias, num_experts, dtype, ROUTING)


@triton.jit
def store_logits(
    x_ptr,
    squares_ptr,
    router_ptr,
    bias_ptr,
    logits_ptr,
    factors_ptr,
    num_rows,
    num_experts,
    x_stride,
    eps,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    TILES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute and store the logits of this program's tile of tokens and experts.

    Both router kernels call this first, because it waits for the preceding kernel. The arguments
    are those of `route_kernel`.
    """
    DEPTH: tl.constexpr = TILES.depth
    SLICES: tl.constexpr = TILES.slices
    EARLY: tl.constexpr = TILES.early
    SWAP: tl.constexpr = TILES.block_m < 16
    eps = tl.full([], eps, tl.float32)  # torch.compile passes Python floats as fp64
    expert = tl.program_id(0) * TILES.block_e + tl.arange(0, TILES.block_e)
    expert_live = expert < num_experts
    router_ptr += expert.to(tl.int64) * K
    early = ()
    for start in tl.static_range(0, EARLY, DEPTH):
        early += (load_tile(router_ptr, expert_live, start, K, DEPTH, SLICES),)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + expert, mask=expert_live, other=0.0)
    row = tl.program_id(1) * TILES.block_m + tl.arange(0, TILES.block_m)
    row_live = row < num_rows
    after_predecessor(DEPENDENT)

    if PARTS > 0:
        squares = load_squares(squares_ptr, row, row_live, PARTS, BLOCK_P)
    x_ptr += row.to(tl.int64) * x_stride
    sums = zero_sums(TILES.block_m, TILES.block_e, SLICES, SWAP)
    for start in tl.static_range(0, EARLY, DEPTH):
        x = load_tile(x_ptr, row_live, start, K, DEPTH, SLICES)
        sums = add_product(x, early[start // DEPTH], sums, SLICES, SWAP)
    if K > EARLY:
        for start in range(EARLY, K, DEPTH):
            x = load_tile(x_ptr, row_live, start, K, DEPTH, SLICES)
            router = load_tile(router_ptr, expert_live, start, K, DEPTH, SLICES)
            sums = add_product(x, router, sums, SLICES, SWAP)
    logits, _ = whole_sums(sums, sums, SLICES, SWAP)
    if PARTS > 0:
        factor = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
        logits *= factor[:, None]
        if tl.program_id(0) == 0:
            tl.store(factors_ptr + row, factor, mask=row_live)
    if bias_ptr is not None:
        logits += bias.to(tl.float32)[None, :]
    place = row[:, None] * num_experts + expert[None, :]
    dtype: tl.constexpr = logits_ptr.dtype.element_ty
    tl.store(logits_ptr + place, logits.to(dtype), mask=row_live[:, None] & expert_live[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def route_kernel(
    x_ptr,  # [T, K]
    squares_ptr,  # [T, PARTS] fp32, partial sums of each row's squares; None if PARTS is 0
    router_ptr,  # [E, K]
    bias_ptr,  # [E], or None
    choice_bias_ptr,  # [E], or None
    logits_ptr,  # [T, E], out
    counters_ptr,  # [>= 1] int32, zeros
    count_ptr,  # out; this and the next 4: fields of `ExpertPlan`; factors_ptr only if PARTS > 0
    experts_ptr,
    chosen_ptr,
    weights_ptr,
    factors_ptr,
    num_rows,
    num_experts,  # E
    x_stride,
    eps,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,  # at least T
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
    if not is_last(counters_ptr, tl.num_programs(0) * tl.num_programs(1)):
        return

    row = tl.arange(0, BLOCK_T)
    row_live = row < num_rows
    chosen, weights = load_routes(logits_ptr, choice_bias, row, num_rows, num_experts, ROUTING)
    chosen = tl.where(row_live[:, None], chosen, 0)
    bits = tl.sum(chosen.to(tl.int64) << row.to(tl.int64)[:, None], axis=0)
    used = bits != 0
    slot = tl.cumsum(used.to(tl.int32), axis=0) - 1
    tl.store(count_ptr, tl.sum(used.to(tl.int32), axis=0))
    tl.store(experts_ptr + slot, tl.arange(0, BLOCK_ALL), mask=used)
    tl.store(chosen_ptr + slot, bits, mask=used)
    at = weights_ptr + slot[None, :] * num_rows + row[:, None]
    tl.store(at, weights, mask=used[None, :] & row_live[:, None])


def route_triton(x: Normed, experts: Experts) -> ExpertPlan:
    """Choose the experts of at most FEW_TOKENS tokens x [T, K], and return the plan."""
    num_rows = len(x.scaled)
    assert 0 < num_rows <= FEW_TOKENS
    slots = min(experts.num_experts, num_rows * experts.routing.num_chosen)
    empty = partial(torch.empty, dtype=torch.int32, device=x.scaled.device)
    plan = ExpertPlan(
        used=empty(1) if experts.read is None else experts.read,
        experts=empty(slots),
        chosen=empty(slots, dtype=torch.int64),
        weights=empty(slots, num_rows, dtype=torch.float32),
        factors=None if x.squares is None else empty(num_rows, dtype=torch.float32),
    )
    launch_router(route_kernel, x, experts, plan, BLOCK_T=power_of_2_from(num_rows))
    return plan


def launch_router(
    kernel: Any, x: Normed, experts: Experts, out: tuple[Tensor | None, ...], **constants: Any
) -> None:
    """Launch `route_kernel` or `group_kernel`.

    kernel: the kernel to launch.
    out: the output tensors that follow the counters in its arguments.
    constants: constexpr arguments that only this kernel has.
    """
    rows, (num_rows, width) = x.scaled, x.scaled.shape
    num_experts, squares = experts.num_experts, x.squares
    assert rows.stride(1) == 1 and (squares is None or squares.is_contiguous())
    assert experts.router.shape == (num_experts, width) and experts.router.is_contiguous()
    # Compute sigmoids from fp32 logits, as transformers does.
    dtype = torch.float32 if experts.routing.sigmoid else rows.dtype
    logits = torch.empty((num_rows, num_experts), dtype=dtype, device=rows.device)
    parts = 0 if squares is None else squares.shape[1]
    constants |= router_constants(parts, experts, rows.element_size())
    tiles = constants["TILES"]
    kernel[(triton.cdiv(num_experts, tiles.block_e), triton.cdiv(num_rows, tiles.block_m))](
        *(rows, squares, experts.router, experts.router_bias, experts.choice_bias),
        *(logits, counters(rows.device), *out, num_rows, num_experts, rows.stride(0)),
        float(x.eps),
        **constants,
        **dependence(rows),
    )


def router_constants(parts: int, experts: Experts, itemsize: int) -> dict[str, Any]:
    """Return the constexpr arguments that both router kernels have, and their launch options.

    parts: the number of partial sums of squares per token; 0 if x is normalised.
    itemsize: bytes per value of x.
    """
    num_experts, width = experts.router.shape
    tiles = router_tiles(width, itemsize)
    return {
        "K": width,
        "PARTS": parts,
        "BLOCK_ALL": power_of_2_from(num_experts),
        "BLOCK_P": power_of_2_from(max(parts, 1)),
        "ROUTING": experts.routing,
        "TILES": tiles,
        "num_warps": tiles.slices,
        "num_stages": 2,
    }
