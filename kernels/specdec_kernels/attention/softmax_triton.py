"""Tiles of keys and values, and an online softmax over them.

Online softmax: Milakov and Gimelshein, arXiv 1805.02867. Weights are computed with exp2
instead of exp. Therefore, the maxima are those of the scaled scores, multiplied by log2(e).

A tile is a tuple of keys, as two halves [D / 2, N], values [N, D], and a mask [M, N] that is True
where a query sees a key. Keys and values have the cache's dtype: that of the queries, or fp8.

`scaling` is the tuple (scale, softcap). The scale is the positive factor by which the scores are
multiplied.
"""

import triton
import triton.language as tl

from specdec_kernels.launch_triton import INTERPRETED

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def attend(
    row_max,  # [M], maxima of the scaled scores so far, times log2(e)
    acc,  # [M, D], weighted values so far
    query,  # two halves [M, D / 2]
    tile,
    scaling,
    FORM: tl.constexpr,
):
    """Add one tile of keys and values to the online softmax.

    Returns four values:
    - The new maxima [M].
    - The factors [M] by which the caller must multiply its earlier sums of weights.
    - The tile's weights [M, N], which the caller must add to these sums.
    - The new `acc`.
    """
    key, value, visible = tile
    value = value.to(query[0].dtype)
    scores, unit = scored(query, key, visible, scaling, FORM)
    new_max, keep, weights = weighed(row_max, scores, unit)
    acc = weighted(weights, value, acc * keep[:, None])
    return new_max, keep, weights, acc


@triton.jit
def weighed(row_max, scores, unit):
    """Compute one step of an online softmax over scores [M, N].

    unit: as returned by `scored`.

    Returns the new maxima [M], the factors [M] by which earlier sums must be multiplied, and the
    weights [M, N] of this step.
    """
    new_max = tl.maximum(row_max, tl.max(scores, axis=1) * unit)
    base = finite(new_max)
    weights = tl.exp2(scores * unit - base[:, None])
    keep = tl.exp2(row_max - base)
    return new_max, keep, weights


@triton.jit
def attend_both(query, tile, fresh_tile, scaling, FORM: tl.constexpr):
    """Start a softmax with two tiles at once, so that their steps do not wait for each other.

    Returns maxima [M], the weights [M, N] of `tile`, the weights [M, F] of the F keys of
    `fresh_tile`, and the weighted values [M, D]. The caller must still sum the weights.
    """
    key, value, visible = tile
    fresh_key, fresh_value, seen = fresh_tile
    value = value.to(query[0].dtype)
    fresh_value = fresh_value.to(query[0].dtype)
    scores, unit = scored(query, key, visible, scaling, FORM)
    fresh, _ = scored(query, fresh_key, seen, scaling, FORM)
    row_max = tl.maximum(tl.max(scores, axis=1), tl.max(fresh, axis=1)) * unit
    base = finite(row_max)[:, None]
    weights = tl.exp2(scores * unit - base)
    fresh_weights = tl.exp2(fresh * unit - base)
    acc = tl.zeros([scores.shape[0], value.shape[1]], tl.float32)
    acc = weighted(weights, value, acc)
    acc = weighted(fresh_weights, fresh_value, acc)
    return row_max, weights, fresh_weights, acc


@triton.jit
def scored(query, key, visible, scaling, FORM: tl.constexpr):
    """Compute scores [M, N], with -inf where a query does not see the key. Also return `unit`, the
    factor that turns scores into exponents for exp2."""
    query_first, query_second = query
    key_first, key_second = key
    if INTERPRETED:
        query_first = query_first.to(tl.float32)
        query_second = query_second.to(tl.float32)
    key_first = key_first.to(query_first.dtype)
    key_second = key_second.to(query_first.dtype)
    scores = tl.dot(query_first, key_first, input_precision="ieee")
    scores = tl.dot(query_second, key_second, scores, input_precision="ieee")
    scores, unit = capped(scores, scaling, FORM)
    return tl.where(visible, scores, float("-inf")), unit


@triton.jit
def capped(scores, scaling, FORM: tl.constexpr):
    """Apply the softcap, if the layer has one. Returns the scores and the factor by which to
    multiply them before exp2."""
    scale, softcap = scaling
    if FORM.has_softcap:
        # tanh(x) = 2 sigmoid(2x) - 1, which neither overflows nor needs libdevice.
        scores = softcap * (2 * tl.sigmoid(2 * scale * scores / softcap) - 1)
        scale = 1.0
    return scores, scale * LOG2E


@triton.jit
def weighted(weights, value, acc):
    """Return acc + weights @ value."""
    if INTERPRETED:
        value = value.to(tl.float32)
    return tl.dot(weights.to(value.dtype), value, acc, input_precision="ieee")


@triton.jit
def finite(row_max):
    """Replace maxima of -inf by 0. A row that sees no key has such a maximum, and subtracting it
    from scores of -inf would give NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def weighted_mean(row_max, row_sum, acc, sinks_ptr, head, live):
    """Finish a softmax: return the weighted mean of the values, [M, D], or zeros for a row that
    sees no key.

    sinks_ptr: the sinks of all heads, or None. A sink adds to the sum of weights but has no value.
    head: [M], the query head of every row. live: [M], False for rows that are padding.
    """
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * LOG2E
        top = tl.maximum(row_max, sink)
        keep = tl.exp2(row_max - top)
        row_sum = row_sum * keep + tl.exp2(sink - top)
        acc *= keep[:, None]
    return acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]


@triton.jit
def first_seen(old, FORM: tl.constexpr, CUT: tl.constexpr):
    """Return the position of the first older key that any query sees, and the first tile's start.

    old: the number of older keys.

    The first tile starts at that key or, if tiles consist of whole blocks, at the beginning of its
    block.
    """
    low = 0
    if FORM.window > 0:
        low = tl.maximum(old - FORM.window + 1, 0)
    begin = low
    if CUT.block_n % FORM.block_size == 0:
        begin = low // FORM.block_size * FORM.block_size
    return low, begin


@triton.jit
def cached_tile(
    cache,  # pointers to one key head's keys and values, and to the sequence's block table
    start,
    seen,  # (low, high, query positions [M]); no query sees a key outside [low, high)
    FORM: tl.constexpr,
    CUT: tl.constexpr,
):
    """Load the tile of cached keys and values that begins at position `start`.

    Without a window, the tile's mask is [1, N] instead of [M, N], since all queries see the same
    older keys.
    """
    ROW: tl.constexpr = FORM.kv_heads * FORM.dim
    key_ptr, value_ptr, table = cache
    low, high, query_position = seen
    half = tl.arange(0, CUT.block_d // 2)
    dim = tl.arange(0, CUT.block_d)
    step = tl.arange(0, CUT.block_n)
    position = start + step
    stored = position < high
    if FORM.window > 0:
        stored = stored & (position >= low)
    if (
        CUT.block_n % FORM.block_size == 0
    ):  # `start` is a block boundary, so offsets within blocks are constants
        column = start // FORM.block_size + step // FORM.block_size
        inside = step % FORM.block_size
    else:
        column = position // FORM.block_size
        inside = position % FORM.block_size
    block = tl.load(table + column, mask=stored, other=0).to(tl.int64)
    # Load keys as columns, as the matmul needs them. If loaded rows were transposed, they would
    # pass through shared memory in eight pieces, with barriers in between, and the compiler would
    # do this even before `after_predecessor`.
    key_at = key_ptr + (inside * ROW)[None, :] + half[:, None]
    key_at += (block * (FORM.block_size * ROW))[None, :]
    # Loads past the last key read a valid address (block 0), and their values are ignored.
    key_mask = (half < FORM.dim // 2)[:, None]
    key_first = tl.load(key_at, mask=key_mask, other=0.0)
    key_second = tl.load(key_at + FORM.dim // 2, mask=key_mask, other=0.0)
    value_at = value_ptr + (inside * ROW)[:, None] + dim[None, :]
    value_at += (block * (FORM.block_size * ROW))[:, None]
    value = tl.load(value_at, mask=stored[:, None] & (dim < FORM.dim)[None, :], other=0.0)
    visible = stored[None, :]
    if FORM.window > 0:
        visible = visible & (position[None, :] > query_position[:, None] - FORM.window)
    return (key_first, key_second), value, visible


@triton.jit
def new_tile(key, value, fresh, fresh_live, token, early, FORM: tl.constexpr):
    """Make a tile from the new tokens' keys, two halves [N, D / 2], and values [N, D].

    fresh: [N], the index of each new token in its sequence's queries. fresh_live: [N], False for
    tokens that no query sees. token: [M], the index of each row's query token. No query sees the
    first `early` tokens, which are padding. The window and causality hide further keys.
    """
    seen = fresh_live[None, :]
    if FORM.causal:
        seen = seen & (fresh[None, :] <= token[:, None])
    seen = seen & (fresh[None, :] >= early)
    if FORM.window > 0:
        seen = seen & (fresh[None, :] > token[:, None] - FORM.window)
        if not FORM.causal:
            seen = seen & (fresh[None, :] < token[:, None] + FORM.window)
    key_first, key_second = key
    return (tl.trans(key_first), tl.trans(key_second)), value, seen


@triton.jit
def join_tiles(
    state,  # maxima [M], weights [M, N] to be summed over N, and weighted values [M, D]
    query,
    cache,
    begin,
    seen,  # as in `cached_tile`
    scaling,
    FORM: tl.constexpr,
    CUT: tl.constexpr,
):
    """Add all cached keys and values from position `begin` on to the online softmax.

    The loop adds up the weights of all tiles elementwise. The caller then sums the result over its
    N columns: a sum over columns needs shuffles and barriers, which would slow down the loop.
    """
    row_max, sums, acc = state
    for start in range(begin, seen[1], CUT.block_n):
        tile = cached_tile(cache, start, seen, FORM, CUT)
        row_max, keep, weights, acc = attend(row_max, acc, query, tile, scaling, FORM)
        sums = sums * keep[:, None] + weights
    return row_max, sums, acc
