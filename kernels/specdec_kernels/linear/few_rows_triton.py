"""Multiplies a few rows by a weight, with fused norm, gate, bias and residual. The aim is to
take no longer than reading the weight once.

A program computes BLOCK_N features for all rows, and streams its rows of the weight through shared
memory. The norm needs no separate pass, because dividing by the root mean square multiplies each
row by one factor, which can be applied after the matmul. The kernel that writes the residual stream
also writes two other results: the stream times the norm's weight, which the next matmul reads, and
sums of squares, from which that matmul computes the factors of its rows.

A program may start while the preceding kernel still runs. Before it waits for that kernel, it
prefetches its first weights and may load its last ones into registers, so that memory stays busy.

The K dimension of a tile can be cut into slices, and each slice is given to some of the warps. If
one warp computed all of K, its tensor-core operations would add to the same sum and so run one
after another, which can take longer than loading the weights. Each slice has its own sums, and
these are added up at the end. A tile of R rows and K features has the shape [R, K], or
[SLICES, R, K / SLICES] if there is more than one slice.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.comm.inbox_triton import inbox_of, send
from specdec_kernels.gpu import CACHE_LINE
from specdec_kernels.launch_triton import (
    INTERPRETED,
    after_predecessor,
    is_last,
    options_of,
    prefetch_l2,
    room_for_splits,
)
from specdec_kernels.linear.fused import Fused, prepared
from specdec_kernels.linear.norm_triton import activate
from specdec_kernels.linear.tile_tables import Tiles

LINE = tl.constexpr(CACHE_LINE)


@triton.jit
def depth_of(start, SIZE: tl.constexpr, SLICES: tl.constexpr):
    """Return the indices of the SIZE features from `start` on, in the shape [SIZE], or
    [SLICES, SIZE / SLICES] if there is more than one slice."""
    if SLICES == 1:
        return start + tl.arange(0, SIZE)
    else:
        WIDTH: tl.constexpr = SIZE // SLICES
        slices = tl.arange(0, SLICES)[:, None] * WIDTH
        return start + slices + tl.arange(0, WIDTH)[None, :]


@triton.jit
def along_rows(value, SLICES: tl.constexpr):
    """Reshape `value` [R], which has one entry per row of a tile, to broadcast over features."""
    if SLICES == 1:
        return value[:, None]
    else:
        return value[None, :, None]


@triton.jit
def along_depth(value, SLICES: tl.constexpr):
    """Reshape `value`, which has one entry per feature of a tile, to broadcast over rows.

    value: in the shape that `depth_of` returns.
    """
    if SLICES == 1:
        return value[None, :]
    else:
        return value[:, None, :]


@triton.jit
def tile_at(rows_ptr, depth, SLICES: tl.constexpr):
    """Return pointers to all values of a tile.

    rows_ptr: [R], pointers to the tile's rows.
    depth: the indices of the tile's features, in the shape that `depth_of` returns.
    """
    return along_rows(rows_ptr, SLICES) + along_depth(depth, SLICES)


@triton.jit
def zero_sums(
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICES: tl.constexpr, SWAP: tl.constexpr
):
    """Return fp32 zeros with the shape of `sums` in `add_product`."""
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
):
    """Return sums + x @ weight.T, separately for each slice. With SWAP, `sums` and the result are
    transposed."""
    if INTERPRETED:
        x = x.to(tl.float32)
        weight = weight.to(tl.float32)
    if SWAP:
        sums = tl.dot(weight, transposed(x, SLICES), sums, input_precision="ieee")
    else:
        sums = tl.dot(x, transposed(weight, SLICES), sums, input_precision="ieee")
    return sums


@triton.jit
def transposed(tile, SLICES: tl.constexpr):
    """Transpose a matrix, or each of SLICES matrices."""
    if SLICES == 1:
        return tl.trans(tile)
    else:
        return tl.permute(tile, (0, 2, 1))


@triton.jit
def whole_sums(sums, sums_up, SLICES: tl.constexpr, SWAP: tl.constexpr):
    """Add up the slices of two results of `add_product`, and with SWAP transpose them back. Returns
    two tensors [M, N].

    Adding up slices exchanges values between warps. Both sums are reduced here together, so that
    neither exchange has to wait for the other.
    """
    if SLICES > 1:
        sums = tl.sum(sums, axis=0)
        sums_up = tl.sum(sums_up, axis=0)
    if SWAP:
        sums = tl.trans(sums)
        sums_up = tl.trans(sums_up)
    return sums, sums_up


@triton.jit
def prefetch_rows(rows_ptr, first, COUNT: tl.constexpr):
    """Prefetch COUNT values of each row of the weight into L2, starting at column `first`.

    rows_ptr: [N], pointers to the rows.
    """
    PER_LINE: tl.constexpr = LINE * 8 // rows_ptr.dtype.element_ty.primitive_bitwidth
    ahead = first + tl.arange(0, COUNT // PER_LINE) * PER_LINE
    prefetch_l2(rows_ptr[:, None] + ahead[None, :])


@triton.jit
def load_squares(squares_ptr, row, row_live, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """Load the PARTS partial sums of squares of each row of x: [M, BLOCK_P] fp32."""
    part = tl.arange(0, BLOCK_P)
    return tl.load(
        squares_ptr + row[:, None] * PARTS + part[None, :],
        mask=row_live[:, None] & (part < PARTS)[None, :],
        other=0.0,
    )


@triton.jit
def load_weight(at, mask, EVEN: tl.constexpr):
    """Load a tile of the weight. EVEN: whether tiles divide K evenly, so that no mask is needed."""
    if EVEN:
        return tl.load(at)
    else:
        return tl.load(at, mask=mask, other=0.0)


@triton.jit
def sum_of_splits(partial_ptr, place, mask, size, SPLITS: tl.constexpr):
    """Add up the partial sums [M, N] that SPLITS programs stored `size` elements apart."""
    acc = tl.zeros(place.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        at = partial_ptr + split * size + place
        acc += tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    return acc


@triton.jit
def store_for_norm(scaled_ptr, squares_ptr, out, norm, place, mask, row, row_live):
    """Store what the next norm needs: `out` times the norm's weight [N], and for each row the sum
    of squares of this program's columns. Both are computed from `out` after rounding, because the
    next kernel reads the rounded values.
    """
    wide = tl.where(mask, out.to(tl.float32), 0.0)
    scaled = (wide * norm.to(tl.float32)[None, :]).to(out.dtype)
    tl.store(scaled_ptr + place, scaled, mask=mask)
    at = row * tl.num_programs(0) + tl.program_id(0)
    tl.store(squares_ptr + at, tl.sum(wide * wide, axis=1), mask=row_live)


@triton.jit
def finish_product(
    acc,  # [M, N] fp32
    acc_up,  # [M, N] fp32, sums for the up features; used only with ACTIVATION
    squares,  # [M, P] fp32, partial sums of squares of x's rows; None if x needs no norm
    bias,  # [N], or None
    residual,  # [M, N], or None
    norm,  # [N], weight of the next norm, or None
    out_ptr,
    scaled_ptr,
    out_squares_ptr,
    inbox,  # from `inbox_of`, to send the result; None to store it
    place,  # [M, N], offset of each value from out_ptr
    mask,
    row,
    row_live,
    num_features,
    eps,
    K: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Apply the fused steps (see `Fused`) to the sums of a matmul, and store or send the
    results."""
    if squares is not None:
        factor = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)[:, None]
        acc *= factor
        acc_up *= factor
    if bias is not None:
        acc += bias.to(tl.float32)[None, :]
    if residual is not None:
        acc += residual.to(tl.float32)
    if ACTIVATION != "":
        acc = activate(acc, ACTIVATION) * acc_up
    out = acc.to(out_ptr.dtype.element_ty)
    if inbox is not None:
        first_column = tl.program_id(0) * out.shape[1]
        send(out, inbox, row_live, first_column, num_features, SIZE)
    else:
        tl.store(out_ptr + place, out, mask=mask)
    if norm is not None:
        store_for_norm(scaled_ptr, out_squares_ptr, out, norm, place, mask, row, row_live)


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_linear_kernel(
    x_ptr,  # [T, K]
    squares_ptr,  # [T, P] fp32, partial sums of squares of each row; used only with PARTS > 0
    weight_ptr,  # [N, K]; with ACTIVATION [2 N, K], the gate's rows first
    bias_ptr,  # [N], or None
    residual_ptr,  # [T, N], or None
    norm_ptr,  # [N], weight of the next norm, or None
    out_ptr,  # [T, N], output
    scaled_ptr,  # [T, N], output: out * norm; used only with norm_ptr
    out_squares_ptr,  # [T, N / BLOCK_N] fp32, output: sums of squares; used only with norm_ptr
    partial_ptr,  # [SPLITS, T, N] fp32, output; used only with SPLITS > 1
    counters_ptr,  # [at least N / BLOCK_N] int32, zeros; used only with SPLITS > 1
    inboxes_ptr,  # this and the next 2: the fields of `Inbox`; None, None and 0 to store the result
    counts_ptr,
    inbox_first,
    num_rows,
    num_features,  # N
    x_stride,
    residual_stride,
    eps,
    K: tl.constexpr,
    PARTS: tl.constexpr,  # P, or 0 without squares_ptr
    ACTIVATION: tl.constexpr,  # "" if there is no gate
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SIZE: tl.constexpr,  # the number of inboxes
    DEPENDENT: tl.constexpr,
):
    BLOCK_K: tl.constexpr = TILES.block_k
    SLICES: tl.constexpr = TILES.slices  # each group of warps computes one slice of BLOCK_K
    SPLITS: tl.constexpr = TILES.splits
    EARLY: tl.constexpr = TILES.early
    GATED: tl.constexpr = ACTIVATION != ""
    # An mma.sync tile has 16 rows but only 8 columns. With fewer than 16 rows of x, compute the
    # transposed product, so that the rows of x become its columns.
    SWAP: tl.constexpr = TILES.block_m < 16
    SHARE: tl.constexpr = (K + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
    EVEN: tl.constexpr = K % (SPLITS * BLOCK_K) == 0
    tl.static_assert(EARLY == 0 or (EVEN and SPLITS == 1 and not GATED and EARLY % BLOCK_K == 0))
    eps = tl.full([], eps, tl.float32)  # torch.compile passes Python floats as fp64

    split = tl.program_id(1)
    first = split * SHARE
    column = tl.program_id(0) * TILES.block_n + tl.arange(0, TILES.block_n)
    column_live = column < num_features
    weight_ptr += tl.minimum(column, num_features - 1).to(tl.int64) * K
    # If num_features is 1, Triton passes it as a constant, which has no method `to`.
    up_ptr = weight_ptr + tl.cast(num_features, tl.int64) * K
    if TILES.prefetch > 0:
        prefetch_rows(weight_ptr, first, TILES.prefetch)
        if GATED:
            prefetch_rows(up_ptr, first, TILES.prefetch)
    if EARLY > 0:
        early = depth_of(K - EARLY, EARLY, SLICES)
        early_weight = tl.load(tile_at(weight_ptr, early, SLICES))
    row = tl.arange(0, TILES.block_m)
    row_live = row < num_rows
    place = row.to(tl.int64)[:, None] * num_features + column[None, :]
    mask = row_live[:, None] & column_live[None, :]
    squares, bias, residual, norm, inbox = None, None, None, None, None
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column_live, other=0.0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=column_live, other=0.0)
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

    x_ptr += row.to(tl.int64) * x_stride
    inside = depth_of(0, BLOCK_K, SLICES)
    acc = zero_sums(TILES.block_m, TILES.block_n, SLICES, SWAP)
    acc_up = acc
    if EARLY > 0:
        early_x = tl.load(
            tile_at(x_ptr, early, SLICES), mask=along_rows(row_live, SLICES), other=0.0
        )
    for start in range(first, first + SHARE - EARLY, BLOCK_K):
        # Compute all addresses and masks before the first load. The tile tables were measured with
        # this order, and another one may change the generated code.
        k = start + inside
        x_at = tile_at(x_ptr, k, SLICES)
        x_mask = along_rows(row_live, SLICES) & along_depth(k < K, SLICES)
        weight_at = tile_at(weight_ptr, k, SLICES)
        up_at = tile_at(up_ptr, k, SLICES)
        weight_mask = along_depth(k < K, SLICES)
        x = tl.load(x_at, mask=x_mask, other=0.0)
        weight = load_weight(weight_at, weight_mask, EVEN)
        acc = add_product(x, weight, acc, SLICES, SWAP)
        if GATED:
            up = load_weight(up_at, weight_mask, EVEN)
            acc_up = add_product(x, up, acc_up, SLICES, SWAP)
    if EARLY > 0:
        acc = add_product(early_x, early_weight, acc, SLICES, SWAP)
    acc, acc_up = whole_sums(acc, acc_up, SLICES, SWAP)

    if SPLITS > 1:
        size = num_rows.to(tl.int64) * num_features
        tl.store(partial_ptr + split * size + place, acc, mask=mask)
        if not is_last(counters_ptr + tl.program_id(0), SPLITS):
            return
        acc = sum_of_splits(partial_ptr, place, mask, size, SPLITS)
    finish_product(
        *(acc, acc_up, squares, bias, residual, norm, out_ptr, scaled_ptr, out_squares_ptr, inbox),
        *(place, mask, row, row_live, num_features, eps, K, ACTIVATION, SIZE),
    )


def few_rows_linear(
    x: Tensor, weight: Tensor, tiles: Tiles, **fused: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply x [T, K] by a weight with `few_rows_linear_kernel`. T is at most `tiles.block_m`.

    fused: fields of `Fused`, as keyword arguments. Returns `Launch.results`.
    """
    operands, inbox, numbers, constants, results = prepared(
        x, weight, tiles.block_n, Fused(**fused)
    )
    (num_rows, width), (_, num_features) = x.shape, results[0].shape
    blocks = triton.cdiv(num_features, tiles.block_n)
    assert num_rows <= tiles.block_m
    assert tiles.splits == 1 or not constants["ACTIVATION"]
    parts = room_for_splits(tiles.splits, blocks, (num_rows, num_features), x.device)
    # A prefetch must not reach past the end of the weight.
    share = triton.cdiv(width, tiles.splits * tiles.block_k) * tiles.block_k
    prefetch = tiles.prefetch if tiles.prefetch <= width - share * (tiles.splits - 1) else 0
    early = tiles.early if tiles.splits == 1 and width % tiles.block_k == 0 else 0
    tiles = tiles._replace(prefetch=prefetch if constants["DEPENDENT"] else 0, early=early)
    few_rows_linear_kernel[(blocks, tiles.splits)](
        *(*operands, *parts, *inbox, num_rows, num_features, x.stride(0), *numbers),
        TILES=tiles,
        **constants | options_of(tiles),
    )
    return results
