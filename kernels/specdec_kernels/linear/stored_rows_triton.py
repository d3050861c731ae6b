"""A product of rows with a stored weight, whose codes become numbers in registers.

The work around it is that of `few_rows_triton`. The weight is the left operand of every product,
which tensor cores read from registers, and x the right one. Each slice of a tile lies in one group
of columns; its product is multiplied by the group's scales. Those of whole rows come at the end.
Shares of at most `Tiles.early` numbers are loaded before the wait, codes and groups, and have no
loop.

Codes of fp8 that meet x as terms of fp8 (see `terms_triton`) need no registers: tensor cores read
them as they are stored. Then each row of x is two, and its sums are added up before the scales.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import (
    COUNTERS,
    INTERPRETED,
    after_predecessor,
    counters,
    is_last,
    options_of,
)
from specdec_kernels.linear.decode_triton import (
    corrected,
    decoded,
    decoded_halves,
    ones_beside,
    scale_of,
)
from specdec_kernels.linear.few_rows_triton import (
    add_product,
    along_depth,
    along_rows,
    finish_product,
    load_squares,
    load_weight,
    prefetch_rows,
    sum_of_splits,
    tile_at,
    whole_sums,
    zero_sums,
)
from specdec_kernels.linear.fused import Fused, prepared
from specdec_kernels.linear.stored import BLOCK, FP8, KINDS, Stored
from specdec_kernels.linear.terms_triton import TERMS, terms_triton
from specdec_kernels.linear.tile_tables import Tiles

HALF = tl.constexpr(BLOCK // 2)  # columns between the two numbers of a byte


class Form(NamedTuple):
    """A weight's storage as constants of the kernel."""

    kind: str
    per_code: int  # numbers of a byte
    high: int
    wide: int  # 0 for scales of whole rows
    groups: int  # of each row
    has_zeros: bool  # or minima
    has_minima: bool
    is_apart: bool  # the two numbers of a byte may have different scales, or have minima
    whole: int  # columns before the last block, if that is shorter
    rest: int  # columns between the two numbers of a byte of the last block

    @classmethod
    def of(cls, weight: Stored) -> "Form":
        kind, (high, wide) = weight.storage.kind, weight.storage.group
        per_code, groups = KINDS[kind].per_code, weight.scales.shape[-1]
        rest, minima = weight.shape[-1] % BLOCK, weight.storage.has_minima
        return cls(
            *(kind, per_code, high, wide, groups, weight.zeros is not None, minima),
            *(weight.storage.is_apart, weight.shape[-1] - rest, rest // 2),
        )


def form_of(weight: Tensor | Stored) -> Form | None:
    """The constants of a stored weight, which may be on meta; None for a plain one."""
    return None if isinstance(weight, Tensor) else Form.of(weight)


def operands_of(weight: Tensor | Stored) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """A weight, or a stored one's codes as bytes, its scales and its zeros, all contiguous."""
    if isinstance(weight, Tensor):
        assert weight.is_contiguous()
        return weight, None, None
    assert all(field.is_contiguous() for field in weight.tensors)
    return weight.codes.view(torch.uint8), weight.scales, weight.zeros


@triton.jit
def rows_of(codes_ptr, scales_ptr, zeros_ptr, row, K: tl.constexpr, FORM: tl.constexpr):
    """Pointers to the codes, scales and zeros of rows [N] of a weight of K numbers each.

    Rows of experts are counted through all of them, and groups do not cross their borders.
    """
    row = row.to(tl.int64)
    place = row // FORM.high * FORM.groups
    scales = scales_ptr + place
    zeros = scales  # in place of None, which no function returns among others
    if FORM.has_zeros:
        zeros = zeros_ptr + place
    return codes_ptr + row * (K // FORM.per_code), scales, zeros


@triton.jit
def along_features(scale, FORM: tl.constexpr, SLICES: tl.constexpr):
    """A result of `row_scales` in a shape that broadcasts over sums [N, M] or [SLICES, N, M]."""
    if FORM.wide == 0:
        scale = tl.trans(scale)
        if SLICES > 1:
            scale = scale[None, :, :]
    return scale


@triton.jit
def bytes_of(start, WIDTH: tl.constexpr, SLICES: tl.constexpr):
    """The first byte of each slice of a tile that begins at byte `start`: [], or [SLICES]."""
    return start if SLICES == 1 else start + tl.arange(0, SLICES) * WIDTH


@triton.jit
def first_columns(start, begin_low, FORM: tl.constexpr):
    """The first column, of low codes, of each slice of the tile that begins at byte `start`.

    begin_low: that of the tile at byte 0.
    """
    return begin_low + start * FORM.per_code


@triton.jit
def high_columns(low, FORM: tl.constexpr):
    """The columns whose codes are the high ones where those of `low` are the low ones."""
    if FORM.rest > 0:  # a last block that is shorter has two halves as well
        return low + tl.where(low < FORM.whole, HALF, FORM.rest)
    else:
        return low + HALF


@triton.jit
def in_slices(first, WIDTH: tl.constexpr, SLICES: tl.constexpr):
    """WIDTH places from each of `first` on: [WIDTH], or [SLICES, WIDTH]."""
    places = tl.arange(0, WIDTH)
    return first + places if SLICES == 1 else first[:, None] + places[None, :]


@triton.jit
def of_groups(fields_ptr, column, live, FORM: tl.constexpr, SLICES: tl.constexpr):
    """Scales or zeros of rows [N] of pointers, and of the groups of each slice's first column:
    [N, 1], or [SLICES, N, 1]."""
    group = column * 0
    if FORM.wide > 0:
        group = tl.minimum(column // FORM.wide, FORM.groups - 1)
    if SLICES == 1:
        return tl.load(fields_ptr + group, mask=live, other=0)[:, None]
    else:
        at = fields_ptr[None, :] + group[:, None]
        return tl.load(at, mask=live[None, :], other=0)[:, :, None]


@triton.jit
def groups_of(scales_ptr, zeros_ptr, column, live, FORM: tl.constexpr, SLICES: tl.constexpr):
    """Scales, and zeros or minima, of a tile's codes in the groups of some columns. Constants take
    the place of absent zeros, and of scales of whole rows, which multiply sums at the end."""
    scale, zero = 1.0, 0
    if FORM.wide > 0:
        scale = of_groups(scales_ptr, column, live, FORM, SLICES)
    if FORM.has_zeros:
        zero = of_groups(zeros_ptr, column, live, FORM, SLICES)
    return scale, zero


@triton.jit
def tile_groups(
    scales_ptr, zeros_ptr, start, begin_low, live, FORM: tl.constexpr, SLICES: tl.constexpr
):
    """`groups_of` of the low and of the high codes of the tile that begins at byte `start`."""
    column = first_columns(start, begin_low, FORM)
    scale, zero = groups_of(scales_ptr, zeros_ptr, column, live, FORM, SLICES)
    scale_high, zero_high = scale, zero
    if FORM.is_apart:
        column = high_columns(column, FORM)
        scale_high, zero_high = groups_of(scales_ptr, zeros_ptr, column, live, FORM, SLICES)
    return scale, zero, scale_high, zero_high


@triton.jit
def without_zeros(numbers, zero, FORM: tl.constexpr):
    """int4 numbers as of `decoded_halves` minus their zeros."""
    if FORM.has_minima:
        return numbers - tl.full([], 128.0, numbers.dtype)
    elif FORM.has_zeros:
        return numbers - (zero.to(tl.int32) + 128).to(numbers.dtype)
    else:
        return numbers - tl.full([], 136.0, numbers.dtype)


@triton.jit
def add_scaled(x, numbers, scale, zero, sums, FORM: tl.constexpr, SLICES: tl.constexpr):
    """sums + (numbers @ x.T) * scale, slice by slice; without scales where they are of rows.

    Minima, in the place of zeros, are multiplied by sums of x, so that no number is rounded.
    """
    if FORM.wide == 0:
        sums = add_product(x, numbers, sums, SLICES, True)
    else:
        none = tl.zeros(sums.shape, tl.float32)
        found = add_product(x, numbers, none, SLICES, True)
        sums += corrected(found, FORM, x.dtype) * scale_of(scale)
    if FORM.has_minima:
        ones = ones_beside(numbers)
        none = tl.zeros(sums.shape, tl.float32)
        sums -= scale_of(zero) * add_product(x, ones, none, SLICES, True)
    return sums


@triton.jit
def add_stored(
    x,  # [M, W] or [SLICES, M, W], the numbers of x for low codes
    x_high,  # the same for high codes
    codes,  # [N, W] or [SLICES, N, W] bytes
    groups,  # a result of `tile_groups`
    sums,  # [N, M] or [SLICES, N, M]
    FORM: tl.constexpr,
    SLICES: tl.constexpr,
):
    """sums plus the product of x with a tile of the weight."""
    scale, zero, scale_high, zero_high = groups
    if FORM.per_code == 1:
        numbers = decoded(codes, FORM, x.dtype)
        sums = add_scaled(x, numbers, scale, zero, sums, FORM, SLICES)
    else:
        low, high = decoded_halves(codes, FORM, x.dtype)
        if FORM.kind == "int4":
            low = without_zeros(low, zero, FORM)
            high = without_zeros(high, zero_high, FORM)
        if FORM.is_apart or FORM.wide == 0:
            sums = add_scaled(x, low, scale, zero, sums, FORM, SLICES)
            sums = add_scaled(x_high, high, scale_high, zero_high, sums, FORM, SLICES)
        else:
            found = add_product(x, low, tl.zeros(sums.shape, tl.float32), SLICES, True)
            found = add_product(x_high, high, found, SLICES, True)
            sums += found * scale_of(scale)
    return sums


@triton.jit
def first_low(FORM: tl.constexpr, TILES: tl.constexpr):
    """The first column, of low codes, of each slice of the tile at byte 0."""
    begin = bytes_of(0, TILES.block_k // FORM.per_code // TILES.slices, TILES.slices)
    if FORM.per_code == 2:
        begin += begin // HALF * HALF
    return begin


@triton.jit
def load_x(
    x_rows,  # [M] pointers to rows of x
    row_live,  # [M]
    inside,  # of a tile's features, whether a row has them
    low,  # first columns of slices, of low codes
    high,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
):
    """The numbers of x for a tile's low and high codes, [M, W] or [SLICES, M, W] each."""
    SLICES: tl.constexpr = TILES.slices
    WIDTH: tl.constexpr = TILES.block_k // FORM.per_code // SLICES
    live = along_rows(row_live, SLICES) & inside
    x = tl.load(tile_at(x_rows, in_slices(low, WIDTH, SLICES), SLICES), mask=live, other=0.0)
    x_high = x
    if FORM.per_code == 2:
        k = in_slices(high, WIDTH, SLICES)
        x_high = tl.load(tile_at(x_rows, k, SLICES), mask=live, other=0.0)
    return x, x_high


@triton.jit
def held_share(
    codes,  # [N] pointers to the codes, scales and zeros of rows of the weight
    scales,
    zeros,
    live,  # [N]
    first,  # byte of each row
    SHARE: tl.constexpr,  # bytes, of whole tiles
    ROW: tl.constexpr,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
):
    """A program's share of rows, of few tiles: the codes of each, and its `tile_groups`."""
    SLICES: tl.constexpr = TILES.slices
    TILE: tl.constexpr = TILES.block_k // FORM.per_code
    WIDTH: tl.constexpr = TILE // SLICES
    begin_low = first_low(FORM, TILES)
    tiles, groups = (), ()
    for place in tl.static_range(0, SHARE, TILE):
        byte = in_slices(bytes_of(first + place, WIDTH, SLICES), WIDTH, SLICES)
        inside = along_depth(byte < ROW, SLICES)
        tiles += (load_weight(tile_at(codes, byte, SLICES), inside, False),)
        groups += (tile_groups(scales, zeros, first + place, begin_low, live, FORM, SLICES),)
    return tiles, groups


@triton.jit
def pinned(tile):
    """The tile, in code that stays behind all loads before it.

    The compiler puts the exchange between threads that a product's operand needs right behind the
    operand's load, so that each load would wait for the one before.
    """
    if INTERPRETED:
        return tile
    else:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;",
            "=r,r",
            [tile],
            tile.dtype,
            is_pure=False,
            pack=32 // tile.dtype.primitive_bitwidth,
        )


@triton.jit
def held_sums(
    x_rows,  # [M] pointers to rows of x
    row_live,  # [M]
    held,  # results of `held_share`
    held_up,  # read only with GATED
    first,
    sums,  # [N, M] or [SLICES, N, M] fp32
    sums_up,
    SHARE: tl.constexpr,
    ROW: tl.constexpr,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
    GATED: tl.constexpr,
):
    """As `stored_sums`, of weights that are held: all of x is loaded at once."""
    SLICES: tl.constexpr = TILES.slices
    TILE: tl.constexpr = TILES.block_k // FORM.per_code
    WIDTH: tl.constexpr = TILE // SLICES
    tiles, groups = held
    tiles_up, groups_up = held_up
    x_tiles = ()
    for place in tl.static_range(0, SHARE, TILE):
        byte = in_slices(bytes_of(first + place, WIDTH, SLICES), WIDTH, SLICES)
        low = first_columns(first + place, first_low(FORM, TILES), FORM)
        # Slices begin at multiples of 16, which the compiler does not see in a short last block.
        high = tl.multiple_of(high_columns(low, FORM), 16)
        inside = along_depth(byte < ROW, SLICES)
        x_tiles += (load_x(x_rows, row_live, inside, low, high, FORM, TILES),)
    for i in tl.static_range(SHARE // TILE):
        x, x_high = pinned(x_tiles[i][0]), pinned(x_tiles[i][1])
        sums = add_stored(x, x_high, pinned(tiles[i]), groups[i], sums, FORM, SLICES)
        if GATED:
            tile = pinned(tiles_up[i])
            sums_up = add_stored(x, x_high, tile, groups_up[i], sums_up, FORM, SLICES)
    return sums, sums_up


@triton.jit
def stored_sums(
    x_rows,  # [M] pointers to rows of x
    row_live,  # [M]
    codes,  # [N] pointers to the codes, scales and zeros of rows of the weight
    scales,
    zeros,
    codes_up,  # the same of other rows, read only with GATED
    scales_up,
    zeros_up,
    live,  # [N]
    first,  # byte of each row of the weight
    stop,
    sums,  # [N, M] or [SLICES, N, M] fp32
    sums_up,
    K: tl.constexpr,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,  # of a row, among which `first` and `stop` lie
):
    """sums and sums_up plus the products of x with rows of the weight, from byte to byte.

    Scales of whole rows are left out: see `row_scaled`.
    """
    SLICES: tl.constexpr = TILES.slices
    ROW: tl.constexpr = K // FORM.per_code
    TILE: tl.constexpr = TILES.block_k // FORM.per_code
    WIDTH: tl.constexpr = TILE // SLICES
    EVEN: tl.constexpr = ROW % (SPLITS * TILE) == 0
    begin_low = first_low(FORM, TILES)
    groups = tile_groups(scales, zeros, first, begin_low, live, FORM, SLICES)
    groups_up = groups
    if GATED:
        groups_up = tile_groups(scales_up, zeros_up, first, begin_low, live, FORM, SLICES)
    for start in range(first, stop, TILE):
        # Scales are loaded one tile ahead, since no pipeline holds what is no operand of a product.
        next_groups = tile_groups(scales, zeros, start + TILE, begin_low, live, FORM, SLICES)
        byte = in_slices(bytes_of(start, WIDTH, SLICES), WIDTH, SLICES)
        inside = along_depth(byte < ROW, SLICES)
        low = first_columns(start, begin_low, FORM)
        high = high_columns(low, FORM)
        x, x_high = load_x(x_rows, row_live, inside, low, high, FORM, TILES)
        tile = load_weight(tile_at(codes, byte, SLICES), inside, EVEN)
        sums = add_stored(x, x_high, tile, groups, sums, FORM, SLICES)
        groups = next_groups
        if GATED:
            next_groups = tile_groups(
                scales_up, zeros_up, start + TILE, begin_low, live, FORM, SLICES
            )
            tile = load_weight(tile_at(codes_up, byte, SLICES), inside, EVEN)
            sums_up = add_stored(x, x_high, tile, groups_up, sums_up, FORM, SLICES)
            groups_up = next_groups
    return sums, sums_up


@triton.jit
def row_scales(scales, live, FORM: tl.constexpr):
    """[1, N] fp32 scales of whole rows, from pointers [N]; 1 where groups have them."""
    scale = 1.0
    if FORM.wide == 0:
        scale = scale_of(tl.load(scales, mask=live, other=0))[None, :]
    return scale


@triton.jit
def row_scaled(sums, scale, FORM: tl.constexpr, dtype: tl.constexpr):
    """fp32 sums as of `stored_sums`, of x of `dtype`, times a result of `row_scales` that
    broadcasts over them."""
    if FORM.wide == 0:
        sums = corrected(sums, FORM, dtype) * scale
    return sums


@triton.jit
def sums_of_terms(sums):
    """Sums [N, M * TERMS] of products with the terms of rows, those of a row side by side, as
    [N, M]."""
    M: tl.constexpr = sums.shape[1] // TERMS
    return tl.sum(tl.reshape(sums, [sums.shape[0], M, TERMS]), axis=2)


@triton.jit(do_not_specialize=["num_rows"])
def stored_rows_kernel(
    x_ptr,  # [T, K]; or [T, TERMS, K], terms of x
    squares_ptr,  # [T, P] fp32, sums of squares of parts of each row; only with PARTS
    codes_ptr,  # [N, K / FORM.per_code] bytes; with ACTIVATION [2 N, ...], the gate's rows first
    bias_ptr,  # [N], or None
    residual_ptr,  # [T, N], or None
    norm_ptr,  # [N], or None
    out_ptr,  # [T, N], out
    scaled_ptr,  # [T, N], out times norm, out; only with norm
    out_squares_ptr,  # [T, N / BLOCK_N] fp32, out; only with norm
    scales_ptr,  # [N / FORM.high, FORM.groups]
    zeros_ptr,  # the same shape, uint8, or minima of the scales' dtype, or None
    x_scales_ptr,  # [T] fp32, of terms; else None
    partial_ptr,  # [1, or 2 with ACTIVATION, SPLITS, T, N] fp32, out; only with SPLITS > 1
    counters_ptr,  # [>= row blocks * N / BLOCK_N] int32, zeros; only with SPLITS > 1
    num_rows,
    num_features,  # N
    x_stride,
    residual_stride,
    eps,
    K: tl.constexpr,
    FORM: tl.constexpr,
    PARTS: tl.constexpr,  # P, or 0 for an x that is not to be scaled
    ACTIVATION: tl.constexpr,  # "" for a plain product
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    SLICES: tl.constexpr = TILES.slices
    SPLITS: tl.constexpr = TILES.splits
    GATED: tl.constexpr = ACTIVATION != ""
    ROW: tl.constexpr = K // FORM.per_code  # bytes of a row of the weight, and below of a tile
    TILE: tl.constexpr = TILES.block_k // FORM.per_code
    SHARE: tl.constexpr = (ROW + SPLITS * TILE - 1) // (SPLITS * TILE) * TILE
    HELD: tl.constexpr = SHARE * FORM.per_code <= TILES.early
    OF_ROW: tl.constexpr = 1 if x_scales_ptr is None else TERMS  # rows of x for each row of out
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    eps = tl.full([], eps, tl.float32)  # a Python float reaches torch.compile's kernels as fp64

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
    squares, bias, residual, norm = None, None, None, None
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

    # Operands of the epilogue are loaded before the loop, so that it does not wait for them.
    if residual_ptr is not None:
        residual_ptr += row.to(tl.int64)[:, None] * residual_stride + column[None, :]
        residual = tl.load(residual_ptr, mask=mask, other=0.0)
    if PARTS > 0:
        squares = load_squares(squares_ptr, row, row_live, PARTS, BLOCK_P)

    M: tl.constexpr = TILES.block_m * OF_ROW
    x_row = tl.program_id(2) * M + tl.arange(0, M)
    x_rows, x_live = x_ptr + x_row.to(tl.int64) * x_stride, x_row < num_rows * OF_ROW
    acc = zero_sums(M, TILES.block_n, SLICES, True)
    if HELD:
        acc, acc_up = held_sums(
            *(x_rows, x_live, held, held_up, first, acc, acc, SHARE, ROW, FORM, TILES, GATED),
        )
    else:
        acc, acc_up = stored_sums(
            *(x_rows, x_live, codes, scales, zeros, codes_up, scales_up, zeros_up, column_live),
            *(first, first + SHARE, acc, acc, K, FORM, TILES, GATED, SPLITS),
        )
    if OF_ROW > 1:
        acc, acc_up = sums_of_terms(acc), sums_of_terms(acc_up)
    acc, acc_up = whole_sums(acc, acc_up, SLICES, True)
    acc = row_scaled(acc, row_scale, FORM, dtype)
    if GATED:
        acc_up = row_scaled(acc_up, row_scale_up, FORM, dtype)
    if OF_ROW > 1:
        x_scale = tl.load(x_scales_ptr + row, mask=row_live, other=0.0)[:, None]
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
        *(acc, acc_up, squares, bias, residual, norm, out_ptr, scaled_ptr, out_squares_ptr),
        *(place, mask, row, row_live, eps, K, ACTIVATION),
    )


def stored_rows_linear(
    x: Tensor, weight: Stored, tiles: Tiles, as_terms: bool = False, **fused: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel for x [T, K]; `fused` as in `Fused`, results as in `Launch`.

    as_terms: whether x meets the codes as terms of fp8, which takes codes of fp8 and one slice.
    """
    operands, constants, results = prepared(x, weight, tiles.block_n, Fused(**fused))
    num_rows, num_features = results[0].shape
    form, held = Form.of(weight), tiles.block_k // KINDS[weight.storage.kind].per_code
    in_slice = held // tiles.slices
    assert form.wide % in_slice == 0
    assert form.per_code == 1 or (BLOCK // 2 % in_slice == held % (BLOCK // 2) == 0)
    blocks, row_blocks = (
        triton.cdiv(num_features, tiles.block_n),
        triton.cdiv(num_rows, tiles.block_m),
    )
    partial = counts = None
    if tiles.splits > 1:
        assert blocks * row_blocks <= COUNTERS
        size = (2 if constants["ACTIVATION"] else 1, tiles.splits, num_rows, num_features)
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
        counts = counters(x.device)
    residual, x_scales = fused.get("residual"), None
    if not constants["DEPENDENT"]:
        tiles = tiles._replace(prefetch=0)
    if as_terms:
        assert weight.storage.kind == FP8 and tiles.slices == 1
        x, x_scales = terms_triton(x)
    stored_rows_kernel[(blocks, tiles.splits, row_blocks)](
        *(x, *operands[1:], weight.scales, weight.zeros, x_scales, partial, counts),
        *(num_rows, num_features, x.stride(-2)),
        0 if residual is None else residual.stride(0),
        float(fused.get("eps", 0.0)),
        FORM=form,
        TILES=tiles,
        **constants | options_of(tiles),
    )
    return results
