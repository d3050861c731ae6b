"""Keys and values of the cache that join a softmax, tile by tile."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import triton
import triton.language as tl

from specdec_kernels.cached_tile_triton import cached_tile
from specdec_kernels.softmax_triton import attend


@triton.jit
def join_tiles(
    row_max,
    sums,  # [M, N]: summed over threads at the end only, which takes shuffles and barriers
    acc,
    query,
    key_cache,
    value_cache,
    table,
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
    """Keys from the cache, from `begin` on, join the softmax."""
    for start in range(begin, high, BLOCK_N):
        visible, key, value = cached_tile(
            key_cache,
            value_cache,
            table,
            start,
            low,
            high,
            query_position,
            D,
            BLOCK_D,
            BLOCK_SIZE,
            BLOCK_N,
            WINDOW,
        )
        row_max, keep, weights, acc = attend(
            row_max,
            acc,
            query,
            key,
            value,
            visible,
            scale,
            softcap,
            HAS_SOFTCAP,
            PRECISION,
            UPCAST,
        )
        sums = sums * keep[:, None] + weights
    return row_max, sums, acc
