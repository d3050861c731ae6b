"""The paged KV cache: where tokens go, storing them, and attention over it."""

from torch import Tensor

from specdec_kernels.attention import gather_attention, gather_plan
from specdec_kernels.kv import write_kv_reference
from specdec_kernels.slots import slot_mapping_reference


def slot_mapping(
    block_tables: Tensor,
    out_start: Tensor,
    positions: Tensor,
    rejected: Tensor | None,
    block_size: int,
    max_model_len: int,
) -> Tensor:
    """KV cache slot of every token: `block_tables[b, pos // block_size]`, at `pos % block_size`.

    Rejected tokens, positions at or past `max_model_len` or the block table's end, and tokens at
    or past `out_start[B]` (padding) go to the trash block, block 0.

    Args:
        block_tables: [B, MB] int32.
        out_start: [B + 1] int32, where each row begins in `positions`.
        positions: [T] int64.
        rejected: [T] bool, or None for none.
        block_size: Slots a block.
        max_model_len: Positions a sequence may have.

    Returns:
        [T] int64.
    """
    args = (block_tables, out_start, positions, rejected, block_size, max_model_len)
    if positions.is_cuda:
        from specdec_kernels.slots_triton import slot_mapping_triton

        return slot_mapping_triton(*args)
    return slot_mapping_reference(*args)


def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Store each token's key and value at its slot, in place.

    Only trash slots may occur twice; which of their tokens remains is not defined.

    Args:
        key: [T, Hkv, Dk].
        value: [T, Hkv, Dv].
        key_cache: [NB, BS, Hkv, Dk].
        value_cache: [NB, BS, Hkv, Dv].
        slots: [T] int64, as from `slot_mapping`.
    """
    if key.is_cuda:
        from specdec_kernels.kv_triton import write_kv_triton

        return write_kv_triton(key, value, key_cache, value_cache, slots)
    return write_kv_reference(key, value, key_cache, value_cache, slots)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    max_query_len: int,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of ragged queries over a paged KV cache, with grouped query heads.

    Sequence b's queries are its last `query_start[b + 1] - query_start[b]` context positions, and
    their own keys are already in the cache. fp32, fp16 or bf16, accumulated in fp32.

    Args:
        query: [T, H, Dk]; tokens at or past `query_start[B]` (padding) give zeros.
        key_cache: [NB, BS, Hkv, Dk]; query head h reads key head h // (H // Hkv).
        value_cache: [NB, BS, Hkv, Dv].
        block_tables: [B, MB] int32.
        query_start: [B + 1] int32, where each sequence begins in `query`.
        context_lens: [B] int32, tokens in the cache, those of this pass included.
        scale: Factor on the scores.
        max_query_len: At least the longest sequence's number of queries; known on the host.
        sliding_window: A key is visible iff its position > the query's - window; 0 for no window.
        softcap: Scores become softcap * tanh(score / softcap), as in Gemma 2; 0 for none.
        sinks: [H], per-head logits that join the softmax and carry no value, as in GPT-OSS.

    Returns:
        [T, H, Dv], contiguous.
    """
    if query.is_cuda:
        from specdec_kernels.attention_triton import paged_attention_triton

        tensors = (query, key_cache, value_cache, block_tables, query_start, context_lens)
        return paged_attention_triton(
            *tensors, scale, max_query_len, sliding_window, softcap, sinks
        )
    plan = gather_plan(block_tables, query_start, context_lens, key_cache.shape[1])
    return gather_attention(
        query, key_cache, value_cache, plan, scale, sliding_window, softcap, sinks
    )
