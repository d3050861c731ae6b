"""Ragged paged attention: one Triton kernel for prefill, decoding and scoring, and a combine step.

A row is a pair of a query token and a query head. A program processes one tile of rows for one key
head. It reads the context tile by tile through the block table, and computes an online softmax
(Milakov and Gimelshein, arXiv 1805.02867; FlashAttention-2, 2307.08691). With few queries there are
too few programs to fill a GPU, so the context is also split, and the partial results are combined
(Flash-Decoding). The number of splits is chosen from shapes alone, because the lengths are known
only on the device.

A tile has TILE query tokens of one sequence. Since the host does not know the lengths, it launches
enough tiles for any lengths, and those without queries return at once. There are two ways to number
tiles, and the one with fewer tiles is used:

- By sequence: each of the B sequences has as many tiles as `max_query_len` tokens need. Tile i
  belongs to sequence i % B.
- By packed token: the first tile of sequence b has the number query_start[b] // TILE + b. This
  leaves enough numbers for all its tiles before those of sequence b + 1 begin.

The GPU starts programs in the order of their ids. A prompt's last tiles see the most keys, so they
get the lowest ids; otherwise the GPU would wait for a few slow programs at the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.attention.call import AttentionCall, LayerCache, form_of
from specdec_kernels.attention.cpu import FEW_QUERIES
from specdec_kernels.attention.softmax_triton import (
    LOG2E,
    capped,
    finite,
    weighed,
    weighted,
    weighted_mean,
)
from specdec_kernels.attention.tiles import PagedTiles, paged_splits, paged_tiles
from specdec_kernels.gpu import gpu_of
from specdec_kernels.launch_triton import INTERPRETED, launch_options, options_of


@triton.jit
def sequence_of(query_start_ptr, tile, num_sequences, TILE: tl.constexpr):
    """Return the sequence to which a tile belongs if tiles are numbered by packed token."""
    low = tile * 0
    high = low + num_sequences - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(query_start_ptr + middle) // TILE + middle <= tile:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def joined(
    softmax,  # state: row maxima times log2(e) [M], weight sums [M], weighted values [M, BLOCK_DV]
    query,  # [M, BLOCK_DK]
    cache,  # pointers to one key head's keys and values, and to the sequence's block table
    start,  # position of the first key
    limits,  # (end of the keys to process, number of older keys, query positions [M])
    slots_ptr,  # cache slots of the sequence's new tokens, or None
    scaling,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
    MASKED: tl.constexpr,  # False if every query sees every key of the tile
):
    """Add a tile of keys and values to the online softmax, and return its new state."""
    row_max, row_sum, acc = softmax
    high, num_old, query_position = limits
    KEYS: tl.constexpr = FORM.kv_heads * FORM.dim
    VALUES: tl.constexpr = FORM.kv_heads * FORM.value_dim
    key_ptr, value_ptr, table = cache
    dim_k = tl.arange(0, TILES.block_dk)
    dim_v = tl.arange(0, TILES.block_dv)
    position = start + tl.arange(0, TILES.block_n)
    stored = position < high
    if MASKED:
        block = tl.load(table + position // FORM.block_size, mask=stored, other=0).to(tl.int64)
    else:
        block = tl.load(table + position // FORM.block_size).to(tl.int64)
    inside = position % FORM.block_size
    slot = block * FORM.block_size + inside
    key_at = key_ptr + (slot * KEYS)[None, :] + dim_k[:, None]
    value_at = value_ptr + (slot * VALUES)[:, None] + dim_v[None, :]
    if MASKED:
        key = tl.load(key_at, mask=stored[None, :] & (dim_k < FORM.dim)[:, None], other=0.0)
        value = tl.load(
            value_at, mask=stored[:, None] & (dim_v < FORM.value_dim)[None, :], other=0.0
        )
        value = value.to(query.dtype)
        # Padding queries count as context, but their keys and values go to the trash block. Hence
        # the slots at their positions may hold NaN. Earlier queries give these positions a weight
        # of 0, but 0 * NaN is NaN, so replace NaN by 0.
        value = tl.where((position < num_old)[:, None] | (value == value), value, 0.0)
    else:
        if FORM.dim == TILES.block_dk:
            key = tl.load(key_at)
        else:
            key = tl.load(key_at, mask=(dim_k < FORM.dim)[:, None], other=0.0)
        if FORM.value_dim == TILES.block_dv:
            value = tl.load(value_at)
        else:
            value = tl.load(value_at, mask=(dim_v < FORM.value_dim)[None, :], other=0.0)
        value = value.to(query.dtype)

    key = key.to(query.dtype)
    scores, unit = capped(tl.dot(query, key, input_precision="ieee"), scaling, FORM)
    if MASKED:
        visible = stored[None, :]
        if FORM.causal:
            visible = visible & (position[None, :] <= query_position[:, None])
        elif slots_ptr is not None:
            is_new = stored & (position >= num_old)
            slot = tl.load(slots_ptr + position - num_old, mask=is_new, other=FORM.block_size)
            visible = visible & (slot >= FORM.block_size)[None, :]  # slots in block 0 are padding
        if FORM.window > 0:
            visible = visible & (position[None, :] > query_position[:, None] - FORM.window)
            if not FORM.causal:
                visible = visible & (position[None, :] < query_position[:, None] + FORM.window)
        scores = tl.where(visible, scores, float("-inf"))
    new_max, keep, weights = weighed(row_max, scores, unit)
    # Sum before the matmul: after it, the sum would make wide tiles spill more registers.
    row_sum = row_sum * keep + tl.sum(weights, axis=1)
    acc = weighted(weights, value, acc * keep[:, None])
    return new_max, row_sum, acc


# Counts change from pass to pass, so do not specialise on them: each variant would take seconds to
# compile.
@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "table_stride"])
def paged_attention_kernel(
    query_ptr,  # [T, H, DK]
    key_cache_ptr,  # [NB, BLOCK_SIZE, Hkv, DK]
    value_cache_ptr,  # [NB, BLOCK_SIZE, Hkv, DV]
    scales_ptr,  # [2, Hkv] fp32, or None
    block_tables_ptr,  # [B, MB] int32
    query_start_ptr,  # [B + 1] int32
    context_lens_ptr,  # [B] int32
    slots_ptr,  # [T] int64, or None
    sinks_ptr,  # [H], or None
    out_ptr,  # [T, H, DV], out; with SPLITS > 1 [T, H, SPLITS, DV] fp32
    row_max_ptr,  # [T, H, SPLITS] fp32, out; only with SPLITS > 1; times log2(e)
    row_sum_ptr,  # [T, H, SPLITS] fp32, out; only with SPLITS > 1
    scale,
    softcap,
    num_tokens,
    num_sequences,
    num_heads,
    query_stride_t,
    query_stride_h,
    table_stride,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
):
    BLOCK_M: tl.constexpr = TILES.block_m
    BLOCK_N: tl.constexpr = TILES.block_n
    BLOCK_DV: tl.constexpr = TILES.block_dv
    SPLITS: tl.constexpr = TILES.splits
    GROUP: tl.constexpr = FORM.group
    DV: tl.constexpr = FORM.value_dim
    TILE: tl.constexpr = BLOCK_M // GROUP  # query tokens per program
    kv_head = tl.program_id(0).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    if TILES.packed:
        sequence = sequence_of(query_start_ptr, tile, num_sequences, TILE)
        first_tile = tl.load(query_start_ptr + sequence) // TILE + sequence
        tile_start = (tile - first_tile) * TILE
        sequence = sequence.to(tl.int64)
    else:
        sequence = (tile % num_sequences).to(tl.int64)
        tile_start = tile // num_sequences * TILE
    split = tl.program_id(2)
    # Inside torch.compile a Python float reaches a kernel as fp64, so convert it.
    scale = tl.full([], scale, tl.float32)
    if scales_ptr is not None:
        scale *= tl.load(scales_ptr + kv_head)
    scaling = (scale, tl.full([], softcap, tl.float32))

    query_begin = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - query_begin
    context = tl.load(context_lens_ptr + sequence)
    row = tl.arange(0, BLOCK_M)
    if SPLITS == 1:
        # Tokens past the last sequence belong to no tile, but their output must be zero. The
        # programs of a key head divide these tokens among themselves, TILE tokens at a time.
        padding = tl.load(query_start_ptr + num_sequences) + tl.program_id(1) * TILE
        for begin in range(padding, num_tokens, tl.num_programs(1) * TILE):
            past = (begin + row // GROUP).to(tl.int64)
            unused = (row < TILE * GROUP) & (past < num_tokens)
            out_at = out_ptr + (past * num_heads + kv_head * GROUP + row % GROUP)[:, None] * DV
            dim = tl.arange(0, BLOCK_DV)
            tl.store(
                out_at + dim[None, :],
                tl.zeros([BLOCK_M, BLOCK_DV], out_ptr.dtype.element_ty),
                mask=unused[:, None] & (dim < DV)[None, :],
            )
    if tile_start >= query_len:
        return

    token = tile_start + row // GROUP
    head = kv_head * GROUP + row % GROUP
    row_live = (row < TILE * GROUP) & (token < query_len)
    query_position = context - query_len + token
    packed = (query_begin + token).to(tl.int64)
    dim_k = tl.arange(0, TILES.block_dk)
    dim_v = tl.arange(0, BLOCK_DV)
    query = tl.load(
        query_ptr + (packed * query_stride_t + head * query_stride_h)[:, None] + dim_k[None, :],
        mask=row_live[:, None] & (dim_k < FORM.dim)[None, :],
        other=0.0,
    )
    if INTERPRETED:
        query = query.to(tl.float32)

    # No query of the tile sees a key outside [low, high). The slots of keys outside this range may
    # be uninitialised.
    first_position = context - query_len + tile_start
    low = 0
    if FORM.window > 0:
        low = tl.maximum(first_position - FORM.window + 1, 0)
    high = context
    certain = context - query_len  # without a window, all queries see all keys before this position
    if FORM.causal:
        high = tl.minimum(context, first_position + TILE)
        certain = first_position + 1
    elif FORM.window > 0:
        high = tl.minimum(context, first_position + TILE + FORM.window - 1)
    if slots_ptr is not None:
        slots_ptr += query_begin
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(tl.maximum(high - low, 0), BLOCK_N), SPLITS) * BLOCK_N
        low += split * share
        high = tl.minimum(high, low + share)

    table = block_tables_ptr + sequence * table_stride
    cache = (key_cache_ptr + kv_head * FORM.dim, value_cache_ptr + kv_head * DV, table)
    limits = (high, context - query_len, query_position)
    softmax = (
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
        tl.zeros([BLOCK_M, BLOCK_DV], tl.float32),
    )
    # Every query of the tile sees the keys [low, whole), so a first loop processes them without a
    # mask. In fp32 a separate loop would not be faster and would take long to compile.
    IN_TWO: tl.constexpr = FORM.window == 0 and query_ptr.dtype.element_ty.primitive_bitwidth == 16
    whole = low
    if IN_TWO:
        whole += tl.maximum(tl.minimum(certain, high) - low, 0) // BLOCK_N * BLOCK_N
    for masked in tl.static_range(0 if IN_TWO else 1, 2):
        begin = whole if masked else low
        for start in range(begin, high if masked else whole, BLOCK_N):
            softmax = joined(
                *(softmax, query, cache, start, limits, slots_ptr, scaling),
                *(FORM, TILES, masked == 1),
            )
    row_max, row_sum, acc = softmax
    if scales_ptr is not None:
        acc *= tl.load(scales_ptr + FORM.kv_heads + kv_head)

    out_row = packed * num_heads + head
    if SPLITS > 1:
        partial = out_row * SPLITS + split
        tl.store(row_max_ptr + partial, row_max, mask=row_live)
        tl.store(row_sum_ptr + partial, row_sum, mask=row_live)
        # Most splits of a short context have no keys. Store no values for these, because the
        # combine step does not read them.
        tl.store(
            out_ptr + (partial * DV)[:, None] + dim_v[None, :],
            acc,
            mask=(row_live & (row_sum > 0))[:, None] & (dim_v < DV)[None, :],
        )
    else:
        acc = weighted_mean(row_max, row_sum, acc, sinks_ptr, head, row_live)
        tl.store(
            out_ptr + (out_row * DV)[:, None] + dim_v[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=row_live[:, None] & (dim_v < DV)[None, :],
        )


@triton.jit(do_not_specialize=["num_sequences"])
def combine_splits_kernel(
    partial_ptr,  # [T, H, SPLITS, DV] fp32
    row_max_ptr,  # [T, H, SPLITS] fp32, times log2(e)
    row_sum_ptr,  # [T, H, SPLITS] fp32
    query_start_ptr,  # [B + 1] int32
    sinks_ptr,  # [H], or None
    out_ptr,  # [T, H, DV], out
    num_sequences,
    num_heads,
    FORM: tl.constexpr,
    TILES: tl.constexpr,
):
    SPLITS: tl.constexpr = TILES.splits
    DV: tl.constexpr = FORM.value_dim
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = token * num_heads + head
    # Tokens past the last sequence belong to no tile; their output is zero.
    live = tl.where(token < tl.load(query_start_ptr + num_sequences), SPLITS, 0)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, TILES.block_dv)
    split_max = tl.load(row_max_ptr + row * SPLITS + split, mask=split < live, other=float("-inf"))
    split_sum = tl.load(row_sum_ptr + row * SPLITS + split, mask=split < live, other=0.0)
    top = tl.max(split_max, axis=0)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    top = finite(top)
    factor = tl.exp2(split_max - top)
    total = tl.sum(split_sum * factor, axis=0)
    if sinks_ptr is not None:
        total += tl.exp2(sink - top)
    partial = tl.load(
        partial_ptr + (row * SPLITS + split)[:, None] * DV + dim[None, :],
        mask=(split_sum > 0)[:, None] & (dim < DV)[None, :],
        other=0.0,
    )
    out = tl.sum(partial * factor[:, None], axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(
        out_ptr + row * DV + dim,
        out.to(out_ptr.dtype.element_ty),
        mask=dim < DV,
    )


def paged_attention_triton(
    query: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    call: AttentionCall,
    slots: Tensor | None = None,
    splits: int | None = None,
    tiles: tuple[int, int] | None = None,
) -> Tensor:
    """See `ops.paged_attention`.

    splits: a power of two that overrides `paged_splits`, or None.
    tiles: block_m and block_n, which override `paged_tiles`, or None.
    """
    num_tokens, num_heads, dk = query.shape
    _, block_size, kv_heads, dv = cache.values.shape
    num_sequences, num_columns = block_tables.shape
    sinks = call.sinks
    assert cache.is_sound and cache.keys.shape[3] == dk and num_heads % kv_heads == 0
    assert query_start.shape == (num_sequences + 1,) and context_lens.shape == (num_sequences,)
    assert slots is None or slots.shape == (num_tokens,)
    assert sinks is None or sinks.shape == (num_heads,)
    assert query.stride(-1) == block_tables.stride(-1) == 1

    group = num_heads // kv_heads
    block_dk = max(16, triton.next_power_of_2(dk))
    block_dv = max(16, triton.next_power_of_2(dv))
    head_bytes = max(block_dk, block_dv) * query.element_size()
    room = gpu_of(query.device).shared_memory
    block_m, block_n = tiles or paged_tiles(max_query_len, group, head_bytes, room)
    tile = block_m // group
    by_sequence = num_sequences * triton.cdiv(max_query_len, tile)
    by_token = num_tokens // tile + num_sequences
    programs = by_sequence * kv_heads
    if splits is None:
        splits = 1
        if max_query_len <= FEW_QUERIES:
            splits = paged_splits(programs, num_columns * block_size, block_n)

    num_warps = 8 if block_m * max(block_dk, block_dv) > 64 * 128 else 4
    packed = by_token < by_sequence
    cut = PagedTiles(block_m, block_n, block_dk, block_dv, splits, packed, num_warps)
    form = form_of(call, num_heads, cache)
    device = query.device
    # `out` need not be zeroed first. The attention kernel writes zeros for tokens past the last
    # sequence; if there are splits, the combine step does.
    out = torch.empty((num_tokens, num_heads, dv), dtype=query.dtype, device=device)
    if splits > 1:
        partial = torch.empty((num_tokens, num_heads, splits, dv), device=device)
        row_stats = torch.empty((2, num_tokens, num_heads, splits), device=device)
    else:
        partial, row_stats = out, out.new_empty((2, 0))
    paged_attention_kernel[(kv_heads, min(by_sequence, by_token), splits)](
        *(query, *cache, block_tables, query_start, context_lens),
        *(None if call.causal else slots, sinks),
        *(partial, row_stats[0], row_stats[1]),
        float(call.scale),
        float(call.softcap),
        num_tokens,
        num_sequences,
        num_heads,
        *query.stride()[:2],
        block_tables.stride(0),
        FORM=form,
        TILES=cut,
        **options_of(cut),
        **launch_options(),
    )
    if splits > 1:
        combine_splits_kernel[(num_tokens, num_heads)](
            *(partial, row_stats[0], row_stats[1], query_start, sinks, out),
            *(num_sequences, num_heads),
            FORM=form,
            TILES=cut,
            **launch_options(),
        )
    return out
