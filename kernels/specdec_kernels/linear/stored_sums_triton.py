"""Multiplies x by a quantised weight, whose codes are decoded in registers.

Tensor cores can read only the left operand of a matmul from registers. The weight is therefore the
left operand, and x is the right one. Each slice of a tile lies in one group of columns, so its
product is multiplied by the scales of that group. If each row has a single scale, it is applied to
the sums at the end.

A program multiplies a share of each row of the weight. If the share has at most `Tiles.early`
values, the program loads all of the share's codes, scales and zeros before it waits for the
preceding kernel.
"""

import triton
import triton.language as tl

from specdec_kernels.launch_triton import INTERPRETED
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
    load_weight,
    tile_at,
)
from specdec_kernels.linear.stored_groups_triton import (
    HALF,
    bytes_of,
    first_columns,
    high_columns,
    in_slices,
    tile_groups,
)


@triton.jit
def without_zeros(numbers, zero, FORM: tl.constexpr):
    """Subtract the zeros from int4 values that `decoded_halves` returned, and also the 128 by which
    these values are too large. If the weight has neither zeros nor minima, the zero is 8. If it has
    minima, only 128 is subtracted, and `add_scaled` subtracts the minima."""
    if FORM.has_minima:
        return numbers - tl.full([], 128.0, numbers.dtype)
    elif FORM.has_zeros:
        return numbers - (zero.to(tl.int32) + 128).to(numbers.dtype)
    else:
        return numbers - tl.full([], 136.0, numbers.dtype)


@triton.jit
def add_scaled(x, numbers, scale, zero, sums, FORM: tl.constexpr, SLICES: tl.constexpr):
    """Return sums + (numbers @ x.T) * scale, separately for each slice. If each row has a single
    scale, it is not applied here.

    Some weights have minima instead of zeros. Subtracting those from `numbers` would round the
    results. Instead, they are multiplied by the sums of x and subtracted from the fp32 sums.
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
    x,  # [M, W] or [SLICES, M, W], the values of x to multiply by low codes
    x_high,  # those to multiply by high codes, in the same shape
    codes,  # [N, W] or [SLICES, N, W] bytes
    groups,  # a result of `tile_groups`
    sums,  # [N, M] or [SLICES, N, M]
    FORM: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Decode one tile of the weight, and return sums + tile @ x.T."""
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
    """Return the column of the first low code in each slice of a tile that begins at byte 0."""
    begin = bytes_of(0, TILES.block_k // FORM.per_code // TILES.slices, TILES.slices)
    if FORM.per_code == 2:
        begin += begin // HALF * HALF
    return begin


@triton.jit
def load_x(
    x_rows,  # [M] pointers to rows of x
    row_live,  # [M]
    inside,  # mask of the tile's bytes that lie within a row of codes
    low,  # the column of the first low code in each slice
    high,  # the column of the first high code in each slice
    FORM: tl.constexpr,
    TILES: tl.constexpr,
):
    """Load two tiles of x: the values to multiply by the low codes of the weight's tile, and those
    to multiply by its high codes. Both are [M, W] or [SLICES, M, W], and they are the same if a
    byte has only one code."""
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
    codes,  # [N], pointers to the codes of rows of the weight
    scales,  # [N], pointers to the scales of these rows
    zeros,  # [N], pointers to their zeros or minima
    live,  # [N]
    first,  # where the program's share of each row begins, in bytes
    SHARE: tl.constexpr,  # bytes in a share, a multiple of the bytes in a row of a tile
    ROW: tl.constexpr,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
):
    """Load a program's whole share of the weight into registers. Return two tuples, each with one
    element per tile: the tiles' codes, and what `tile_groups` returns for the tiles."""
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
    """Return the tile unchanged, through inline assembly that the compiler cannot move before
    earlier loads.

    Before a matmul, threads must exchange the values of its operands. Without the assembly, the
    compiler would place the exchange directly after the operand's load. Since the exchange has to
    wait for that load, the next load would not start until the previous one has ended.
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
    held,  # the result of `held_share`
    held_up,  # the same for the up features; read only with GATED
    first,  # where the program's share of each row begins, in bytes
    sums,  # [N, M] or [SLICES, N, M] fp32
    sums_up,
    SHARE: tl.constexpr,
    ROW: tl.constexpr,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
    GATED: tl.constexpr,
):
    """Compute the same as `stored_sums`, for a share of the weight that `held_share` has loaded
    into registers. All values of x for the share are loaded before the first matmul."""
    SLICES: tl.constexpr = TILES.slices
    TILE: tl.constexpr = TILES.block_k // FORM.per_code
    WIDTH: tl.constexpr = TILE // SLICES
    tiles, groups = held
    tiles_up, groups_up = held_up
    x_tiles = ()
    for place in tl.static_range(0, SHARE, TILE):
        byte = in_slices(bytes_of(first + place, WIDTH, SLICES), WIDTH, SLICES)
        low = first_columns(first + place, first_low(FORM, TILES), FORM)
        # Slices begin at multiples of 16. Tell the compiler, since it cannot derive this for the
        # high codes of an incomplete last block.
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
    codes,  # [N], pointers to the codes of rows of the weight
    scales,  # [N], pointers to the scales of these rows
    zeros,  # [N], pointers to their zeros or minima
    codes_up,  # the same three for the up features; read only with GATED
    scales_up,
    zeros_up,
    live,  # [N]
    first,  # the first byte to read in each row of the weight
    stop,  # the end of the bytes to read, exclusive
    sums,  # [N, M] or [SLICES, N, M] fp32
    sums_up,
    K: tl.constexpr,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,  # how many programs share the columns of a row
):
    """Multiply x by the codes in bytes `first` to `stop` of the weight's rows. Add the products to
    `sums` and, with GATED, the products of the up features to `sums_up`. Return both.

    If each row has a single scale, it is not applied here: see `row_scaled`.
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
        # Load scales one tile ahead. The compiler's pipelining would not prefetch them, since it
        # prefetches only operands of matmuls.
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
