"""Keys and values of the cache that join a softmax, tile by tile."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import triton
import triton.language as tl

from specdec_kernels.key_tiles_triton import cached_tile
from specdec_kernels.softmax_triton import attend


@triton.jit
def join_tiles(
    state,  # maxima [M], weights [M, N], weighted values [M, D]
    query,
    cache,
    begin,
    low,
    high,
    query_position,
    scale,
    softcap,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Keys from the cache, from `begin` on, join the softmax.

    Weights are summed over threads at the end only, which takes shuffles and barriers.
    """
    row_max, sums, acc = state
    for start in range(begin, high, BLOCK_N):
        tile = cached_tile(
            cache, start, low, high, query_position, D, BLOCK_D, BLOCK_SIZE, BLOCK_N, WINDOW
        )
        row_max, keep, weights, acc = attend(
            row_max, acc, query, tile, scale, softcap, HAS_SOFTCAP, PRECISION, UPCAST
        )
        sums = sums * keep[:, None] + weights
    return row_max, sums, acc
