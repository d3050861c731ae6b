"""A softmax over keys that come tile by tile, and in parts that other programs take.

Online softmax: Milakov and Gimelshein, arXiv 1805.02867; parts of a context: Flash-Decoding.
Maxima are in units of log2.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    row_max,  # [M], in units of log2
    acc,  # [M, D]
    query_first,  # [M, D / 2]
    query_second,
    key_first,  # [N, D / 2]
    key_second,
    value,  # [N, D]
    visible,  # [M, N]
    scale,  # positive
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of keys, as halves, joins the softmax.

    Returns the new maxima, the factor [M] of what was summed before, the tile's weights [M, N],
    which are still to be summed, and the new `acc`.
    """
    if UPCAST:
        query_first = query_first.to(tl.float32)
        query_second = query_second.to(tl.float32)
        key_first = key_first.to(tl.float32)
        key_second = key_second.to(tl.float32)
        value = value.to(tl.float32)
    scores = tl.dot(query_first, tl.trans(key_first), input_precision=PRECISION)
    scores = tl.dot(query_second, tl.trans(key_second), scores, input_precision=PRECISION)
    if HAS_SOFTCAP:
        # tanh(x) = 2 sigmoid(2x) - 1, which neither overflows nor needs libdevice.
        scores = softcap * (2 * tl.sigmoid(2 * scale * scores / softcap) - 1)
        scale = 1.0
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * (scale * LOG2E))
    # A row that has seen no key yet stays at -inf, and inf - inf would be NaN.
    base = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores * (scale * LOG2E) - base[:, None])
    keep = tl.exp2(row_max - base)
    acc = acc * keep[:, None]
    acc = tl.dot(weights.to(value.dtype), value, acc, input_precision=PRECISION)
    return new_max, keep, weights, acc


@triton.jit
def with_sink(row_max, row_sum, sink):
    """Sum of a softmax that a sink takes part in, and the factor of what was summed before."""
    top = tl.maximum(row_max, sink)
    keep = tl.exp2(row_max - top)
    return row_sum * keep + tl.exp2(sink - top), keep


@triton.jit
def few_parts(
    partial_ptr,  # [parts, M, D] fp32
    stats_ptr,  # [parts, 2, M] fp32, maxima and sums
    parts,
    row,  # [R]
    rows,  # those before this one are there
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,  # at least `parts`
):
    """Maxima and sums [R] and weighted values [R, D] of a softmax; part by part in every thread."""
    dim = tl.arange(0, BLOCK_D)
    row_max = tl.full(row.shape, float("-inf"), tl.float32)
    row_sum = tl.zeros(row.shape, tl.float32)
    acc = tl.zeros([row.shape[0], BLOCK_D], tl.float32)
    # No load depends on another, so all can be under way at once.
    for part in tl.static_range(PARTS):
        live = row < tl.where(part < parts, rows, 0)
        at = stats_ptr + part * (2 * BLOCK_M) + row
        part_max = tl.load(at, mask=live, other=float("-inf"), cache_modifier=".cg")
        part_sum = tl.load(at + BLOCK_M, mask=live, other=0.0, cache_modifier=".cg")
        values = tl.load(
            partial_ptr + (part * BLOCK_M + row)[:, None] * D + dim[None, :],
            mask=live[:, None] & (dim < D)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(row_max, part_max)
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        keep = tl.exp2(row_max - base)
        weight = tl.exp2(part_max - base)
        row_sum = row_sum * keep + part_sum * weight
        acc = acc * keep[:, None] + values * weight[:, None]
        row_max = new_max
    return row_max, row_sum, acc


@triton.jit
def many_parts(
    partial_ptr,
    stats_ptr,
    parts,
    row,
    rows,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PARTS: tl.constexpr,  # a power of two
):
    """As `few_parts`, with the parts over threads: unrolled, many would take long to compile."""
    part = tl.arange(0, PARTS)
    dim = tl.arange(0, BLOCK_D)
    live = (part < parts)[:, None] & (row < rows)[None, :]
    at = stats_ptr + part[:, None] * (2 * BLOCK_M) + row[None, :]
    part_max = tl.load(at, mask=live, other=float("-inf"), cache_modifier=".cg")
    part_sum = tl.load(at + BLOCK_M, mask=live, other=0.0, cache_modifier=".cg")
    at = partial_ptr + (part[:, None] * BLOCK_M + row[None, :])[:, :, None] * D
    values = tl.load(
        at + dim[None, None, :],
        mask=live[:, :, None] & (dim < D)[None, None, :],
        other=0.0,
        cache_modifier=".cg",
    )
    row_max = tl.max(part_max, axis=0)
    base = tl.where(row_max == float("-inf"), 0.0, row_max)
    weight = tl.exp2(part_max - base[None, :])
    row_sum = tl.sum(part_sum * weight, axis=0)
    return row_max, row_sum, tl.sum(values * weight[:, :, None], axis=0)


@triton.jit
def combine_rows(
    partial_ptr,
    stats_ptr,
    sinks_ptr,  # [GROUP] of this key head; only with HAS_SINKS
    out_ptr,  # of the sequence's first token and the key head's first query head, out
    parts,
    first,
    rows,
    step,
    token_stride,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    FEW: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows of a softmax taken in parts: ROWS from `first` on, from `first + step` on and so on.

    See `few_parts` and `many_parts`, by FEW.
    """
    for start in range(first, rows, step):
        row = start + tl.arange(0, ROWS)
        dim = tl.arange(0, BLOCK_D)
        if FEW:
            row_max, row_sum, acc = few_parts(
                partial_ptr, stats_ptr, parts, row, rows, D, BLOCK_D, BLOCK_M, PARTS
            )
        else:
            row_max, row_sum, acc = many_parts(
                partial_ptr, stats_ptr, parts, row, rows, D, BLOCK_D, BLOCK_M, PARTS
            )
        live = row < rows
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + row % GROUP, mask=live, other=0.0).to(tl.float32) * LOG2E
            row_sum, keep = with_sink(row_max, row_sum, sink)
            acc *= keep[:, None]
        acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
        out_at = out_ptr + (row // GROUP * token_stride + row % GROUP * D)[:, None] + dim[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dim < D)[None, :])
