"""The experts' matmuls over tokens grouped by expert.

A pair is a token and one of its experts. A program computes some features of one expert for all of
the expert's pairs, one block of pairs at a time. Except in prompts, an expert nearly always has a
single block, so each weight is read once. If there are more blocks, they read the weight again from
the L2 cache.
The grid covers all experts, so the host need not know how many pairs each has. Features are the
rows of the matmul and pairs its columns, so the weight is the left operand. Tensor cores can read
only this operand from registers, into which quantised weights are decoded.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.experts.gate_up_triton import gated, mx_gate_up
from specdec_kernels.experts.plan import PairGroups
from specdec_kernels.experts.reference import Experts
from specdec_kernels.experts.sorted_triton import combine_triton
from specdec_kernels.experts.tiles import GroupTiles
from specdec_kernels.launch_triton import after_predecessor, dependence, options_of
from specdec_kernels.linear.few_rows_triton import (
    add_product,
    along_depth,
    along_rows,
    depth_of,
    load_weight,
    tile_at,
    whole_sums,
    zero_sums,
)
from specdec_kernels.linear.mx_sums_triton import (
    COLUMNS,
    LIFT,
    in_order,
    mx_sums,
    place_of,
)
from specdec_kernels.linear.reference import Normed
from specdec_kernels.linear.stored_groups_triton import (
    form_of,
    operands_of,
    row_scaled,
    row_scales,
    rows_of,
)
from specdec_kernels.linear.stored_sums_triton import stored_sums


@triton.jit(do_not_specialize=["num_rows"])
def grouped_linear_kernel(
    # [R, K], R = T * C / PAIRS; row p // PAIRS is the input of pair p. If the weight is tiled,
    # columns are where `place_of` says, and so are features of gate and up in out.
    x_ptr,
    sizes_ptr,  # this and the next 2: fields of `PairGroups`; factors_ptr is used only if SCALED
    pairs_ptr,
    factors_ptr,
    weight_ptr,  # [E, R, K], or uint8 codes [E, R, bytes per row]; R = 2 N with ACTIVATION, else N
    scales_ptr,  # [E, R / FORM.high, FORM.groups]; None if not quantised
    zeros_ptr,  # shaped like the scales; None if the quantisation has none
    bias_ptr,  # [E, R], or None
    out_ptr,  # [T * C, N], out
    num_rows,  # T
    num_features,  # N
    x_stride,
    slope,
    limit,
    K: tl.constexpr,
    PAIRS: tl.constexpr,
    SCALED: tl.constexpr,
    ACTIVATION: tl.constexpr,  # of gate and up; "" for the down projection
    INTERLEAVED: tl.constexpr,
    FORM: tl.constexpr,  # `Form` of a quantised weight, or None
    TILES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION != ""
    TILED: tl.constexpr = FORM is not None and FORM.is_tiled
    EVEN: tl.constexpr = K % TILES.block_k == 0
    slope = tl.full([], slope, tl.float32)
    limit = tl.full([], limit, tl.float32)
    expert = tl.program_id(1)
    column = tl.program_id(0) * TILES.block_n + tl.arange(0, TILES.block_n)
    column_live = column < num_features
    feature = tl.minimum(column, num_features - 1)
    first_row = expert * num_features
    if GATED:
        first_row *= 2
        if INTERLEAVED:
            feature *= 2
    weight_row = first_row + feature
    up_row = weight_row
    if GATED:
        up_row = weight_row + (1 if INTERLEAVED else num_features)
    if FORM is None:
        weight_rows = weight_ptr + weight_row.to(tl.int64) * K
        up_rows = weight_ptr + up_row.to(tl.int64) * K
    else:
        codes, scales, zeros = rows_of(weight_ptr, scales_ptr, zeros_ptr, weight_row, K, FORM)
        codes_up, scales_up, zeros_up = rows_of(weight_ptr, scales_ptr, zeros_ptr, up_row, K, FORM)
        row_scale = row_scales(scales, column_live, FORM)
        row_scale_up = row_scales(scales_up, column_live, FORM)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + weight_row).to(tl.float32)
        if GATED:
            up_bias = tl.load(bias_ptr + up_row).to(tl.float32)
    after_predecessor(DEPENDENT)

    size = tl.load(sizes_ptr + expert)
    pairs_ptr += expert * num_rows
    place = tl.arange(0, TILES.block_m)
    pair = tl.load(pairs_ptr + place, mask=place < num_rows, other=0)
    for first in range(0, size, TILES.block_m):
        live = first + place < size
        x_row = tl.where(live, pair // PAIRS, 0)
        x_rows = x_ptr + x_row.to(tl.int64) * x_stride
        if TILED:
            if GATED:
                sums, sums_up = mx_gate_up(
                    *(x_rows, live, weight_ptr, scales_ptr, expert.to(tl.int64)),
                    *(num_features, K, FORM, TILES, INTERLEAVED),
                )
            else:
                found = mx_sums(
                    *(x_rows, live, weight_ptr, scales_ptr, weight_row.to(tl.int64)),
                    *(0, K, FORM, TILES.block_k // COLUMNS, 1, TILES.num_stages),
                )
                sums = tl.trans(found) * LIFT
                sums_up = sums
        elif FORM is None:
            sums = zero_sums(TILES.block_m, TILES.block_n, TILES.slices, True)
            sums_up = sums
            inside = depth_of(0, TILES.block_k, TILES.slices)
            for start in range(0, K, TILES.block_k):
                k = start + inside
                mask = along_depth(k < K, TILES.slices)
                x_mask = along_rows(live, TILES.slices) & mask
                x = tl.load(tile_at(x_rows, k, TILES.slices), mask=x_mask, other=0.0)
                weight = load_weight(tile_at(weight_rows, k, TILES.slices), mask, EVEN)
                sums = add_product(x, weight, sums, TILES.slices, True)
                if GATED:
                    up = load_weight(tile_at(up_rows, k, TILES.slices), mask, EVEN)
                    sums_up = add_product(x, up, sums_up, TILES.slices, True)
        else:
            sums = zero_sums(TILES.block_m, TILES.block_n, TILES.slices, True)
            sums_up = sums
            sums, sums_up = stored_sums(
                *(x_rows, live, codes, scales, zeros, codes_up, scales_up, zeros_up, column_live),
                *(0, K // FORM.per_code, sums, sums_up, K, FORM, TILES, GATED, 1),
            )
        if not TILED:
            sums, sums_up = whole_sums(sums, sums_up, TILES.slices, True)
        if FORM is not None:
            sums = row_scaled(sums, row_scale, FORM, x_ptr.dtype.element_ty)
            sums_up = row_scaled(sums_up, row_scale_up, FORM, x_ptr.dtype.element_ty)
        if SCALED:
            factor = tl.load(factors_ptr + x_row, mask=live, other=0.0)[:, None]
            sums *= factor
            sums_up *= factor
        if bias_ptr is not None:
            sums += bias[None, :]
        if GATED:
            if bias_ptr is not None:
                sums_up += up_bias[None, :]
            sums = gated(sums, sums_up, slope, limit, ACTIVATION)
        out_column = place_of(column, num_features) if TILED and GATED else column
        at = pair.to(tl.int64)[:, None] * num_features + out_column[None, :]
        out = sums.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + at, out, mask=live[:, None] & column_live[None, :])
        following = first + TILES.block_m + place
        pair = tl.load(pairs_ptr + following, mask=following < size, other=0)


def grouped_product(
    x: Tensor, groups: PairGroups, experts: Experts, tiles: GroupTiles, is_gate: bool
) -> Tensor:
    """Compute one of the experts' two matmuls for every pair of a token and an expert.

    With `is_gate`, this is the gate and up projection. x is [T, K], rows contiguous, and the result
    is the activated gate times up, [T * C, F], with features where `place_of` says if
    the weights are tiled. If x is not normalised yet, the projections of token
    t are multiplied by `groups.factors[t]`.

    Otherwise this is the down projection. x is the result of the first matmul, and the result is
    each pair's output [T * C, N], not yet multiplied by its routing weight.
    """
    if not is_gate:
        groups = groups._replace(factors=None)
    assert len(x) == (len(groups.weights) if is_gate else groups.weights.numel())
    (num_rows, num_chosen), width = groups.weights.shape, x.shape[1]
    weight, bias = experts.down, experts.down_bias
    if is_gate:
        weight, bias = experts.gate_up, experts.gate_up_bias
    num_features = experts.num_features if is_gate else weight.shape[1]
    assert weight.shape == (experts.num_experts, num_features * (1 + is_gate), width)
    assert x.stride(1) == 1
    out = torch.empty((num_rows * num_chosen, num_features), dtype=x.dtype, device=x.device)
    if is_gate:
        x = in_order(x, experts.gate_up)
    grouped_linear_kernel[(triton.cdiv(num_features, tiles.block_n), experts.num_experts)](
        *(x, groups.sizes, groups.pairs, groups.factors, *operands_of(weight), bias, out),
        *(num_rows, num_features, x.stride(0), float(experts.slope), float(experts.limit)),
        **grouped_constants(width, groups.factors is not None, experts, tiles, is_gate),
        **dependence(x),
    )
    return out


def grouped_constants(
    width: int, scaled: bool, experts: Experts, tiles: GroupTiles, is_gate: bool
) -> dict[str, Any]:
    """Return the constexpr arguments of `grouped_linear_kernel` and its launch options.

    width: K, the number of input features.
    scaled: whether `PairGroups.factors` is not None.
    is_gate: True for gate and up, False for down.
    """
    return options_of(tiles) | {
        "FORM": form_of(experts.gate_up if is_gate else experts.down),
        "TILES": tiles,
        "K": width,
        "PAIRS": experts.routing.num_chosen if is_gate else 1,
        "SCALED": scaled,
        "ACTIVATION": experts.activation if is_gate else "",
        "INTERLEAVED": experts.interleaved and is_gate,
    }


def grouped_mixture_add_norm(
    x: Normed,
    groups: PairGroups,
    experts: Experts,
    tiles: tuple[GroupTiles, GroupTiles],
    residual: Tensor | None,
    norm_weight: Tensor | None,
    eps: float,
    into: Tensor | None = None,
) -> Normed:
    """Add the mixture of x to `residual` after the router has grouped the pairs by expert. The last
    four arguments are those of `combine_triton`.

    groups: the router's result for x.
    tiles: the tiles of gate and up, and those of down.
    """
    inner = grouped_product(x.scaled, groups, experts, tiles[0], is_gate=True)
    parts = grouped_product(inner, groups, experts, tiles[1], is_gate=False)
    return combine_triton(parts, None, groups.weights, residual, norm_weight, eps, into)
