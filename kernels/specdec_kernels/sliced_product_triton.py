"""A product whose depth is in slices, each for some warps of a program.

Sums stay apart until all tiles are through. A tile of R rows and K features is [R, K], or
[SLICES, R, K / SLICES] where there is more than one slice.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import triton
import triton.language as tl


@triton.jit
def depth_of(start, SIZE: tl.constexpr, SLICES: tl.constexpr):
    """The SIZE features from `start` on: [SIZE], or [SLICES, SIZE / SLICES]."""
    if SLICES == 1:
        return start + tl.arange(0, SIZE)
    else:
        WIDTH: tl.constexpr = SIZE // SLICES
        slices = tl.arange(0, SLICES)[:, None] * WIDTH
        return start + slices + tl.arange(0, WIDTH)[None, :]


@triton.jit
def along_rows(value, SLICES: tl.constexpr):
    """What each row of a tile has, [R], to be broadcast over its features."""
    if SLICES == 1:
        return value[:, None]
    else:
        return value[None, :, None]


@triton.jit
def along_depth(value, SLICES: tl.constexpr):
    """What each feature of a tile has, as from `depth_of`, to be broadcast over its rows."""
    if SLICES == 1:
        return value[None, :]
    else:
        return value[:, None, :]


@triton.jit
def tile_at(rows_ptr, depth, SLICES: tl.constexpr):
    """Addresses of a tile, from those where its rows begin, [R], and features as of `depth_of`."""
    return along_rows(rows_ptr, SLICES) + along_depth(depth, SLICES)


@triton.jit
def zero_sums(
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, SWAP: tl.constexpr
):
    """Sums for `add_product` to begin with, fp32."""
    if SWAP:
        sums = tl.zeros([SLICES, BLOCK_N, BLOCK_M], tl.float32)
    else:
        sums = tl.zeros([SLICES, BLOCK_M, BLOCK_N], tl.float32)
    if SLICES == 1:
        sums = tl.reshape(sums, sums.shape[1:])
    return sums


@triton.jit
def add_product(
    x,  # [M, K] or [SLICES, M, K]
    weight,  # [N, K] or [SLICES, N, K]
    sums,  # [M, N] or [SLICES, M, N]; with SWAP [N, M] or [SLICES, N, M]
    SLICES: tl.constexpr,
    SWAP: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """sums + x @ weight.T, slice by slice; with SWAP its transpose."""
    if UPCAST:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    if SWAP:
        sums = tl.dot(weight, transposed(x, SLICES), sums, input_precision=PRECISION)
    else:
        sums = tl.dot(x, transposed(weight, SLICES), sums, input_precision=PRECISION)
    return sums


@triton.jit
def transposed(tile, SLICES: tl.constexpr):
    """A matrix, or SLICES of them, transposed."""
    if SLICES == 1:
        return tl.trans(tile)
    else:
        return tl.permute(tile, (0, 2, 1))


@triton.jit
def whole_sums(sums, sums_up, SLICES: tl.constexpr, SWAP: tl.constexpr):
    """Two sums of `add_product` as [M, N] each: slices added up, and turned back with SWAP.

    Side by side, as what warps exchange for the one does not wait for the other.
    """
    if SLICES > 1:
        sums = tl.sum(sums, axis=0)
        sums_up = tl.sum(sums_up, axis=0)
    if SWAP:
        sums = tl.trans(sums)
        sums_up = tl.trans(sums_up)
    return sums, sums_up
