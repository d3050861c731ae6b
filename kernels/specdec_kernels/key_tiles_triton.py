"""Tiles of keys and values, from the paged cache and of new tokens, and who sees them.

A tile is keys as halves [D / 2, N], values [N, D], and which of them queries see, [M, N].
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import triton
import triton.language as tl


@triton.jit
def first_seen(old, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """The first of `old` older keys that some query sees, and where the first tile begins.

    Tiles of whole blocks begin with one.
    """
    low = 0
    if WINDOW > 0:
        low = tl.maximum(old - WINDOW + 1, 0)
    begin = low
    if BLOCK_N % BLOCK_SIZE == 0:
        begin = low // BLOCK_SIZE * BLOCK_SIZE
    return low, begin


@triton.jit
def cached_tile(
    cache,  # of a key head: keys', values' pointer and strides of blocks and slots; block table
    start,
    low,
    high,
    query_position,  # [M]; only with WINDOW
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Keys and values from position `start` on.

    Without a window who sees them is [1, N]: all queries see the positions in [low, high).
    """
    key_cache, value_cache, table = cache
    key_ptr, key_stride_b, key_stride_s = key_cache
    value_ptr, value_stride_b, value_stride_s = value_cache
    half = tl.arange(0, BLOCK_D // 2)
    dim = tl.arange(0, BLOCK_D)
    step = tl.arange(0, BLOCK_N)
    position = start + step
    stored = position < high
    if WINDOW > 0:
        stored = stored & (position >= low)
    if BLOCK_N % BLOCK_SIZE == 0:  # `start` begins a block then, and places within blocks are known
        column = start // BLOCK_SIZE + step // BLOCK_SIZE
        inside = step % BLOCK_SIZE
    else:
        column = position // BLOCK_SIZE
        inside = position % BLOCK_SIZE
    block = tl.load(table + column, mask=stored, other=0).to(tl.int64)
    # Loaded as the columns that a product takes. Rows turned afterwards would pass shared memory in
    # eight pieces, with barriers between them, before the program can wait for its predecessor.
    key_at = key_ptr + (inside * key_stride_s)[None, :] + half[:, None]
    key_at += (block * key_stride_b)[None, :]
    # Keys behind the last are loaded from where nothing faults, and not looked at.
    key_mask = (half < D // 2)[:, None]
    key_first = tl.load(key_at, mask=key_mask, other=0.0)
    key_second = tl.load(key_at + D // 2, mask=key_mask, other=0.0)
    value_at = value_ptr + (inside * value_stride_s)[:, None] + dim[None, :]
    value_at += (block * value_stride_b)[:, None]
    value = tl.load(value_at, mask=stored[:, None] & (dim < D)[None, :], other=0.0)
    visible = stored[None, :]
    if WINDOW > 0:
        visible = visible & (position[None, :] > query_position[:, None] - WINDOW)
    return (key_first, key_second), value, visible


@triton.jit
def new_tile(key, value, fresh, fresh_live, token, early, WINDOW: tl.constexpr):
    """New keys, as rows of halves [N, D / 2], and values, and who sees them.

    A query of `token` [M] sees those up to itself, in its window, without the first `early`.
    """
    seen = fresh_live[None, :] & (fresh[None, :] <= token[:, None]) & (fresh[None, :] >= early)
    if WINDOW > 0:
        seen = seen & (fresh[None, :] > token[:, None] - WINDOW)
    key_first, key_second = key
    return (tl.trans(key_first), tl.trans(key_second)), value, seen
