"""Multiplies x, which has few rows, by a quantised weight. Fuses the same steps as
`few_rows_triton`.

`stored_sums_triton` computes the sums. x may be split into fp8 terms (see `terms_triton`). Each row
of x then becomes two rows, whose sums are added up at the end. Since x is fp8, tensor cores can
read the weight's fp8 codes from shared memory as they are, instead of decoding them in registers
first. Four-bit codes are valid fp8 values too, but a byte's two codes must first be separated.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.comm.inbox_triton import inbox_of
from specdec_kernels.launch_triton import after_predecessor, is_last, options_of, room_for_splits
from specdec_kernels.linear.decode_triton import CODE
from specdec_kernels.linear.few_rows_triton import (
    finish_product,
    load_squares,
    prefetch_rows,
    sum_of_splits,
    whole_sums,
    zero_sums,
)
from specdec_kernels.linear.fused import Fused, prepared
from specdec_kernels.linear.stored import BLOCK, FP8, INT4, KINDS, Stored
from specdec_kernels.linear.stored_groups_triton import Form, row_scaled, row_scales, rows_of
from specdec_kernels.linear.stored_sums_triton import held_share, held_sums, stored_sums
from specdec_kernels.linear.terms_sums_triton import sums_of_blocks
from specdec_kernels.linear.terms_triton import TERMS, sum_of_terms, terms_triton
from specdec_kernels.linear.tile_tables import Tiles


@triton.jit(do_not_specialize=["num_rows"])
def stored_rows_kernel(
    x_ptr,  # [T, K]; if x is split into fp8 terms, [T, TERMS, K]
    squares_ptr,  # [T, P] fp32, partial sums of squares of each row; used only with PARTS
    codes_ptr,  # [N, K / FORM.per_code] bytes; with ACTIVATION [2 N, ...], the gate's rows first
    bias_ptr,  # [N], or None
    residual_ptr,  # [T, N], or None
    norm_ptr,  # [N], weight of the next norm, or None
    out_ptr,  # [T, N], output
    scaled_ptr,  # [T, N], output: out * norm; used only with norm_ptr
    out_squares_ptr,  # [T, N / BLOCK_N] fp32, output: sums of squares; used only with norm_ptr
    scales_ptr,  # [N / FORM.high, FORM.groups]
    zeros_ptr,  # uint8 zeros, or minima in the scales' dtype, in the scales' shape; or None
    x_scales_ptr,  # [T] fp32, scales of the terms; None if x is not split into terms
    x_sums_ptr,  # [K / BLOCK, T] fp32, sums of x per block; used only with terms and int4
    partial_ptr,  # [2 if ACTIVATION else 1, SPLITS, T, N] fp32, output; used only with SPLITS > 1
    counters_ptr,  # int32 zeros, at least one per block of the output; used only with SPLITS > 1
    inboxes_ptr,  # this and the next 2: the fields of `Inbox`; None, None and 0 to store the result
    counts_ptr,
    inbox_first,
    num_rows,
    num_features,  # N
    x_stride,
    residual_stride,
    eps,
    K: tl.constexpr,
    FORM: tl.constexpr,
    PARTS: tl.constexpr,  # P, or 0 without squares_ptr
    ACTIVATION: tl.constexpr,  # "" if there is no gate
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SIZE: tl.constexpr,  # the number of inboxes
    DEPENDENT: tl.constexpr,
):
    SLICES: tl.constexpr = TILES.slices
    SPLITS: tl.constexpr = TILES.splits
    GATED: tl.constexpr = ACTIVATION != ""
    ROW: tl.constexpr = K // FORM.per_code  # bytes of codes in a row of the weight
    TILE: tl.constexpr = TILES.block_k // FORM.per_code  # bytes of codes in a row of a tile
    SHARE: tl.constexpr = (ROW + SPLITS * TILE - 1) // (SPLITS * TILE) * TILE
    HELD: tl.constexpr = SHARE * FORM.per_code <= TILES.early
    OF_ROW: tl.constexpr = 1 if x_scales_ptr is None else TERMS  # rows of x for each row of out
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    eps = tl.full([], eps, tl.float32)  # torch.compile passes Python floats as fp64

    split = tl.program_id(1)
    first = split * SHARE
    column = tl.program_id(0) * TILES.block_n + tl.arange(0, TILES.block_n)
    column_live = column < num_features
    feature = tl.minimum(column, num_features - 1)
    up = feature + num_features
    codes, scales, zeros = rows_of(codes_ptr, scales_ptr, zeros_ptr, feature, K, FORM)
    codes_up, scales_up, zeros_up = rows_of(codes_ptr, scales_ptr, zeros_ptr, up, K, FORM)
    if TILES.prefetch > 0 and not HELD:
        prefetch_rows(codes, first, TILES.prefetch)
        if GATED:
            prefetch_rows(codes_up, first, TILES.prefetch)
    row = tl.program_id(2) * TILES.block_m + tl.arange(0, TILES.block_m)
    row_live = row < num_rows
    place = row.to(tl.int64)[:, None] * num_features + column[None, :]
    mask = row_live[:, None] & column_live[None, :]
    squares, bias, residual, norm, inbox = None, None, None, None, None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column_live, other=0.0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=column_live, other=0.0)
    row_scale = row_scales(scales, column_live, FORM)
    row_scale_up = row_scale
    if GATED:
        row_scale_up = row_scales(scales_up, column_live, FORM)
    if HELD:
        held = held_share(codes, scales, zeros, column_live, first, SHARE, ROW, FORM, TILES)
        held_up = held
        if GATED:
            held_up = held_share(
                codes_up, scales_up, zeros_up, column_live, first, SHARE, ROW, FORM, TILES
            )
    after_predecessor(DEPENDENT)

    # Load the epilogue's operands before the loop, so that the epilogue need not wait for them.
    if residual_ptr is not None:
        residual_ptr += row.to(tl.int64)[:, None] * residual_stride + column[None, :]
        residual = tl.load(residual_ptr, mask=mask, other=0.0)
    if PARTS > 0:
        squares = load_squares(squares_ptr, row, row_live, PARTS, BLOCK_P)
    if inboxes_ptr is not None:
        first_column = tl.program_id(0) * TILES.block_n
        inbox = inbox_of(
            *(inboxes_ptr, counts_ptr, inbox_first, row, row_live, first_column),
            *(num_features, SIZE),
        )

    M: tl.constexpr = TILES.block_m * OF_ROW
    x_row = tl.program_id(2) * M + tl.arange(0, M)
    x_rows, x_live = x_ptr + x_row.to(tl.int64) * x_stride, x_row < num_rows * OF_ROW
    weight = codes, scales, zeros, codes_up, scales_up, zeros_up, column_live
    if x_sums_ptr is not None:
        x_sums = (x_sums_ptr, num_rows, row, row_live)
        acc = zero_sums(TILES.block_m, TILES.block_n, SLICES, True)
        acc, acc_up = sums_of_blocks(
            *(x_rows, x_live, x_sums),
            *weight,
            *(first, first + SHARE, acc, acc, K, FORM, GATED, ROW % (SPLITS * TILE) == 0),
        )
    else:
        acc = zero_sums(M, TILES.block_n, SLICES, True)
        if HELD:
            acc, acc_up = held_sums(
                *(x_rows, x_live, held, held_up, first, acc, acc, SHARE, ROW, FORM, TILES, GATED),
            )
        else:
            acc, acc_up = stored_sums(
                *(x_rows, x_live),
                *weight,
                *(first, first + SHARE, acc, acc, K, FORM, TILES, GATED, SPLITS),
            )
        if OF_ROW > 1:
            acc, acc_up = sum_of_terms(acc), sum_of_terms(acc_up)
    acc, acc_up = whole_sums(acc, acc_up, SLICES, True)
    acc = row_scaled(acc, row_scale, FORM, dtype)
    if GATED:
        acc_up = row_scaled(acc_up, row_scale_up, FORM, dtype)
    if OF_ROW > 1:
        x_scale = tl.load(x_scales_ptr + row, mask=row_live, other=0.0)[:, None]
        if FORM.per_code == 2:
            x_scale /= CODE
        acc, acc_up = acc * x_scale, acc_up * x_scale

    if SPLITS > 1:
        size = num_rows.to(tl.int64) * num_features
        tl.store(partial_ptr + split * size + place, acc, mask=mask)
        up_ptr = partial_ptr + SPLITS * size
        if GATED:
            tl.store(up_ptr + split * size + place, acc_up, mask=mask)
        block = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if not is_last(counters_ptr + block, SPLITS):
            return
        acc = sum_of_splits(partial_ptr, place, mask, size, SPLITS)
        if GATED:
            acc_up = sum_of_splits(up_ptr, place, mask, size, SPLITS)
    finish_product(
        *(acc, acc_up, squares, bias, residual, norm, out_ptr, scaled_ptr, out_squares_ptr, inbox),
        *(place, mask, row, row_live, num_features, eps, K, ACTIVATION, SIZE),
    )


def stored_rows_linear(
    x: Tensor, weight: Stored, tiles: Tiles, as_terms: bool = False, **fused: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply x [T, K] by a quantised weight with `stored_rows_kernel`.

    as_terms: whether to split x into fp8 terms. Tiles must then have a single slice, and the codes
        must be fp8 or int4. With int4, a tile must be as wide as a block of interleaved codes, K
        must be a multiple of that width, and all columns of a block must share a scale.
    fused: fields of `Fused`, as keyword arguments.

    Returns `Launch.results`.
    """
    operands, inbox, numbers, constants, results = prepared(
        x, weight, tiles.block_n, Fused(**fused)
    )
    num_rows, num_features = results[0].shape
    form, held = Form.of(weight), tiles.block_k // KINDS[weight.storage.kind].per_code
    in_slice = held // tiles.slices
    assert form.wide % in_slice == 0
    assert form.per_code == 1 or (BLOCK // 2 % in_slice == held % (BLOCK // 2) == 0)
    blocks, row_blocks = (
        triton.cdiv(num_features, tiles.block_n),
        triton.cdiv(num_rows, tiles.block_m),
    )
    size = (2 if constants["ACTIVATION"] else 1, num_rows, num_features)
    parts = room_for_splits(tiles.splits, blocks * row_blocks, size, x.device)
    x_scales = x_sums = None
    if not constants["DEPENDENT"]:
        tiles = tiles._replace(prefetch=0)
    if as_terms:
        assert form.kind in (FP8, INT4) and tiles.slices == 1 and not form.is_apart
        assert form.kind == FP8 or (tiles.block_k == BLOCK and form.rest == 0)
        x, x_scales, x_sums = terms_triton(x, BLOCK if form.kind == INT4 else 0)
    stored_rows_kernel[(blocks, tiles.splits, row_blocks)](
        *(x, *operands[1:], weight.scales, weight.zeros, x_scales, x_sums, *parts, *inbox),
        *(num_rows, num_features, x.stride(-2), *numbers),
        FORM=form,
        TILES=tiles,
        **constants | options_of(tiles),
    )
    return results
