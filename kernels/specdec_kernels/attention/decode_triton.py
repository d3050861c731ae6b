"""Rotary embedding, KV write and paged attention of a layer in one kernel, for few queries.

A row is a pair of a query token and a query head. A program processes all rows of a sequence for
one key head, over one part of the context (Flash-Decoding). When the programs for all parts are
done, they divide the rows among themselves, and each combines the partial results of its rows.

The keys and values of new tokens come from the projection, and this kernel stores them in the
cache. Those of older tokens are already in the cache and do not depend on the preceding kernel, so
a program loads its first tile of them while that kernel still runs.

The host derives the maximum number of parts from the shapes. The kernel derives the number that it
uses from the lengths, which it reads on the device. It divides a short context into few parts,
because combining few parts takes less time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.attention.cache_triton import coded
from specdec_kernels.attention.call import AttentionCall, LayerCache, form_of
from specdec_kernels.attention.chunks import ChunkPlan
from specdec_kernels.attention.chunks_triton import attend_chunks, takes_chunks
from specdec_kernels.attention.paged_triton import paged_attention_triton
from specdec_kernels.attention.rope_triton import (
    load_heads,
    load_queries,
    load_turn,
    rope_kv,
    rotated,
    store_heads,
)
from specdec_kernels.attention.softmax_triton import (
    attend,
    attend_both,
    cached_tile,
    finite,
    first_seen,
    join_tiles,
    new_tile,
    weighted_mean,
)
from specdec_kernels.attention.split_triton import combine_rows, part_of, store_part
from specdec_kernels.attention.tiles import ALONE, MIN_KEYS, choose_cut
from specdec_kernels.gpu import gpu_of
from specdec_kernels.launch_triton import (
    EPOCHS,
    INTERPRETED,
    after_predecessor,
    arrive,
    dependence,
    epoch_of,
    epochs,
    finish,
    options_of,
    wait_for,
)


@triton.jit
def zero_padding(
    out_ptr,  # [T, H, D], out
    begin,
    end,
    kv_head,
    dim,
    FORM: tl.constexpr,
):
    """Write zeros as the output of tokens [begin, end), for the query heads of one key head. These
    tokens are padding after the last sequence, so no program computes attention for them."""
    GROUP: tl.constexpr = FORM.group
    zeros = tl.zeros(dim.shape, out_ptr.dtype.element_ty)
    for tail in range(begin, end):
        for member in tl.static_range(GROUP):
            first = tl.full([], FORM.kv_heads * GROUP, tl.int64) * tail
            place = (first + kv_head * GROUP + member) * FORM.dim
            tl.store(out_ptr + place + dim, zeros, mask=dim < FORM.dim)


@triton.jit
def anchored(tile):
    """Keep the compiler from converting an fp8 tile to a matmul operand's layout before this point.
    Otherwise it would convert the tile right after issuing the loads, and barriers there would make
    the program wait for the loads too early.
    """
    key, value, visible = tile
    if not INTERPRETED:
        key = (_moved(key[0]), _moved(key[1]))
        value = _moved(value)
    return key, value, visible


@triton.jit
def _moved(x):
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], x.dtype, False, 4)


@triton.jit(do_not_specialize=["num_tokens", "num_sequences", "alone", "min_keys", "table_stride"])
def rope_attention_kernel(
    qkv_ptr,  # [T, (H + 2 Hkv) D]
    cos_ptr,  # [T, D]; both halves of a row are equal
    sin_ptr,  # [T, D]; both halves of a row are equal
    query_norm_ptr,  # [D], or None
    key_norm_ptr,  # [D], or None
    key_cache_ptr,  # [NB, BLOCK_SIZE, Hkv, D], in and out
    value_cache_ptr,  # [NB, BLOCK_SIZE, Hkv, D], in and out
    scales_ptr,  # [2, Hkv] fp32, or None
    slots_ptr,  # [T] int64
    block_tables_ptr,  # [B, MB] int32
    query_start_ptr,  # [B + 1] int32
    context_lens_ptr,  # [B] int32
    sinks_ptr,  # [H], or None
    out_ptr,  # [T, H, D], out
    partial_ptr,  # [B, Hkv, SPLITS, BLOCK_M, BLOCK_D] fp32, out; only with SPLITS > 1
    stats_ptr,  # [B, Hkv, SPLITS, BLOCK_M] int64, `packed_stats`, out; only with SPLITS > 1
    epochs_ptr,  # [>= B Hkv, 2] int32, counters of `epoch_of`, in and out; only with SPLITS > 1
    scale,
    softcap,
    eps,
    num_tokens,
    num_sequences,
    alone,
    min_keys,
    qkv_stride,
    rope_stride,
    table_stride,
    FORM: tl.constexpr,
    CUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    BLOCK_M: tl.constexpr = CUT.block_m
    BLOCK_N: tl.constexpr = CUT.block_n
    BLOCK_NEW: tl.constexpr = CUT.block_new
    BLOCK_D: tl.constexpr = CUT.block_d
    BLOCK_HALF: tl.constexpr = CUT.block_d // 2
    # The number of keys in every part of the context but the last is a multiple of UNIT.
    UNIT: tl.constexpr = FORM.block_size if BLOCK_N % FORM.block_size == 0 else 16
    HEADS: tl.constexpr = FORM.kv_heads * FORM.group
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    # Inside torch.compile a Python float reaches a kernel as fp64, so convert it.
    scale = tl.full([], scale, tl.float32)
    if scales_ptr is not None:
        key_scale = tl.load(scales_ptr + kv_head)
        value_scale = tl.load(scales_ptr + FORM.kv_heads + kv_head)
        scale *= key_scale
    scaling = (scale, tl.full([], softcap, tl.float32))
    eps = tl.full([], eps, tl.float32)

    query_begin = tl.load(query_start_ptr + sequence)
    query_len = tl.load(query_start_ptr + sequence + 1) - query_begin
    end_of_all = tl.load(query_start_ptr + num_sequences)
    context = tl.load(context_lens_ptr + sequence)

    # No query sees a cached key outside [low, old). This program processes [first, high).
    old = tl.maximum(context - query_len, 0)
    early = tl.maximum(query_len - context, 0)  # padding queries before the first token
    low, begin = first_seen(old, FORM, CUT)
    keys = old - begin
    if CUT.splits > 1:
        parts, first, high = part_of(keys, split, alone, min_keys, UNIT, CUT)
        first += begin
        high += begin
        # A program without work returns at once to make room for others. Part 0 never returns here:
        # it waits for the preceding kernel, so that this kernel cannot end before that one.
        if (split > 0) & ((split >= parts) | (query_len <= 0)):
            return
    else:
        parts = 1
        first = begin
        high = old

    # Until `after_predecessor`, load only data that the preceding kernel does not write: older keys
    # and values, cosines, sines and slots.
    dim = tl.arange(0, BLOCK_D)
    half = tl.arange(0, BLOCK_HALF)
    half_live = half < FORM.dim // 2
    key_ptr = key_cache_ptr + kv_head * FORM.dim
    value_ptr = value_cache_ptr + kv_head * FORM.dim
    table = block_tables_ptr + sequence.to(tl.int64) * table_stride
    cache = (key_ptr, value_ptr, table)
    row = tl.arange(0, BLOCK_M)
    token = row // FORM.group
    query_position = old + token
    seen = (low, high, query_position)
    tile = cached_tile(cache, first, seen, FORM, CUT)

    head = kv_head * FORM.group + row % FORM.group
    row_live = token < query_len
    packed = (query_begin + token).to(tl.int64)
    row_mask = row_live[:, None] & half_live[None, :]
    query_turn = load_turn(cos_ptr, sin_ptr, packed, half, row_mask, rope_stride)

    fresh = tl.arange(0, BLOCK_NEW)
    num_fresh = query_len  # the number of new keys in this part
    if CUT.splits > 1:
        num_fresh = tl.where(split == 0, query_len, 0)
    fresh_live = fresh < num_fresh
    fresh_token = (query_begin + fresh).to(tl.int64)
    new_key_ptr = qkv_ptr + (HEADS + kv_head) * FORM.dim
    new_value_ptr = new_key_ptr + FORM.kv_heads * FORM.dim
    fresh_mask = fresh_live[:, None] & half_live[None, :]
    new_turn = load_turn(cos_ptr, sin_ptr, fresh_token, half, fresh_mask, rope_stride)
    slot = tl.load(slots_ptr + fresh_token, mask=fresh_live, other=0)
    if not FORM.causal:  # hide padding after the last token; its slots are in block 0
        fresh_live = fresh_live & (slot >= FORM.block_size)
    after_predecessor(DEPENDENT)
    if scales_ptr is not None:
        tile = anchored(tile)

    if split == 0:
        if sequence == 0:
            zero_padding(out_ptr, end_of_all, num_tokens, kv_head, dim, FORM)
    if query_len <= 0:
        return

    if CUT.splits > 1:
        own = (sequence * FORM.kv_heads + kv_head).to(tl.int64)
        epochs_ptr += 2 * own
        epoch = epoch_of(epochs_ptr, parts)
    query = load_queries(qkv_ptr, packed, head, half, row_mask, qkv_stride, FORM.dim)
    new_first = tl.zeros([BLOCK_NEW, BLOCK_HALF], qkv_ptr.dtype.element_ty)
    new_key = (new_first, new_first)
    new_value = tl.zeros([BLOCK_NEW, BLOCK_D], qkv_ptr.dtype.element_ty)
    if num_fresh > 0:
        new_key, new_value = load_heads(
            new_key_ptr, new_value_ptr, fresh_token, fresh_live, half, dim, qkv_stride, FORM.dim
        )
    query = rotated(query, query_turn, query_norm_ptr, half, eps, FORM.dim)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Keep this branch although its condition is always true without splits. Otherwise the compiler
    # would rotate queries and new keys in a matmul operand's layout, in which every warp holds all
    # of them.
    if num_fresh > 0:
        new_key = rotated(new_key, new_turn, key_norm_ptr, half, eps, FORM.dim)
        if scales_ptr is not None:
            dtype: tl.constexpr = qkv_ptr.dtype.element_ty  # it can represent every e4m3 value
            new_key = (
                coded(new_key[0], key_scale).to(dtype),
                coded(new_key[1], key_scale).to(dtype),
            )
            new_value = coded(new_value, value_scale).to(dtype)
        store_heads(cache, new_key, new_value, slot, fresh_live, half, dim, FORM)
        new = new_tile(new_key, new_value, fresh, fresh_live, token, early, FORM)
        if first < high:
            row_max, sums, fresh_weights, acc = attend_both(query, tile, new, scaling, FORM)
        else:
            row_max, _, fresh_weights, acc = attend(row_max, acc, query, new, scaling, FORM)
        row_sum = tl.sum(fresh_weights, axis=1)
    elif CUT.splits > 1:
        row_max, _, sums, acc = attend(row_max, acc, query, tile, scaling, FORM)
    # Skip the loop if no tile is left: even without iterations a pipelined loop takes 0.5 us.
    if (CUT.splits == 1) | (first + BLOCK_N < high):
        before = row_max
        row_max, sums, acc = join_tiles(
            (row_max, sums, acc), query, cache, first + BLOCK_N, seen, scaling, FORM, CUT
        )
        row_sum *= tl.exp2(before - finite(row_max))
    row_sum += tl.sum(sums, axis=1)
    if scales_ptr is not None:
        acc *= value_scale

    out_mask = row_live[:, None] & (dim < FORM.dim)[None, :]
    if CUT.splits > 1:
        if parts > 1:
            stats_ptr += own * (CUT.splits * BLOCK_M)
            partial_ptr += own * (CUT.splits * BLOCK_M * BLOCK_D)
            store_part(partial_ptr, stats_ptr, split, (row_max, row_sum, acc), row_live, CUT)
            rows = query_len * FORM.group
            last = arrive(epochs_ptr, epoch, INTERPRETED)
            out_ptr += (query_begin.to(tl.int64) * HEADS + kv_head * FORM.group) * FORM.dim
            few = parts <= CUT.few_parts
            at_a_time = tl.where(few, CUT.few_rows, CUT.many_rows)
            mine = 0
            step = at_a_time
            if INTERPRETED:  # programs run one by one; the last combines all rows
                if not last:
                    return
            else:
                mine = split * at_a_time
                step = parts * at_a_time
                if mine >= rows:
                    return
                wait_for(epochs_ptr, epoch)
            memory = (partial_ptr, stats_ptr, sinks_ptr, out_ptr)
            span = (mine, rows, step, parts, kv_head * FORM.group)
            if few:
                combine_rows(memory, span, FORM, CUT, True)
            elif CUT.splits > CUT.few_parts:
                combine_rows(memory, span, FORM, CUT, False)
            if mine == 0:
                finish(epochs_ptr, epoch)
            return
    acc = weighted_mean(row_max, row_sum, acc, sinks_ptr, head, row_live)
    out_at = (packed * HEADS + head)[:, None] * FORM.dim + dim[None, :]
    tl.store(out_ptr + out_at, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


MAX_ROWS = 128  # maximum rows of a tile; fewer if a head has more than 256 bytes


def rope_attention_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: LayerCache,
    slots: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    call: AttentionCall,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
    chunks: ChunkPlan | None = None,
    *,
    splits: int | None = None,
    alone: int = ALONE,
    min_keys: int = MIN_KEYS,
    block_n: int | None = None,
) -> Tensor:
    """See `ops.rope_attention`; the arguments after `chunks` override the launch configuration."""
    num_tokens, width = qkv.shape
    _, block_size, kv_heads, head_dim = cache.keys.shape
    num_sequences, num_columns = block_tables.shape
    heads = width // head_dim - 2 * kv_heads
    group = heads // kv_heads
    assert width == (heads + 2 * kv_heads) * head_dim and heads == group * kv_heads > 0
    assert cache.is_sound and cache.values.shape == cache.keys.shape and head_dim % 2 == 0
    assert cos.shape == sin.shape and cos.stride() == sin.stride() and cos.shape[0] == num_tokens
    assert slots.shape == (num_tokens,) and cos.shape[1] == head_dim
    assert query_start.shape == (num_sequences + 1,) and context_lens.shape == (num_sequences,)
    assert all(t is None or t.shape == (head_dim,) for t in (query_norm, key_norm))
    assert call.sinks is None or call.sinks.shape == (heads,)
    assert all(t.stride(-1) == 1 for t in (qkv, cos, sin, block_tables))
    # Use separate kernels if the queries do not fit into one tile. A tile has at most MAX_ROWS rows
    # and 32 KiB, so it has fewer rows if heads are wide.
    if max_query_len * group > min(MAX_ROWS, 2**15 // (head_dim * qkv.element_size())):
        query = rope_kv(qkv, cos, sin, cache, slots, query_norm, key_norm, eps)
        where = query, cache, block_tables
        if takes_chunks(chunks, cache, call, qkv.dtype):
            assert chunks is not None
            out = attend_chunks(*where, context_lens, chunks, call)
        else:
            lengths = query_start, context_lens, max_query_len
            out = paged_attention_triton(*where, *lengths, call, slots)
        return out.view(num_tokens, heads * head_dim)

    device = qkv.device
    cut = choose_cut(
        max_query_len,
        group,
        kv_heads,
        head_dim,
        qkv.element_size(),
        num_sequences,
        num_columns * block_size,
        splits,
        block_n,
        gpu_of(device),
    )
    programs = num_sequences * kv_heads
    out = torch.empty((num_tokens, heads * head_dim), dtype=qkv.dtype, device=device)
    partial = stats = counts = None
    parts = 1
    if cut.splits > 1:
        assert programs <= EPOCHS
        parts = cut.splits
        size = (num_sequences, kv_heads, parts)
        partial = torch.empty((*size, cut.block_m, cut.block_d), dtype=torch.float32, device=device)
        stats = torch.empty((*size, cut.block_m), dtype=torch.int64, device=device)
        counts = epochs(device)
    rope_attention_kernel[(parts, kv_heads, num_sequences)](
        *(qkv, cos, sin, query_norm, key_norm, *cache, slots),
        *(block_tables, query_start, context_lens, call.sinks, out, partial, stats, counts),
        float(call.scale),
        float(call.softcap),
        float(eps),
        num_tokens,
        num_sequences,
        alone,
        min_keys,
        qkv.stride(0),
        cos.stride(0),
        block_tables.stride(0),
        FORM=form_of(call, heads, cache),
        CUT=cut,
        **options_of(cut),
        **dependence(qkv),
    )
    return out
