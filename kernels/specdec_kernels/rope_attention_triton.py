"""The launch of `rope_attention_kernel_triton`, and what is too large for it."""

import torch
from torch import Tensor

from specdec_kernels.attention_triton import paged_attention_triton
from specdec_kernels.gpu import multiprocessors, shared_memory
from specdec_kernels.launch_triton import EPOCHS, dependent_launch, epochs, launch_options
from specdec_kernels.rope_attention_kernel_triton import rope_attention_kernel
from specdec_kernels.rope_cut import ALONE, MIN_KEYS, choose_cut
from specdec_kernels.rope_kv_triton import rope_kv

MAX_ROWS = 128  # of a tile, with heads of 256 bytes or less


def rope_attention_triton(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    max_query_len: int,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
    *,
    splits: int | None = None,
    alone: int = ALONE,
    min_keys: int = MIN_KEYS,
    block_n: int | None = None,
) -> Tensor:
    """See `ops.rope_attention`; what follows `eps` overrides choices."""
    num_tokens, width = qkv.shape
    _, block_size, kv_heads, head_dim = key_cache.shape
    num_sequences, num_columns = block_tables.shape
    heads = width // head_dim - 2 * kv_heads
    group = heads // kv_heads
    assert width == (heads + 2 * kv_heads) * head_dim and heads == group * kv_heads > 0
    assert value_cache.shape == key_cache.shape and head_dim % 2 == 0
    assert cos.shape == sin.shape and cos.stride() == sin.stride() and cos.shape[0] == num_tokens
    assert slots.shape == (num_tokens,) and cos.shape[1] == head_dim
    assert query_start.shape == (num_sequences + 1,) and context_lens.shape == (num_sequences,)
    assert all(t is None or t.shape == (head_dim,) for t in (query_norm, key_norm))
    assert sinks is None or sinks.shape == (heads,)
    tensors = (qkv, cos, sin, key_cache, value_cache, block_tables)
    assert all(t.stride(-1) == 1 for t in tensors)
    # Wider heads leave room for fewer rows.
    if max_query_len * group > min(MAX_ROWS, 2**15 // (head_dim * qkv.element_size())):
        query = rope_kv(qkv, cos, sin, key_cache, value_cache, slots, query_norm, key_norm, eps)
        out = paged_attention_triton(
            query,
            key_cache,
            value_cache,
            block_tables,
            query_start,
            context_lens,
            scale,
            max_query_len,
            sliding_window,
            softcap,
            sinks,
        )
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
        shared_memory(device),
        multiprocessors(device),
    )
    programs = num_sequences * kv_heads
    out = torch.empty((num_tokens, heads * head_dim), dtype=qkv.dtype, device=device)
    partial = stats = counts = out
    parts = 1
    if cut.splits > 1:
        assert programs <= EPOCHS
        parts = cut.splits
        size = (num_sequences, kv_heads, parts)
        partial = torch.empty((*size, cut.block_m, cut.block_d), dtype=torch.float32, device=device)
        stats = torch.empty((*size, cut.block_m), dtype=torch.int64, device=device)
        counts = epochs(device)
    dependent = dependent_launch(qkv)
    rope_attention_kernel[(parts, kv_heads, num_sequences)](
        qkv,
        cos,
        sin,
        qkv if query_norm is None else query_norm,
        qkv if key_norm is None else key_norm,
        key_cache,
        value_cache,
        slots,
        block_tables,
        query_start,
        context_lens,
        qkv if sinks is None else sinks,
        out,
        partial,
        stats,
        counts,
        float(scale),
        float(softcap),
        float(eps),
        num_tokens,
        num_sequences,
        alone,
        min_keys,
        qkv.stride(0),
        cos.stride(0),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        block_tables.stride(0),
        KV_HEADS=kv_heads,
        GROUP=group,
        D=head_dim,
        BLOCK_D=cut.block_d,
        BLOCK_HALF=cut.block_d // 2,
        BLOCK_SIZE=block_size,
        WINDOW=sliding_window,
        HAS_SOFTCAP=softcap > 0,
        HAS_SINKS=sinks is not None,
        HAS_QUERY_NORM=query_norm is not None,
        HAS_KEY_NORM=key_norm is not None,
        SPLITS=cut.splits,
        FEW_PARTS=cut.few_parts,
        FEW_ROWS=cut.few_rows,
        MANY_ROWS=cut.many_rows,
        WAITS=qkv.is_cuda,
        BLOCK_M=cut.block_m,
        BLOCK_NEW=cut.block_new,
        BLOCK_N=cut.block_n,
        DEPENDENT=dependent,
        PRECISION="ieee",
        # CPU tensors mean Triton's interpreter, whose dot of 16-bit operands is not to be trusted.
        UPCAST=not qkv.is_cuda,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        maxnreg=cut.maxnreg,
        **launch_options(dependent),
    )
    return out
