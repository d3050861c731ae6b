"""Multiplies one row by a weight that fits into registers, with fused norm, gate, bias and
residual.

A program loads all of its rows of the weight into registers at once, before it waits for the
preceding kernel. Since this takes no shared memory, the programs fit on the multiprocessors beside
those of the preceding kernel, and keep memory busy while that kernel ends. Otherwise memory would
be idle between kernels. With small layers, like those of a draft model, it would be idle most of
the time. Tensor cores are not faster for one row, so the kernel uses ordinary multiplications.

The tiles of a quantised weight hold bytes. If a byte has two codes, they belong to two columns of
x. Each load of a thread reads LANE bytes of the weight, and the thread also loads the values of x
by which it multiplies their codes, LANE values per load. Otherwise, threads would have to exchange
values. The LANE bytes of one load share one scale and one zero. If the two columns of a byte may
lie in different groups, the low codes of a load share one scale and zero, and the high codes share
another.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.comm.inbox_triton import inbox_of, send
from specdec_kernels.launch_triton import after_predecessor, options_of
from specdec_kernels.linear.decode_triton import decoded_halves, scale_of
from specdec_kernels.linear.fused import Fused, prepared
from specdec_kernels.linear.norm_triton import activate
from specdec_kernels.linear.stored import Stored
from specdec_kernels.linear.stored_groups_triton import HALF, Form, form_of, high_columns, rows_of
from specdec_kernels.linear.tiles import RowTiles


@triton.jit
def chunks_of(rows_ptr, K: tl.constexpr, CHUNK: tl.constexpr, EVICTION: tl.constexpr):
    """Load rows of K numbers as a sequence of tiles [N, CHUNK]. The last tile is padded with zeros.

    rows_ptr: [N, 1], pointers to the rows.
    """
    tiles = ()
    for start in tl.static_range(0, K, CHUNK):
        k = start + tl.arange(0, CHUNK)[None, :]
        if start + CHUNK > K:
            tile = tl.load(rows_ptr + k, mask=k < K, other=0.0, eviction_policy=EVICTION)
        else:
            tile = tl.load(rows_ptr + k, eviction_policy=EVICTION)
        tiles += (tile,)
    return tiles


@triton.constexpr_function
def per_code_of(form: Form | None) -> int:
    """Return how many values a byte of a quantised weight holds, or 1 for an unquantised weight."""
    return 1 if form is None else form.per_code


@triton.jit
def low_columns(byte):
    """Return the columns of the low codes of bytes with two codes each.

    byte: the bytes' indices in a row. A block of 2 * HALF columns takes HALF bytes; see
    `stored.unpacked`.
    """
    return byte + byte // HALF * HALF


@triton.jit
def columns_of(rows_ptr, ROW: tl.constexpr, CHUNK: tl.constexpr, FORM: tl.constexpr):
    """Load x in the order in which a weight with two codes per byte stores its codes. Return two
    sequences of tiles [M, CHUNK]: the values to multiply by low codes, and those to multiply by
    high codes.

    rows_ptr: [M, 1], pointers to rows of x. ROW: bytes of codes in a row of the weight.
    """
    low_tiles = ()
    high_tiles = ()
    for start in tl.static_range(0, ROW, CHUNK):
        byte = start + tl.arange(0, CHUNK)[None, :]
        low = low_columns(byte)
        high = high_columns(low, FORM)
        low = tl.max_contiguous(tl.multiple_of(low, [1, 8]), [1, 8])
        high = tl.max_contiguous(tl.multiple_of(high, [1, 8]), [1, 8])
        low_tiles += (tl.load(rows_ptr + low, mask=byte < ROW, other=0.0),)
        high_tiles += (tl.load(rows_ptr + high, mask=byte < ROW, other=0.0),)
    return low_tiles, high_tiles


@triton.jit
def fields_of(
    fields_ptr,  # [N, 1], pointers to the scales or zeros of rows
    HIGH: tl.constexpr,  # whether to load them for the high codes; used only with FORM.is_apart
    ROW: tl.constexpr,
    CHUNK: tl.constexpr,
    LANE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Load the scales, or the zeros, of a weight. Return a sequence of tiles [N, CHUNK / LANE].

    A thread loads LANE bytes of codes at a time, so each tile has one scale or zero per LANE bytes.
    """
    tiles = ()
    for start in tl.static_range(0, ROW, CHUNK):
        byte = start + tl.arange(0, CHUNK // LANE)[None, :] * LANE
        column = byte * FORM.per_code
        if FORM.is_apart:
            column = high_columns(low_columns(byte), FORM) if HIGH else low_columns(byte)
        group = column // FORM.wide if FORM.wide > 0 else byte * 0
        tiles += (tl.load(fields_ptr + group, mask=byte < ROW, other=0),)
    return tiles


@triton.jit
def groups_of(
    scales_ptr,  # [N, 1], pointers to the scales of rows
    zeros_ptr,  # [N, 1], pointers to their zeros or minima
    none,  # placeholder to return if the weight has no scales per group, or no zeros
    ROW: tl.constexpr,
    CHUNK: tl.constexpr,
    LANE: tl.constexpr,
    FORM: tl.constexpr,
):
    """Load the scales and zeros of groups of columns. Return four results of `fields_of`: the
    scales and zeros of the low codes, then the scales and zeros of the high codes."""
    scales, zeros = none, none
    if FORM.wide > 0:
        scales = fields_of(scales_ptr, False, ROW, CHUNK, LANE, FORM)
    if FORM.has_zeros:
        zeros = fields_of(zeros_ptr, False, ROW, CHUNK, LANE, FORM)
    scales_high, zeros_high = scales, zeros
    if FORM.is_apart:
        scales_high = fields_of(scales_ptr, True, ROW, CHUNK, LANE, FORM)
        if FORM.has_zeros:
            zeros_high = fields_of(zeros_ptr, True, ROW, CHUNK, LANE, FORM)
    return scales, zeros, scales_high, zeros_high


@triton.jit
def lane_sums(products, LANE: tl.constexpr):
    """Add up every LANE consecutive values of `products` [N, CHUNK]. Return [N, CHUNK / LANE]."""
    N: tl.constexpr = products.shape[0]
    LANES: tl.constexpr = products.shape[1] // LANE
    return tl.sum(tl.reshape(products, [N, LANES, LANE]), axis=2)


@triton.jit
def scaled_sums(sums, x_sums, scale, zero, FORM: tl.constexpr):
    """Apply zeros, minima and scales to sums of products of x and decoded codes.

    x_sums: sums of x over the same columns. Subtracting a zero from all codes is the same as
    subtracting zero * x_sums from the sums.
    """
    if FORM.kind == "int4":
        offset = 136.0  # 128, which `decoded_halves` adds, plus 8, the default zero
        if FORM.has_minima:
            offset = 128.0
        elif FORM.has_zeros:
            offset = 128.0 + zero.to(tl.float32)
        sums -= offset * x_sums
    elif FORM.has_zeros and not FORM.has_minima:
        sums -= zero.to(tl.float32) * x_sums
    if FORM.wide > 0:
        sums *= scale_of(scale)
    if FORM.has_minima:
        sums -= scale_of(zero) * x_sums
    return sums


@triton.jit
def dot_products(
    weight,  # tiles [N, CHUNK]
    x,  # tiles [1, CHUNK] or [N, CHUNK], for the low codes
    x_high,  # the same for the high codes; equal to x if a byte has only one code
    groups,  # a result of `groups_of`, with tiles [N, CHUNK / LANE]
    N: tl.constexpr,
    ROW: tl.constexpr,  # elements per row of the weight: values, or bytes of codes
    CHUNK: tl.constexpr,
    LANE: tl.constexpr,  # elements that a thread loads at a time
    FORM: tl.constexpr,  # None for an unquantised weight
):
    """Return the dot products of x and each row of the weight, fp32 [N]. Threads exchange sums only
    once, at the end. If there is one scale per row, the caller must apply it."""
    scales, zeros, scales_high, zeros_high = groups
    sums = tl.zeros([N, CHUNK // LANE], tl.float32)
    for chunk in tl.static_range((ROW + CHUNK - 1) // CHUNK):
        scale, zero = scales[chunk], zeros[chunk]
        x_low = x[chunk].to(tl.float32)
        if per_code_of(FORM) == 1:
            found = lane_sums(weight[chunk].to(tl.float32) * x_low, LANE)
            if FORM is not None:
                found = scaled_sums(found, lane_sums(x_low, LANE), scale, zero, FORM)
        else:
            low, high = decoded_halves(weight[chunk], FORM, x[chunk].dtype)
            x_up = x_high[chunk].to(tl.float32)
            low, high = low.to(tl.float32) * x_low, high.to(tl.float32) * x_up
            if FORM.is_apart:
                found, x_sums = lane_sums(low, LANE), lane_sums(x_low, LANE)
                found = scaled_sums(found, x_sums, scale, zero, FORM)
                above, x_sums = lane_sums(high, LANE), lane_sums(x_up, LANE)
                found += scaled_sums(above, x_sums, scales_high[chunk], zeros_high[chunk], FORM)
            else:
                x_sums = lane_sums(x_low + x_up, LANE)
                found = scaled_sums(lane_sums(low + high, LANE), x_sums, scale, zero, FORM)
        sums += found
    return tl.sum(sums, axis=1)


@triton.jit
def one_row_linear_kernel(
    x_ptr,  # [K]
    squares_ptr,  # [P] fp32, partial sums of squares of the row; used only with PARTS
    weight_ptr,  # [N, K], or its codes; with ACTIVATION [2 N, K], the gate's rows first
    bias_ptr,  # [N], or None
    residual_ptr,  # [N], or None
    norm_ptr,  # [N], weight of the next norm, or None
    out_ptr,  # [N], output
    scaled_ptr,  # [N], output: out * norm; used only with norm_ptr
    out_squares_ptr,  # [N / BLOCK_N] fp32, output: sums of squares; used only with norm_ptr
    scales_ptr,  # [N / FORM.high, FORM.groups], or None for an unquantised weight
    zeros_ptr,  # zeros or minima in the shape of the scales, or None
    inboxes_ptr,  # this and the next 2: the fields of `Inbox`; None, None and 0 to store the result
    counts_ptr,
    inbox_first,
    num_features,  # N
    eps,
    K: tl.constexpr,
    FORM: tl.constexpr,  # the weight's `Form`, or None for an unquantised weight
    PARTS: tl.constexpr,  # P, or 0 without squares_ptr
    ACTIVATION: tl.constexpr,  # "" if there is no gate
    TILES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    SIZE: tl.constexpr,  # the number of inboxes
    DEPENDENT: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION != ""
    eps = tl.full([], eps, tl.float32)  # torch.compile passes Python floats as fp64
    column = tl.program_id(0) * TILES.block_n + tl.arange(0, TILES.block_n)
    live = column < num_features
    feature = tl.minimum(column, num_features - 1).to(tl.int64)
    PER_CODE: tl.constexpr = per_code_of(FORM)
    ROW: tl.constexpr = K // PER_CODE
    rows_ptr = weight_ptr + (feature * ROW)[:, None]
    # Each load of a thread reads LANE values of x (16 bytes), or LANE elements of the weight.
    LANE: tl.constexpr = 128 // x_ptr.dtype.element_ty.primitive_bitwidth
    if FORM is not None:
        # program_id(1) is always 0. Adding it times LANE changes nothing, but makes the compiler
        # treat the addresses as multiples of LANE.
        rows_ptr += tl.program_id(1) * LANE
    # The weight is not read again before the next forward pass, so let the L2 cache evict it first.
    weight = chunks_of(rows_ptr, ROW, TILES.chunk, "evict_first")
    if GATED:
        up = chunks_of(rows_ptr + num_features.to(tl.int64) * ROW, ROW, TILES.chunk, "evict_first")
    groups = (weight, weight, weight, weight)  # placeholders if unquantised
    groups_up = groups
    if FORM is not None:
        _, scales, zeros = rows_of(weight_ptr, scales_ptr, zeros_ptr, feature, K, FORM)
        groups = groups_of(scales[:, None], zeros[:, None], weight, ROW, TILES.chunk, LANE, FORM)
        if FORM.wide == 0:
            row_scale = scale_of(tl.load(scales, mask=live, other=0))
        if GATED:
            above = feature + num_features
            _, scales, zeros = rows_of(weight_ptr, scales_ptr, zeros_ptr, above, K, FORM)
            groups_up = groups_of(scales[:, None], zeros[:, None], up, ROW, TILES.chunk, LANE, FORM)
            if FORM.wide == 0:
                row_scale_up = scale_of(tl.load(scales, mask=live, other=0))
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=live, other=0.0)
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=live, other=0.0)
    after_predecessor(DEPENDENT)

    # If a chunk of x has fewer than LANE values per thread, load it once for every row of the
    # weight, so that each thread loads the values it needs. If x were loaded only once, only some
    # threads would load it, and the others would have to get the values through shared memory.
    X_ROWS: tl.constexpr = TILES.block_n if TILES.chunk < 32 * TILES.num_warps * LANE else 1
    x_rows = x_ptr + tl.zeros([X_ROWS, 1], tl.int32)
    if PER_CODE == 2:
        x, x_high = columns_of(x_rows, ROW, TILES.chunk, FORM)
    else:
        x = chunks_of(x_rows, K, TILES.chunk, "")
        x_high = x
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + column, mask=live, other=0.0)
    if PARTS > 0:
        part = tl.arange(0, BLOCK_P)
        squares = tl.load(squares_ptr + part, mask=part < PARTS, other=0.0)
    first_column = tl.program_id(0) * TILES.block_n
    if inboxes_ptr is not None:
        row = tl.zeros([1], tl.int32)
        inbox = inbox_of(
            *(inboxes_ptr, counts_ptr, inbox_first, row, row == 0, first_column),
            *(num_features, SIZE),
        )
    acc = dot_products(weight, x, x_high, groups, TILES.block_n, ROW, TILES.chunk, LANE, FORM)
    if FORM is not None:
        if FORM.wide == 0:
            acc *= row_scale
    if PARTS > 0:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        acc *= factor
    if bias_ptr is not None:
        acc += bias.to(tl.float32)
    if residual_ptr is not None:
        acc += residual.to(tl.float32)
    if GATED:
        acc_up = dot_products(up, x, x_high, groups_up, TILES.block_n, ROW, TILES.chunk, LANE, FORM)
        if FORM is not None:
            if FORM.wide == 0:
                acc_up *= row_scale_up
        if PARTS > 0:
            acc_up *= factor
        acc = activate(acc, ACTIVATION) * acc_up
    out = acc.to(out_ptr.dtype.element_ty)
    if inboxes_ptr is not None:
        one = tl.reshape(out, [1, TILES.block_n])
        send(one, inbox, row == 0, first_column, num_features, SIZE)
    else:
        tl.store(out_ptr + column, out, mask=live)
    if norm_ptr is not None:
        # Use the rounded values of out, because the next kernel reads these.
        wide = tl.where(live, out.to(tl.float32), 0.0)
        tl.store(scaled_ptr + column, (wide * norm.to(tl.float32)).to(out.dtype), mask=live)
        tl.store(out_squares_ptr + tl.program_id(0), tl.sum(wide * wide, axis=0))


def one_row_linear(
    x: Tensor, weight: Tensor | Stored, tiles: RowTiles, **fused: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Multiply x [1, K] by a weight with `one_row_linear_kernel`.

    fused: fields of `Fused`, as keyword arguments. Returns `Launch.results`.
    """
    assert x.shape[0] == 1
    operands, inbox, (_, eps), constants, results = prepared(
        x, weight, tiles.block_n, Fused(**fused)
    )
    num_features, held, scales, zeros = results[0].shape[1], operands[2], None, None
    if isinstance(weight, Stored):
        held, scales, zeros = weight.codes, weight.scales, weight.zeros
    one_row_linear_kernel[(triton.cdiv(num_features, tiles.block_n),)](
        *(*operands[:2], held, *operands[3:], scales, zeros, *inbox, num_features, eps),
        FORM=form_of(weight),
        TILES=tiles,
        **constants | options_of(tiles),
    )
    return results
