"""The public functions of attention: torch implementations, and the names of their Triton kernels.

Legend: T packed tokens, B sequences, H query heads, Hkv key heads, D features per head, NB blocks
of BS slots each, MB block-table columns. Block 0 of a cache is the trash block: padding is written
there. Arguments that several functions share:

- cache: The layer's cache.
- slots: [T] int64, the cache slot of every token, as `slot_mapping` returns it.
- block_tables: [B, MB] int32.
- query_start: [B + 1] int32, where each sequence begins among the packed tokens.
- context_lens: [B] int32, each sequence's number of tokens in the cache, including those of this
  pass.
- max_query_len: The number of queries in the longest sequence, or an upper bound on it.
- cos, sin: [T, D]. The rotary embedding (Su et al., arXiv 2104.09864) has the layout of
  transformers' Llama: for i < D / 2, it rotates feature i of a head together with feature
  i + D / 2.
- query_norm, key_norm: [D], the weights of RMS norms that are applied to every head before the
  rotation, as in Qwen 3. None for no norm.
- eps: The epsilon of the RMS norms.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from specdec_kernels.attention.call import AttentionCall, LayerCache
from specdec_kernels.attention.chunks import ChunkPlan
from specdec_kernels.attention.cpu import gather_attention, gather_plan
from specdec_kernels.dispatch import kernel
from specdec_kernels.linear.reference import rms_norm_reference

MANY = 64  # minimum number of slots that are written as one slice if they are consecutive


@kernel("specdec_kernels.attention.cache_triton:slot_mapping_triton")
def slot_mapping(
    block_tables: Tensor, out_start: Tensor, positions: Tensor, block_size: int
) -> Tensor:
    """Return the KV cache slot of every token, [T] int64.

    A token of sequence b at position p goes to block `block_tables[b, p // block_size]`, where it
    has the offset p % block_size. Tokens at positions past the block table's end, and tokens at or
    past `out_start[B]`, go to the trash block.

    out_start: [B + 1] int32, where the tokens of each sequence begin.
    positions: [T] int64, each token's position in its sequence.
    """
    num_rows, num_columns = block_tables.shape
    place = torch.arange(positions.shape[0], device=positions.device)
    row = torch.searchsorted(out_start[1:].long(), place, right=True)
    trash = (positions >= num_columns * block_size) | (row >= num_rows)
    column = (positions // block_size).clamp(0, num_columns - 1)
    block = block_tables[row.clamp(max=num_rows - 1), column].long().masked_fill(trash, 0)
    return block * block_size + positions % block_size


@kernel("specdec_kernels.attention.cache_triton:write_kv_triton")
def write_kv(key: Tensor, value: Tensor, cache: LayerCache, slots: Tensor) -> None:
    """Store each token's key [T, Hkv, Dk] and value [T, Hkv, Dv] at its slot, in place.

    Only trash slots may occur more than once; it is undefined which of their tokens is kept.
    """
    first = _first_of_run(slots)
    for side, heads in zip(cache.sides, (key, value), strict=True):
        pool, new = side.pool.view(-1, *side.pool.shape[2:]), side.coded(heads)
        if side.scales is not None:  # torch cannot copy fp8 by index on a CPU
            pool, new = pool.view(torch.uint8), new.view(torch.uint8)
        if first is None:
            pool.index_copy_(0, slots, new)
        else:
            pool[first : first + len(new)].copy_(new)


def _first_of_run(slots: Tensor) -> int | None:
    """Return the first slot if all slots are consecutive, otherwise None.

    On a CPU, copying to one slice is five times as fast as copying by index. On a GPU, or for fewer
    than MANY slots, the result is always None.
    """
    if slots.is_cuda or len(slots) < MANY:
        return None
    numbers = slots.numpy()
    is_run = bool((numbers[1:] - numbers[:-1] == 1).all())
    return int(numbers[0]) if is_run else None


@kernel("specdec_kernels.attention.paged_triton:paged_attention_triton")
def paged_attention(
    query: Tensor,
    cache: LayerCache,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    max_query_len: int,
    call: AttentionCall,
    slots: Tensor | None = None,
) -> Tensor:
    """Compute attention of ragged queries over a paged KV cache, with grouped query heads.

    Sequence b's queries are the tokens at its last `query_start[b + 1] - query_start[b]` context
    positions, and their own keys are already in the cache. Query head h reads key head
    h // (H // Hkv). Inputs are fp32, fp16 or bf16; sums are accumulated in fp32.

    query: [T, H, Dk]. The output of tokens at or past `query_start[B]` is zero.
    slots: the cache slots of the queries' keys. A slot in block 0 marks padding at the beginning or
    the end of a sequence's queries, which non-causal queries must not see. Causal attention does
    not need the slots, so they may be None.

    Returns [T, H, Dv], contiguous.
    """
    plan = gather_plan(block_tables, query_start, context_lens, cache.keys.shape[1], slots)
    return gather_attention(query, cache, plan, call)


class Rotation(NamedTuple):
    """Cosines and sines that rotate the heads of T tokens, for all layers of a pass."""

    cos: Tensor
    """The cosines [T, 1, D]."""
    sin: Tensor
    """The sines [T, 1, D], the first half negated."""

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> Self:
        """Build the rotation from cosines and sines, [T, D] each."""
        first, second = sin.chunk(2, dim=1)
        return cls(cos[:, None], torch.cat((-first, second), dim=1)[:, None])

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the heads x [T, H, D], and return them as a new tensor."""
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
    """Split the projection's output into heads, and apply norms and rotation to queries and keys.

    qkv: [T, (H + 2 Hkv) D]. Returns query [T, H, D], key [T, Hkv, D] and value [T, Hkv, D].
    """
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
    cache: LayerCache,
    slots: Tensor,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    """Write keys and values of tokens to the cache, in place, without computing any queries.

    Keys are normalised, if `key_norm` is given, and rotated before they are written.

    kv: [T, 2 Hkv D], rows contiguous: for every token its key heads, then its value heads.
    """
    _, _, kv_heads, head_dim = cache.keys.shape
    _, key, value = split_heads_reference(
        kv, Rotation.of(cos, sin), kv_heads, head_dim, None, key_norm, eps
    )
    write_kv.reference(key, value, cache, slots)


@kernel("specdec_kernels.attention.decode_triton:rope_attention_triton")
def rope_attention(
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
) -> Tensor:
    """Apply rotary embedding, store the new keys and values, and compute `paged_attention`.

    Attention uses the new keys and values rounded to the precision of the cache. On CUDA all inputs
    except `qkv` must be complete before the kernel that writes `qkv` starts, since they are read
    while that kernel runs.

    qkv: [T, (H + 2 Hkv) D], rows contiguous: the query, key and value heads of every token. The
    output of tokens at or past `query_start[B]` is zero.
    slots: the cache slots of the queries' keys and values. Padding has slots in block 0, whose
    contents are undefined afterwards. If a sequence has more queries than context tokens, its first
    queries are such padding.
    chunks: the pass's long chunks, or None. On CUDA another kernel processes them if that is
    faster; results differ only by rounding.

    Returns [T, H * D], contiguous.
    """
    _, block_size, kv_heads, head_dim = cache.keys.shape
    query, key, value = split_heads_reference(
        qkv, Rotation.of(cos, sin), kv_heads, head_dim, query_norm, key_norm, eps
    )
    write_kv.reference(key, value, cache, slots)
    plan = gather_plan(block_tables, query_start, context_lens, block_size, slots)
    return gather_attention(query, cache, plan, call).view(qkv.shape[0], -1)


@kernel("specdec_kernels.attention.chunks_triton:gather_kv_triton")
def gather_kv(
    cache: LayerCache, table: Tensor, context: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Copy a sequence's keys and values out of the cache, in the order of their positions.

    table: [MB] int32, the sequence's blocks.
    context: C, the number of the sequence's tokens in the cache.

    Returns keys and values, each [C, Hkv, D] in `dtype`, contiguous.
    """
    block_size = cache.keys.shape[1]
    position = torch.arange(context, device=table.device)
    slots = table[position // block_size].long() * block_size + position % block_size
    keys, values = (side.decoded(side.pool.flatten(0, 1)[slots], dtype) for side in cache.sides)
    return keys, values


@kernel("specdec_kernels.attention.dense_triton:dense_attention_triton")
def dense_attention(query: Tensor, key: Tensor, value: Tensor, scale: float, out: Tensor) -> None:
    """Compute causal attention for the last L of a sequence's C positions, and write it to `out`.

    query: [L, H, D], heads and features contiguous.
    key, value: [C, Hkv, D], contiguous.
    scale: the positive factor by which the scores are multiplied.
    out: [L, H, D], heads and features contiguous.

    On CUDA this needs 16-bit values, a D that is a power of 2, and a Hopper GPU or later.
    """
    group, older = query.shape[1] // key.shape[1], key.shape[0] - query.shape[0]
    q, k, v = (x.float().transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(older + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(2)
    out.copy_((weights @ v).transpose(0, 1))
