"""The public functions: CUDA tensors go to Triton kernels, CPU tensors to the torch references.

Triton is imported when a CUDA tensor first arrives, so CPU use needs no Triton. No function reads
device data on the host when its tensors are on CUDA, so all can be captured in a CUDA graph;
`gather_plan` is the exception, and meant for CPU.

Does not know sequences, engines or sampling parameters. Row starts `[B + 1]` are the running sum
of per-row counts, beginning at 0.
"""

from torch import Tensor

from specdec_kernels.attention import GatherPlan, gather_attention, gather_plan
from specdec_kernels.kv import write_kv_reference
from specdec_kernels.merge import merge_tokens_reference
from specdec_kernels.rejection import rejection_sample_reference, sample_categorical_reference
from specdec_kernels.slots import slot_mapping_reference

__all__ = [
    "GatherPlan",
    "gather_attention",
    "gather_plan",
    "merge_tokens",
    "paged_attention",
    "rejection_sample",
    "sample_categorical",
    "slot_mapping",
    "write_kv",
]


def merge_tokens(
    tokens: Tensor,
    start: Tensor,
    end: Tensor,
    next_tokens: Tensor,
    next_lens: Tensor,
    out_start: Tensor,
    total: int,
    fill: int = 0,
) -> tuple[Tensor, Tensor]:
    """Keep the valid tokens of every row, append the next ones, fill up to the row's capacity.

    Args:
        tokens: [N] int64, packed.
        start: [B + 1] int32, where each row begins in `tokens`.
        end: [B] int32, end (exclusive) of the row's valid tokens; the rest were rejected.
        next_tokens: [B, M] int64.
        next_lens: [B] int32, 0..M, how many of `next_tokens` to append.
        out_start: [B + 1] int32, where each row begins in the output.
        total: `out_start[B]`, known on the host.
        fill: A valid token id for the unused places: they pass through the embedding.

    Returns:
        merged [total] int64, and rejected [total] bool, True at the filled places.
    """
    args = (tokens, start, end, next_tokens, next_lens, out_start, total, fill)
    if tokens.is_cuda:
        from specdec_kernels.merge_triton import merge_tokens_triton

        return merge_tokens_triton(*args)
    return merge_tokens_reference(*args)


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


def rejection_sample(
    draft_tokens: Tensor,
    lens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    accept_noise: Tensor,
    sample_noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Modified rejection sampling: tokens distributed as the target's, whatever the draft is.

    Leviathan et al. (arXiv 2211.17192), Chen et al. (2302.01318). With u the accept noise, draft
    d_i is accepted iff u_i * q_i(d_i) < p_i(d_i). At the first rejection, a, one token is drawn
    from norm(max(p_a - q_a, 0)), or from p_a where rounding leaves that empty; when all k are
    accepted, from p_k. Draws are by inverse CDF with `sample_noise` at that position. One-hot p
    and q give greedy decoding.

    Args:
        draft_tokens: [B, K] int64; what lies at or past `lens` is ignored.
        lens: [B] int32, 0..K, drafted tokens of each row.
        draft_probs: [B, K, V] fp32, the q that the draft tokens were drawn from.
        target_probs: [B, K + 1, V] fp32.
        accept_noise: [B, K] fp32 in [0, 1).
        sample_noise: [B, K + 1] fp32 in [0, 1).

    Returns:
        tokens [B, K + 1] int64, the accepted drafts and one more, padded with -1, and accepted
        [B] int32, how many drafts. A NaN in the target's probabilities makes both -1.
    """
    args = (draft_tokens, lens, draft_probs, target_probs, accept_noise, sample_noise)
    if target_probs.is_cuda:
        from specdec_kernels.rejection_triton import rejection_sample_triton

        return rejection_sample_triton(*args)
    return rejection_sample_reference(*args)


def sample_categorical(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw from `probs` [N, V] fp32 by inverse CDF with `noise` [N] fp32 in [0, 1): [N] int64.

    The smallest index whose running sum exceeds noise * total, never one of zero probability; -1
    where a row holds a NaN.
    """
    if probs.is_cuda:
        from specdec_kernels.rejection_triton import sample_categorical_triton

        return sample_categorical_triton(probs, noise)
    return sample_categorical_reference(probs, noise)


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

        return paged_attention_triton(
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
    plan = gather_plan(block_tables, query_start, context_lens, key_cache.shape[1])
    return gather_attention(
        query, key_cache, value_cache, plan, scale, sliding_window, softcap, sinks
    )


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
