"""Attention for long prompt chunks, and the kernel that gathers their keys and values."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.attention.call import AttentionCall, LayerCache
from specdec_kernels.attention.chunks import HEAD_DIMS, ChunkPlan
from specdec_kernels.attention.reference import dense_attention, gather_kv, paged_attention
from specdec_kernels.launch_triton import launch_options

ROWS = 8  # positions that each program of `gather_kv_kernel` copies


# Lengths change from pass to pass, so do not specialise on them: each variant would take seconds to
# compile.
@triton.jit(do_not_specialize=["context"])
def gather_kv_kernel(
    key_cache_ptr,  # [NB, BLOCK_SIZE, Hkv, D]
    value_cache_ptr,  # [NB, BLOCK_SIZE, Hkv, D]
    scales_ptr,  # [2, Hkv] fp32, or None
    block_tables_ptr,  # [MB] int32, of one sequence
    key_ptr,  # [C, Hkv, D], out
    value_ptr,  # [C, Hkv, D], out
    context,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    stored = position < context
    block = tl.load(block_tables_ptr + position // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
    inside = position % BLOCK_SIZE
    place = tl.arange(0, BLOCK)
    mask = stored[:, None] & (place < KV_HEADS * D)[None, :]
    at = ((block * BLOCK_SIZE + inside) * (KV_HEADS * D))[:, None] + place[None, :]
    key = tl.load(key_cache_ptr + at, mask=mask)
    value = tl.load(value_cache_ptr + at, mask=mask)
    if scales_ptr is not None:
        head = place // D
        key_scale = tl.load(scales_ptr + head, mask=head < KV_HEADS, other=1.0)
        value_scale = tl.load(scales_ptr + KV_HEADS + head, mask=head < KV_HEADS, other=1.0)
        key = (key.to(tl.float32) * key_scale[None, :]).to(key_ptr.dtype.element_ty)
        value = (value.to(tl.float32) * value_scale[None, :]).to(value_ptr.dtype.element_ty)
    to = position.to(tl.int64)[:, None] * (KV_HEADS * D) + place[None, :]
    tl.store(key_ptr + to, key, mask=mask)
    tl.store(value_ptr + to, value, mask=mask)


def gather_kv_triton(
    cache: LayerCache, table: Tensor, context: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """See `reference.gather_kv`."""
    _, block_size, kv_heads, dim = cache.keys.shape
    assert cache.is_sound and cache.values.shape == cache.keys.shape
    assert table.dim() == 1 and table.is_contiguous()
    size = context, kv_heads, dim
    key, value = (torch.empty(size, dtype=dtype, device=table.device) for _ in range(2))
    gather_kv_kernel[(triton.cdiv(context, ROWS),)](
        *(*cache, table, key, value, context),
        KV_HEADS=kv_heads,
        D=dim,
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=ROWS,
        BLOCK=triton.next_power_of_2(kv_heads * dim),
        num_warps=4,
        **launch_options(),
    )
    return key, value


def takes_chunks(
    plan: ChunkPlan | None, cache: LayerCache, call: AttentionCall, dtype: torch.dtype
) -> bool:
    """Return True if there is a plan and the layer can use it.

    The layer must compute in 16 bits, use one of HEAD_DIMS for both keys and values, and have
    causal attention without softcap or sinks. If it has a window, the window must be at least as
    long as the longest context of a long chunk, so that it hides no keys.
    """
    return (
        plan is not None
        and dtype.itemsize == 2
        and cache.keys.shape[3] in HEAD_DIMS
        and cache.values.shape == cache.keys.shape
        and (call.sliding_window == 0 or call.sliding_window >= plan.longest)
        and call.causal
        and not call.softcap
        and call.sinks is None
    )


def attend_chunks(
    query: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    context_lens: Tensor,
    plan: ChunkPlan,
    call: AttentionCall,
) -> Tensor:
    """Compute `ops.paged_attention` for a layer for which `takes_chunks` is true.

    Args:
        query: [T, H, D], heads and features contiguous. Every token must belong to a sequence.
        cache: The layer's cache.
        block_tables: [B, MB] int32.
        context_lens: [B] int32.
        plan: The plan of this forward pass.
        call: The settings of the layer's attention.

    Returns:
        [T, H, D], contiguous.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for run in plan.runs:
        lengths = run.query_start, context_lens[run.sequences]
        out[run.tokens] = paged_attention(
            *(query[run.tokens], cache, block_tables[run.sequences], *lengths),
            *(run.max_query_len, call),
        )
    for sequence, tokens, context in plan.chunks:
        kv = gather_kv(cache, block_tables[sequence], context, query.dtype)
        dense_attention(query[tokens], *kv, call.scale, out[tokens])
    return out
