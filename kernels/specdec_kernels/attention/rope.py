"""Rotary embedding, KV write and paged attention of one layer: the torch implementation.

Rotary embedding (Su et al., arXiv 2104.09864) uses the layout of transformers' Llama: the first and
the second half of a head form the pairs that are rotated. Per-head norms are those of Qwen 3.

Legend: T packed tokens, B sequences, H query heads, Hkv key heads, D features of a head, NB blocks
of BS slots, MB block-table columns.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from specdec_kernels.attention.cache import write_kv
from specdec_kernels.attention.call import AttentionCall
from specdec_kernels.attention.chunks import ChunkPlan
from specdec_kernels.attention.paged import gather_attention, gather_plan
from specdec_kernels.dispatch import kernel
from specdec_kernels.linear.reference import rms_norm_reference


class Rotation(NamedTuple):
    """Cosines and sines that rotate the heads of T tokens, for all layers of a pass."""

    cos: Tensor
    """[T, 1, D]."""
    sin: Tensor
    """[T, 1, D], the first half negated."""

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> Self:
        """cos, sin: [T, D]."""
        first, second = sin.chunk(2, dim=1)
        return cls(cos[:, None], torch.cat((-first, second), dim=1)[:, None])

    def rotate(self, x: Tensor) -> Tensor:
        """x [T, H, D]: a new tensor of its shape."""
        return (x * self.cos).addcmul_(x.roll(x.shape[2] // 2, 2), self.sin)


def split_heads_reference(
    qkv: Tensor,
    rotation: Rotation,
    kv_heads: int,
    head_dim: int,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Query [T, H, D] and key [T, Hkv, D], both normed and rotated, and value [T, Hkv, D]."""
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * kv_heads
    if query_norm is None and key_norm is None:
        rotated = rotation.rotate(heads[:, : num_heads + kv_heads])
        return rotated[:, :num_heads], rotated[:, num_heads:], heads[:, num_heads + kv_heads :]
    query, key, value = heads.split((num_heads, kv_heads, kv_heads), dim=1)
    if query_norm is not None:
        query = rms_norm_reference(query, query_norm, eps)
    if key_norm is not None:
        key = rms_norm_reference(key, key_norm, eps)
    return rotation.rotate(query), rotation.rotate(key), value


@kernel("specdec_kernels.attention.rope_triton:write_kv_turned_triton")
def write_kv_turned(
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Store rotated keys and values of tokens that have no queries, in place.

    Args:
        kv: [T, 2 Hkv D], rows contiguous: key and value heads of every token.
        cos, sin: [T, D], in the layout of transformers' Llama.
        key_cache, value_cache: [NB, BS, Hkv, D].
        slots: [T] int64, as in `write_kv`.
        key_norm: [D], weight of a per-head RMS norm before the rotation.
        eps: Of this norm.
    """
    _, _, kv_heads, head_dim = key_cache.shape
    _, key, value = split_heads_reference(
        kv, Rotation.of(cos, sin), kv_heads, head_dim, None, key_norm, eps
    )
    write_kv.reference(key, value, key_cache, value_cache, slots)


@kernel("specdec_kernels.attention.decode_triton:rope_attention_triton")
def rope_attention(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
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
) -> Tensor:
    """Rotary embedding, storing the new keys and values, and `paged_attention` of one layer.

    New tokens' keys and values are taken from `qkv`, older ones from the cache. On CUDA the block
    tables, lengths, slots, cos and sin must be complete before the kernel that writes `qkv` starts:
    they and the old cache are read while that kernel still runs.

    Args:
        qkv: [T, (H + 2 Hkv) D], rows contiguous: query, key and value heads of every token.
        cos, sin: [T, D], in the layout of transformers' Llama.
        key_cache, value_cache: [NB, BS, Hkv, D], written at `slots`.
        slots: [T] int64: the slots of a sequence's last positions, or slots of block 0 (the trash
            block), whose contents are then undefined. If a sequence has more queries than context
            tokens, the first queries are padding, and lie there.
        block_tables, query_start, context_lens, max_query_len, call: As in `paged_attention`;
            tokens at or past `query_start[B]` give zeros.
        query_norm, key_norm: [D], weights of per-head RMS norms before the rotation.
        eps: Of these norms.
        chunks: The pass's long chunks, which on CUDA go to another kernel where that is faster.
            Every token then belongs to a sequence. The result is the same within rounding.

    Returns:
        [T, H * D], contiguous.
    """
    _, block_size, kv_heads, head_dim = key_cache.shape
    query, key, value = split_heads_reference(
        qkv, Rotation.of(cos, sin), kv_heads, head_dim, query_norm, key_norm, eps
    )
    write_kv.reference(key, value, key_cache, value_cache, slots)
    plan = gather_plan(block_tables, query_start, context_lens, block_size, slots)
    return gather_attention(query, key_cache, value_cache, plan, call).view(qkv.shape[0], -1)
