"""The gate and up projections of the chosen experts, for a few tokens.

A program computes some features of one expert, the one in its slot of the `ExpertPlan`. It loads
only the rows of the tokens that chose the expert, and reads the expert's weights once for all of
them. The results are multiplied by the routing weights here, in fp32, so that the down projection
only needs to add up the experts' outputs.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.experts.plan import ExpertPlan
from specdec_kernels.experts.reference import CLAMPED, Experts
from specdec_kernels.experts.tiles import ExpertTiles
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
from specdec_kernels.linear.norm_triton import activate
from specdec_kernels.linear.stored_groups_triton import (
    form_of,
    operands_of,
    row_scaled,
    row_scales,
    rows_of,
)
from specdec_kernels.linear.stored_sums_triton import stored_sums

CLAMPED_KIND = tl.constexpr(CLAMPED)


@triton.jit
def has_chosen(bits, row):
    """Return a mask [M], True for tokens that chose the expert of a slot.

    row: [M], the indices of the tokens.
    bits: the slot's value in `ExpertPlan.chosen`, one bit per token.
    """
    return ((bits >> row.to(tl.int64)) & 1) != 0


@triton.jit
def gated(gate, up, slope, limit, ACTIVATION: tl.constexpr):
    """Apply the activation to the gate and multiply it by up, as `reference.activated` does."""
    if ACTIVATION == CLAMPED_KIND:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        out = (up + 1.0) * gate * tl.sigmoid(slope * gate)
    else:
        out = activate(gate, ACTIVATION) * up
    return out


@triton.jit
def mx_gate_up(
    x_rows,  # this and the next: those of `mx_sums`
    x_live,
    gate_up_ptr,  # [E, 2 F, bytes per row]
    scales_ptr,  # [E, 2 F, FORM.groups]
    expert,  # int64
    num_features,  # F
    K: tl.constexpr,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Multiply x by the tiled rows of this program's features. Rows of gate and up alternate in one
    tile. Return the sums of gate and those of up, each [M, N]."""
    place = tl.arange(0, 2 * TILES.block_n)
    feature = tl.program_id(0) * TILES.block_n + place // 2
    inside = tl.minimum(feature, num_features - 1)
    if INTERLEAVED:
        weight_row = 2 * inside + place % 2
    else:
        weight_row = inside + place % 2 * num_features
    weight_row = expert * 2 * num_features + weight_row
    sums = mx_sums(
        *(x_rows, x_live, gate_up_ptr, scales_ptr, weight_row),
        *(0, K, FORM, TILES.block_k // COLUMNS, 1, TILES.num_stages),
    )
    both = tl.trans(sums) * LIFT
    return tl.split(tl.reshape(both, [both.shape[0], TILES.block_n, 2]))


@triton.jit(do_not_specialize=["num_rows"])
def gate_up_kernel(
    x_ptr,  # [T, K]; if tiled, columns are where `place_of` says, and so are those of out
    count_ptr,  # this and the next 4: fields of `ExpertPlan`; factors_ptr is used only if SCALED
    experts_ptr,
    chosen_ptr,
    weights_ptr,
    factors_ptr,
    gate_up_ptr,  # [E, 2 F, K], or quantised codes as uint8 [E, 2 F, bytes per row]
    scales_ptr,  # [E, 2 F / FORM.high, FORM.groups]; None if not quantised
    zeros_ptr,  # shaped like the scales; None if the quantisation has none
    bias_ptr,  # [E, 2 F], or None
    out_ptr,  # [P, T, F], out; a slot's rows are written only for tokens that chose its expert
    num_rows,
    num_features,  # F
    x_stride,
    slope,
    limit,
    K: tl.constexpr,
    SCALED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    FORM: tl.constexpr,  # `Form` of a quantised weight, or None
    TILES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    SWAP: tl.constexpr = TILES.block_m < 16 or FORM is not None
    TILED: tl.constexpr = FORM is not None and FORM.is_tiled
    EVEN: tl.constexpr = K % TILES.block_k == 0
    slope = tl.full([], slope, tl.float32)
    limit = tl.full([], limit, tl.float32)
    slot = tl.program_id(1)
    column = tl.program_id(0) * TILES.block_n + tl.arange(0, TILES.block_n)
    column_live = column < num_features
    inside_column = tl.minimum(column, num_features - 1)
    if INTERLEAVED:
        gate_row = 2 * inside_column
        up_row = gate_row + 1
    else:
        gate_row = inside_column
        up_row = inside_column + num_features
    row = tl.arange(0, TILES.block_m)
    after_predecessor(DEPENDENT)

    if slot >= tl.load(count_ptr):
        return
    expert = tl.load(experts_ptr + slot).to(tl.int64)
    row_live = has_chosen(tl.load(chosen_ptr + slot), row)
    gate_at = expert * 2 * num_features + gate_row
    up_at = expert * 2 * num_features + up_row
    # Load the epilogue's operands before the loop, so that the epilogue need not wait for them.
    weight = tl.load(weights_ptr + slot * num_rows + row, mask=row_live, other=0.0)
    if SCALED:
        factor = tl.load(factors_ptr + row, mask=row_live, other=0.0)
    if bias_ptr is not None:
        bias_ptr += expert * 2 * num_features
        gate_bias = tl.load(bias_ptr + gate_row)
        up_bias = tl.load(bias_ptr + up_row)

    if TILED:
        sums, sums_up = mx_gate_up(
            *(x_ptr + row.to(tl.int64) * x_stride, row_live, gate_up_ptr, scales_ptr, expert),
            *(num_features, K, FORM, TILES, INTERLEAVED),
        )
    elif FORM is None:
        sums = zero_sums(TILES.block_m, TILES.block_n, TILES.slices, SWAP)
        sums_up = sums
        x_ptr += row.to(tl.int64) * x_stride
        gate_ptr, up_ptr = gate_up_ptr + gate_at * K, gate_up_ptr + up_at * K
        inside = depth_of(0, TILES.block_k, TILES.slices)
        for start in range(0, K, TILES.block_k):
            k = start + inside
            x_mask = along_rows(row_live, TILES.slices) & along_depth(k < K, TILES.slices)
            mask = along_depth(k < K, TILES.slices)
            x = tl.load(tile_at(x_ptr, k, TILES.slices), mask=x_mask, other=0.0)
            gate = load_weight(tile_at(gate_ptr, k, TILES.slices), mask, EVEN)
            sums = add_product(x, gate, sums, TILES.slices, SWAP)
            up = load_weight(tile_at(up_ptr, k, TILES.slices), mask, EVEN)
            sums_up = add_product(x, up, sums_up, TILES.slices, SWAP)
        sums, sums_up = whole_sums(sums, sums_up, TILES.slices, SWAP)
    else:
        codes, scales, zeros = rows_of(gate_up_ptr, scales_ptr, zeros_ptr, gate_at, K, FORM)
        codes_up, scales_up, zeros_up = rows_of(gate_up_ptr, scales_ptr, zeros_ptr, up_at, K, FORM)
        gate_scale = row_scales(scales, column_live, FORM)
        up_scale = row_scales(scales_up, column_live, FORM)
        sums = zero_sums(TILES.block_m, TILES.block_n, TILES.slices, SWAP)
        sums_up = sums
        sums, sums_up = stored_sums(
            *(x_ptr + row.to(tl.int64) * x_stride, row_live),
            *(codes, scales, zeros, codes_up, scales_up, zeros_up, column_live),
            *(0, K // FORM.per_code, sums, sums_up, K, FORM, TILES, True, 1),
        )
        sums, sums_up = whole_sums(sums, sums_up, TILES.slices, SWAP)
        sums = row_scaled(sums, gate_scale, FORM, x_ptr.dtype.element_ty)
        sums_up = row_scaled(sums_up, up_scale, FORM, x_ptr.dtype.element_ty)

    if SCALED:
        sums *= factor[:, None]
        sums_up *= factor[:, None]
    if bias_ptr is not None:
        sums += gate_bias.to(tl.float32)[None, :]
        sums_up += up_bias.to(tl.float32)[None, :]
    out = gated(sums, sums_up, slope, limit, ACTIVATION) * weight[:, None]
    if TILED:
        column = place_of(column, num_features)
    at = (slot * num_rows + row).to(tl.int64)[:, None] * num_features + column[None, :]
    out = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, out, mask=row_live[:, None] & column_live[None, :])


def gate_up_triton(x: Tensor, plan: ExpertPlan, experts: Experts, tiles: ExpertTiles) -> Tensor:
    """Compute the gate and up projections of the chosen experts.

    Returns [P, T, F]: for each slot of the plan and each token, the activated gate times up times
    the routing weight. A slot's rows are undefined for tokens that did not choose its expert. If
    the weights are tiled, features are where `place_of` says.

    Args:
        x: [T, K], rows contiguous. If it is not normalised yet, the projections of token t are
            multiplied by `plan.factors[t]`.
    """
    (num_rows, width), num_features = x.shape, experts.num_features
    slots = len(plan.experts)
    assert num_rows <= tiles.block_m and x.stride(1) == 1 and tiles.splits == 1
    assert experts.gate_up.shape == (experts.num_experts, 2 * num_features, width)
    held = operands_of(experts.gate_up)
    out = torch.empty((slots, num_rows, num_features), dtype=x.dtype, device=x.device)
    x = in_order(x, experts.gate_up)
    gate_up_kernel[(triton.cdiv(num_features, tiles.block_n), slots)](
        *(x, *plan, *held, experts.gate_up_bias, out),
        *(num_rows, num_features, x.stride(0), float(experts.slope), float(experts.limit)),
        **gate_up_constants(width, plan.factors is not None, experts, tiles),
        **dependence(x),
    )
    return out


def gate_up_constants(
    width: int, scaled: bool, experts: Experts, tiles: ExpertTiles
) -> dict[str, Any]:
    """Return the constexpr arguments of `gate_up_kernel` and its launch options.

    width: K, the number of input features.
    scaled: whether `ExpertPlan.factors` is not None.
    """
    return options_of(tiles) | {
        "K": width,
        "SCALED": scaled,
        "ACTIVATION": experts.activation,
        "INTERLEAVED": experts.interleaved,
        "FORM": form_of(experts.gate_up),
        "TILES": tiles,
    }
