"""A softmax over keys that come tile by tile.

Online softmax: Milakov and Gimelshein, arXiv 1805.02867. Maxima are in units of log2.
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
    query,  # halves [M, D / 2]
    key,  # halves [N, D / 2]
    value,  # [N, D]
    visible,  # [M, N]
    scale,  # positive
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One tile of keys joins the softmax.

    Returns the new maxima, the factor [M] of what was summed before, the tile's weights [M, N],
    which are still to be summed, and the new `acc`.
    """
    query_first, query_second = query
    key_first, key_second = key
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
