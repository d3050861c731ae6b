"""Rotary embedding, KV write and paged attention of a layer in one kernel, for few queries.

A program holds all rows (query token x query head of one key head) of a sequence and one part of
its context (Flash-Decoding). The sequence's new keys and values come from the projection itself
and are stored on the way; the older ones come from the cache and never depend on the kernel before,
so the first of them are loaded while that one still runs. When all programs of a key head are done,
each combines the parts of some rows. How many parts there can be is decided from shapes, how many
there are from the lengths on the device: a short context takes few, whatever the block table's
width, since with few parts combining them takes less time.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import triton
import triton.language as tl

from specdec_kernels.cached_tile_triton import cached_tile
from specdec_kernels.join_triton import join_tiles
from specdec_kernels.launch_triton import (
    after_predecessor,
    arrive,
    epoch_of,
    finish,
    wait_for,
)
from specdec_kernels.rope_heads_triton import load_heads, load_places, rotated, store_heads
from specdec_kernels.softmax_parts_triton import combine_rows, packed_stats, part_of
from specdec_kernels.softmax_triton import LOG2E, attend, attend_both, finite, with_sink


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "alone", "min_keys", "table_stride"])
def rope_attention_kernel(
    qkv_ptr,  # [T, (H + 2 Hkv) D]
    cos_ptr,  # [T, D], of which the halves are equal
    sin_ptr,  # [T, D], likewise
    query_norm_ptr,  # [D]; only with HAS_QUERY_NORM
    key_norm_ptr,  # [D]; only with HAS_KEY_NORM
    key_cache_ptr,  # [NB, BLOCK_SIZE, Hkv, D], in and out
    value_cache_ptr,  # [NB, BLOCK_SIZE, Hkv, D], in and out
    slots_ptr,  # [T] int64
    block_tables_ptr,  # [B, MB] int32
    query_start_ptr,  # [B + 1] int32
    context_lens_ptr,  # [B] int32
    sinks_ptr,  # [H]; only with HAS_SINKS
    out_ptr,  # [T, H, D], out
    partial_ptr,  # [B, Hkv, SPLITS, BLOCK_M, BLOCK_D] fp32, out; only with SPLITS > 1
    stats_ptr,  # [B, Hkv, SPLITS, BLOCK_M] int64, `packed_stats`, out; only with SPLITS > 1
    epochs_ptr,  # [>= B Hkv, 2] int32, in and out: `arrive` and `wait_for`; only with SPLITS > 1
    scale,
    softcap,
    eps,
    num_tokens,
    num_sequences,
    alone,
    min_keys,
    qkv_stride,
    rope_stride,
    key_stride_b,
    key_stride_s,
    key_stride_h,
    value_stride_b,
    value_stride_s,
    value_stride_h,
    table_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_QUERY_NORM: tl.constexpr,
    HAS_KEY_NORM: tl.constexpr,
    SPLITS: tl.constexpr,
    FEW_PARTS: tl.constexpr,  # at most SPLITS
    FEW_ROWS: tl.constexpr,  # combined at a time, of at most FEW_PARTS parts
    MANY_ROWS: tl.constexpr,  # of more
    WAITS: tl.constexpr,  # or the last program combines all: the interpreter runs one at a time
    BLOCK_M: tl.constexpr,
    BLOCK_NEW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    HALF: tl.constexpr = D // 2
    UNIT: tl.constexpr = BLOCK_SIZE if BLOCK_N % BLOCK_SIZE == 0 else 16  # of a part's length
    HEADS: tl.constexpr = KV_HEADS * GROUP
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    # A Python float reaches a kernel inside torch.compile as fp64.
    scale = tl.full([], scale, tl.float32)
    softcap = tl.full([], softcap, tl.float32)
    eps = tl.full([], eps, tl.float32)

    query_begin = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - query_begin
    end_of_all = tl.load(query_start_ptr + num_sequences)
    context = tl.load(context_lens_ptr + sequence)

    # Older keys that some query sees: [low, old). This program has [first, high).
    old = tl.maximum(context - query_len, 0)
    early = tl.maximum(query_len - context, 0)  # padding before the first token; nobody sees it
    low = 0
    if WINDOW > 0:
        low = tl.maximum(old - WINDOW + 1, 0)
    begin = low
    if BLOCK_N % BLOCK_SIZE == 0:
        begin = low // BLOCK_SIZE * BLOCK_SIZE
    keys = old - begin
    if SPLITS > 1:
        parts, first, high = part_of(keys, split, alone, min_keys, SPLITS, UNIT, BLOCK_N)
        first += begin
        high += begin
        # Without work there is nothing to wait for, and room to make: part 0 waits, so the kernel
        # ends after its predecessor all the same.
        if (split > 0) & ((split >= parts) | (query_len <= 0)):
            return
    else:
        parts = 1
        first = begin
        high = old

    dim = tl.arange(0, BLOCK_D)
    half = tl.arange(0, BLOCK_HALF)
    half_live = half < HALF
    key_cache = (key_cache_ptr + kv_head * key_stride_h, key_stride_b, key_stride_s)
    value_cache = (value_cache_ptr + kv_head * value_stride_h, value_stride_b, value_stride_s)
    table = block_tables_ptr + sequence.to(tl.int64) * table_stride
    row = tl.arange(0, BLOCK_M)
    token = row // GROUP
    query_position = old + token
    visible, key, value = cached_tile(
        key_cache,
        value_cache,
        table,
        first,
        low,
        high,
        query_position,
        D,
        BLOCK_D,
        BLOCK_SIZE,
        BLOCK_N,
        WINDOW,
    )

    head = kv_head * GROUP + row % GROUP
    row_live = token < query_len
    packed = (query_begin + token).to(tl.int64)
    row_mask = row_live[:, None] & half_live[None, :]
    query_rope = packed[:, None] * rope_stride + half[None, :]
    query_cos = tl.load(cos_ptr + query_rope, mask=row_mask, other=0.0)
    query_sin = tl.load(sin_ptr + query_rope, mask=row_mask, other=0.0)

    fresh = tl.arange(0, BLOCK_NEW)
    num_fresh = query_len  # of this part
    if SPLITS > 1:
        num_fresh = tl.where(split == 0, query_len, 0)
    fresh_live = fresh < num_fresh
    fresh_token = (query_begin + fresh).to(tl.int64)
    new_key_ptr = qkv_ptr + (HEADS + kv_head) * D
    new_value_ptr = new_key_ptr + KV_HEADS * D
    new_cos, new_sin, slot = load_places(
        cos_ptr, sin_ptr, slots_ptr, fresh_token, fresh_live, half, rope_stride, D
    )
    after_predecessor(DEPENDENT)

    if split == 0:
        if sequence == 0:
            # Padding behind the last sequence is no program's token; its output is zero.
            zeros = tl.zeros([BLOCK_D], out_ptr.dtype.element_ty)
            for tail in range(end_of_all, num_tokens):
                for member in tl.static_range(GROUP):
                    place = (tl.full([], HEADS, tl.int64) * tail + kv_head * GROUP + member) * D
                    tl.store(out_ptr + place + dim, zeros, mask=dim < D)
    if query_len <= 0:
        return

    if SPLITS > 1:
        own = (sequence * KV_HEADS + kv_head).to(tl.int64)
        epochs_ptr += 2 * own
        epoch = epoch_of(epochs_ptr, parts)
    query_at = qkv_ptr + (packed * qkv_stride + head * D)[:, None] + half[None, :]
    query_first = tl.load(query_at, mask=row_mask, other=0.0)
    query_second = tl.load(query_at + HALF, mask=row_mask, other=0.0)
    new_first = tl.zeros([BLOCK_NEW, BLOCK_HALF], qkv_ptr.dtype.element_ty)
    new_second = new_first
    new_value = tl.zeros([BLOCK_NEW, BLOCK_D], qkv_ptr.dtype.element_ty)
    if num_fresh > 0:
        new_first, new_second, new_value = load_heads(
            new_key_ptr, new_value_ptr, fresh_token, fresh_live, half, dim, qkv_stride, D
        )
    query_first, query_second = rotated(
        query_first,
        query_second,
        query_cos,
        query_sin,
        query_norm_ptr,
        half,
        eps,
        D,
        HAS_QUERY_NORM,
    )
    query = (query_first, query_second)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Without parts that is always so, yet a branch: else queries and new keys would be turned in a
    # product's layout, in which every warp has all of them.
    if num_fresh > 0:
        new_first, new_second = rotated(
            new_first, new_second, new_cos, new_sin, key_norm_ptr, half, eps, D, HAS_KEY_NORM
        )
        store_heads(
            key_cache,
            value_cache,
            new_first,
            new_second,
            new_value,
            slot,
            fresh_live,
            half,
            dim,
            D,
            BLOCK_SIZE,
        )
        seen = fresh_live[None, :] & (fresh[None, :] <= token[:, None]) & (fresh[None, :] >= early)
        if WINDOW > 0:
            seen = seen & (fresh[None, :] > token[:, None] - WINDOW)
        new = (tl.trans(new_first), tl.trans(new_second))
        if first < high:
            row_max, sums, fresh_weights, acc = attend_both(
                query,
                key,
                value,
                visible,
                new,
                new_value,
                seen,
                scale,
                softcap,
                HAS_SOFTCAP,
                PRECISION,
                UPCAST,
            )
        else:
            row_max, _, fresh_weights, acc = attend(
                row_max,
                acc,
                query,
                new,
                new_value,
                seen,
                scale,
                softcap,
                HAS_SOFTCAP,
                PRECISION,
                UPCAST,
            )
        row_sum = tl.sum(fresh_weights, axis=1)
    elif SPLITS > 1:
        row_max, _, sums, acc = attend(
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
    # A pipelined loop of no turns takes half a microsecond.
    if (SPLITS == 1) | (first + BLOCK_N < high):
        before = row_max
        row_max, sums, acc = join_tiles(
            row_max,
            sums,
            acc,
            query,
            key_cache,
            value_cache,
            table,
            first + BLOCK_N,
            low,
            high,
            query_position,
            scale,
            softcap,
            D,
            BLOCK_D,
            BLOCK_SIZE,
            BLOCK_N,
            WINDOW,
            HAS_SOFTCAP,
            PRECISION,
            UPCAST,
        )
        row_sum *= tl.exp2(before - finite(row_max))
    row_sum += tl.sum(sums, axis=1)

    out_mask = row_live[:, None] & (dim < D)[None, :]
    if SPLITS > 1:
        if parts > 1:
            stats_ptr += own * (SPLITS * BLOCK_M)
            partial_ptr += own * (SPLITS * BLOCK_M * BLOCK_D)
            tl.store(stats_ptr + split * BLOCK_M + row, packed_stats(row_max, row_sum))
            inside = row[:, None] * BLOCK_D + dim[None, :]
            tl.store(
                partial_ptr + split * (BLOCK_M * BLOCK_D) + inside, acc, mask=row_live[:, None]
            )
            rows = query_len * GROUP
            last = arrive(epochs_ptr, epoch, not WAITS)
            out_ptr += (query_begin.to(tl.int64) * HEADS + kv_head * GROUP) * D
            few = parts <= FEW_PARTS
            at_a_time = tl.where(few, FEW_ROWS, MANY_ROWS)
            mine = 0
            step = at_a_time
            if WAITS:
                mine = split * at_a_time
                step = parts * at_a_time
                if mine >= rows:
                    return
                wait_for(epochs_ptr, epoch)
            elif not last:
                return
            memory = (partial_ptr, stats_ptr, sinks_ptr + kv_head * GROUP, out_ptr)
            span = (mine, rows, step, parts)
            if few:
                combine_rows(
                    memory,
                    span,
                    HEADS,
                    GROUP,
                    D,
                    BLOCK_D,
                    BLOCK_M,
                    HAS_SINKS,
                    True,
                    FEW_PARTS,
                    FEW_ROWS,
                )
            elif SPLITS > FEW_PARTS:
                combine_rows(
                    memory,
                    span,
                    HEADS,
                    GROUP,
                    D,
                    BLOCK_D,
                    BLOCK_M,
                    HAS_SINKS,
                    False,
                    SPLITS,
                    MANY_ROWS,
                )
            if mine == 0:
                finish(epochs_ptr, epoch)
            return
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + head, mask=row_live, other=0.0).to(tl.float32) * LOG2E
        row_sum, keep = with_sink(row_max, row_sum, sink)
        acc *= keep[:, None]
    acc = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    out_at = (packed * HEADS + head)[:, None] * D + dim[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=out_mask)
