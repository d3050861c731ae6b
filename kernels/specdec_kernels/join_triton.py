"""Keys and values that join a softmax: new ones, from the projection, and tiles of the cache."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import triton
import triton.language as tl

from specdec_kernels.cached_tile_triton import cached_tile
from specdec_kernels.rope_heads_triton import rotated, store_heads
from specdec_kernels.softmax_triton import attend


@triton.jit
def join_new(
    row_max,
    row_sum,
    acc,
    query,  # halves [M, D / 2], turned
    new,  # keys, as halves [N, D / 2], and values [N, D]
    places,  # cosines and sines [N, D / 2] and slots [N]
    key_norm_ptr,
    key_cache,  # of one key head: pointer, and strides of blocks and of slots in them
    value_cache,
    token,
    fresh,
    query_len,
    early,
    scale,
    softcap,
    eps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_KEY_NORM: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """New keys are turned and stored with their values, and join the softmax."""
    dim = tl.arange(0, BLOCK_D)
    half = tl.arange(0, BLOCK_D // 2)
    first, second, value = new
    cos, sin, slot = places
    first, second = rotated(first, second, cos, sin, key_norm_ptr, half, eps, D, HAS_KEY_NORM)
    store_heads(
        key_cache,
        value_cache,
        first,
        second,
        value,
        slot,
        fresh < query_len,
        half,
        dim,
        D,
        BLOCK_SIZE,
    )
    seen = (fresh[None, :] <= token[:, None]) & (fresh[None, :] >= early)
    if WINDOW > 0:
        seen = seen & (fresh[None, :] > token[:, None] - WINDOW)
    row_max, keep, weights, acc = attend(
        row_max,
        acc,
        query,
        (first, second),
        value,
        seen,
        scale,
        softcap,
        HAS_SOFTCAP,
        PRECISION,
        UPCAST,
    )
    return row_max, row_sum * keep + tl.sum(weights, axis=1), acc


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
