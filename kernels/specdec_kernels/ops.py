"""The public functions: CUDA tensors go to Triton kernels, CPU tensors to the torch references.

Triton is imported when a CUDA tensor first arrives, so CPU use needs no Triton. No function reads
device data on the host when its tensors are on CUDA, so all can be captured in a CUDA graph;
`gather_plan` is the exception, and meant for CPU.

Does not know sequences, engines or sampling parameters. Row starts `[B + 1]` are the running sum
of per-row counts, beginning at 0.
"""

from torch import Tensor

from specdec_kernels.advance import accept_reference, advance_reference
from specdec_kernels.argmax import greedy_argmax_reference
from specdec_kernels.attention import GatherPlan, gather_attention, gather_plan
from specdec_kernels.clock import stamp_reference
from specdec_kernels.embed import embed_reference
from specdec_kernels.kv import write_kv_reference
from specdec_kernels.linear import (
    Normed,
    add_norm_reference,
    gate_reference,
    linear_add_norm_reference,
    linear_reference,
    norm_gate_up_reference,
    norm_linear_reference,
    rms_norm_reference,
)
from specdec_kernels.logits import (
    LogitRows,
    logit_rows_reference,
    reject_logits_reference,
    sample_logits_reference,
)
from specdec_kernels.merge import merge_tokens_reference
from specdec_kernels.noise import uniform_rows_reference
from specdec_kernels.padding import padded_pass_reference
from specdec_kernels.peers import Peers
from specdec_kernels.rejection import rejection_sample_reference, sample_categorical_reference
from specdec_kernels.rope_attention import rope_attention_reference
from specdec_kernels.slots import slot_mapping_reference

__all__ = [
    "GatherPlan",
    "LogitRows",
    "Normed",
    "accept",
    "add_norm",
    "advance",
    "embed",
    "gate",
    "gather_attention",
    "gather_columns",
    "gather_plan",
    "greedy_argmax",
    "linear",
    "linear_add_norm",
    "logit_rows",
    "merge_tokens",
    "norm_gate_up",
    "norm_linear",
    "padded_pass",
    "paged_attention",
    "reduce_add_norm",
    "reject_logits",
    "rejection_sample",
    "rms_norm",
    "rope_attention",
    "sample_categorical",
    "sample_logits",
    "slot_mapping",
    "stamp",
    "uniform_rows",
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


def stamp(out: Tensor, place: int) -> None:
    """Write the time in nanoseconds into `out[place]`, int64, after the kernels before it.

    On CUDA it is the device's own clock, which graphs read anew in every replay; its ticks may be
    a microsecond apart. Only differences mean anything.
    """
    if out.is_cuda:
        from specdec_kernels.clock_triton import stamp_triton

        return stamp_triton(out, place)
    return stamp_reference(out, place)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of every row times `weight`, which Gemma's callers pass as 1 + g.

    Args:
        x: [..., K], rows contiguous.
        weight: [K].
        eps: Added to the mean of squares.

    Returns:
        As x, contiguous.
    """
    if x.is_cuda:
        from specdec_kernels.norm_triton import rms_norm_triton

        return rms_norm_triton(x, weight, eps)
    return rms_norm_reference(x, weight, eps)


def gate(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up of merged [T, 2F], gate first: [T, F]; "silu" or "gelu_tanh"."""
    if gate_up.is_cuda:
        from specdec_kernels.norm_triton import gate_triton

        return gate_triton(gate_up, activation)
    return gate_reference(gate_up, activation)


def embed(
    token_ids: Tensor,
    positions: Tensor,
    embedding: Tensor,
    cos_table: Tensor,
    sin_table: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> tuple[Normed, Tensor, Tensor]:
    """What a pass begins with.

    Args:
        token_ids, positions: [T] int64, less than V and L; not checked on CUDA.
        embedding: [V, K].
        cos_table, sin_table: [L, D].
        norm_weight: [K], and `eps`: of the first layer's norm.

    Returns:
        The embeddings and their norm, [T, K], and the tables' rows, [T, D] each.
    """
    args = (token_ids, positions, embedding, cos_table, sin_table, norm_weight, eps)
    if embedding.is_cuda:
        from specdec_kernels.embed_triton import embed_triton

        return embed_triton(*args)
    return embed_reference(*args)


def norm_linear(
    x: Normed, weight: Tensor, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """rms_norm(x) @ weight^T (+ bias): a layer's merged q, k and v, or the logits.

    Args:
        x: Of [T, K], as `norm` or `linear_add_norm` returned it, all rows.
        weight: [N, K], contiguous.
        bias: [N].
        into: [T, N], contiguous, where to write it.

    Returns:
        [T, N] of x's dtype, contiguous.
    """
    if weight.is_cuda:
        from specdec_kernels.linear_triton import norm_linear_triton

        return norm_linear_triton(x, weight, bias, into)
    return norm_linear_reference(x, weight, bias, into)


def norm_gate_up(x: Normed, weight: Tensor, activation: str = "silu") -> Tensor:
    """activation(n @ gate^T) * (n @ up^T) with n = rms_norm(x): the first half of a gated MLP.

    Args:
        x: Of [T, K], as `norm` or `linear_add_norm` returned it, all rows.
        weight: [2F, K], contiguous, the gate's rows first.
        activation: "silu" or "gelu_tanh".

    Returns:
        [T, F], contiguous.
    """
    if weight.is_cuda:
        from specdec_kernels.linear_triton import norm_gate_up_triton

        return norm_gate_up_triton(x, weight, activation)
    return norm_gate_up_reference(x, weight, activation)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """x @ weight^T (+ bias): one rank's part of an output or down projection.

    Args:
        x: [T, K], rows contiguous.
        weight: [N, K], contiguous.
        bias: [N].
        into: [T, N], contiguous, where to write it.

    Returns:
        [T, N], contiguous.
    """
    if x.is_cuda:
        from specdec_kernels.linear_triton import linear_triton

        return linear_triton(x, weight, bias, into)
    return linear_reference(x, weight, bias, into)


def add_norm(x: Tensor, residual: Tensor, norm_weight: Tensor, eps: float) -> Normed:
    """residual + x, both [T, N], made ready for the norm that follows: where the ranks' parts of a
    projection have been added up. norm_weight: [N]."""
    if x.is_cuda:
        from specdec_kernels.norm_triton import add_norm_triton

        return add_norm_triton(x, residual, norm_weight, eps)
    return add_norm_reference(x, residual, norm_weight, eps)


def reduce_add_norm(
    peers: Peers, place: int, residual: Tensor, norm_weight: Tensor, eps: float
) -> Normed:
    """`add_norm` of the sum of all ranks' parts, which they have written to their own memory.

    CUDA only, at most 256 rows. Every rank of the group calls it, and with place 0 and 1 in turn.

    Args:
        peers: The group's memory; `peers.take(place, T, N)` is where this rank's part is.
        place: 0 or 1.
        residual: [T, N], rows contiguous, the same on all ranks.
        norm_weight: [N].
    """
    from specdec_kernels.reduce_triton import reduce_add_norm_triton

    return reduce_add_norm_triton(peers, place, residual, norm_weight, eps)


def gather_columns(peers: Peers, num_rows: int) -> Tensor:
    """What all ranks have written to `peers.take(0, num_rows, N)`, side by side: [T, size * N].

    CUDA only. Every rank of the group calls it, and has to take part in `reduce_add_norm` or
    another meeting of the group before it writes there again.
    """
    from specdec_kernels.gather_triton import gather_columns_triton

    return gather_columns_triton(peers, num_rows)


def linear_add_norm(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> Normed:
    """residual + x @ weight^T (+ bias), made ready for the norm that follows: a layer's output and
    down projections.

    Args:
        x: [T, K], rows contiguous.
        weight: [N, K], contiguous.
        residual: [T, N], rows contiguous.
        bias: [N].
        norm_weight: [N], of the next norm: the MLP's, the next layer's, or the last one.
        eps: Of that norm.

    Returns:
        The new residual stream, in `hidden`, and what the next product reads.
    """
    if x.is_cuda:
        from specdec_kernels.linear_triton import linear_add_norm_triton

        return linear_add_norm_triton(x, weight, residual, norm_weight, eps, bias)
    return linear_add_norm_reference(x, weight, residual, norm_weight, eps, bias)


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
    scale: float,
    max_query_len: int,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """Rotary embedding, storing the new keys and values, and `paged_attention` of one layer.

    The new tokens' keys and values are taken from `qkv`, those before them from the cache. On CUDA
    the block tables, lengths and cos and sin must be older than the kernel that writes `qkv`: they
    and the old cache are read while that one still runs.

    Args:
        qkv: [T, (H + 2 Hkv) D], rows contiguous: query, key and value heads of every token.
        cos, sin: [T, D], in the layout of transformers' Llama.
        key_cache, value_cache: [NB, BS, Hkv, D], written at `slots`.
        slots: [T] int64. Those of a sequence's queries are its last positions', or in block 0 (the
            trash block), whose contents are then not defined. Of more queries than the context has
            tokens the first ones are padding.
        block_tables, query_start, context_lens, scale, max_query_len, sliding_window, softcap,
            sinks: As in `paged_attention`; tokens at or past `query_start[B]` give zeros.
        query_norm, key_norm: [D], weights of per-head RMS norms before the rotation.
        eps: Of these norms.

    Returns:
        [T, H * D], contiguous.
    """
    if qkv.is_cuda:
        from specdec_kernels.rope_attention_triton import rope_attention_triton

        return rope_attention_triton(
            qkv,
            cos,
            sin,
            key_cache,
            value_cache,
            slots,
            block_tables,
            query_start,
            context_lens,
            scale,
            max_query_len,
            sliding_window,
            softcap,
            sinks,
            query_norm,
            key_norm,
            eps,
        )
    return rope_attention_reference(
        qkv,
        cos,
        sin,
        key_cache,
        value_cache,
        slots,
        block_tables,
        query_start,
        context_lens,
        scale,
        sliding_window,
        softcap,
        sinks,
        query_norm,
        key_norm,
        eps,
    )


def greedy_argmax(logits: Tensor) -> Tensor:
    """Index of the first maximum of every row of [R, V]: [R] int64; -1 where a row holds a NaN."""
    if logits.is_cuda:
        from specdec_kernels.argmax_triton import greedy_argmax_triton

        return greedy_argmax_triton(logits)
    return greedy_argmax_reference(logits)


def uniform_rows(
    seed: Tensor, index: Tensor, position: Tensor, purposes: int, width: int
) -> Tensor:
    """Uniform numbers in [0, 1) from Philox4x32-10, each a function of what it decides.

    Args:
        seed: int64 scalar.
        index: [B] int64, with the seed the key.
        position: [B] int64; number j of row b has counter (position[b] + j, purpose).
        purposes: How many numbers every position has.
        width: Positions a row.

    Returns:
        [purposes, B, width] fp32.
    """
    if index.is_cuda:
        from specdec_kernels.noise_triton import uniform_rows_triton

        return uniform_rows_triton(seed, index, position, purposes, width)
    return uniform_rows_reference(seed, index, position, purposes, width)


def padded_pass(
    tokens: Tensor,
    length: Tensor,
    lens: Tensor,
    active: Tensor,
    block_tables: Tensor,
    offset: int,
    margin: int,
    block_size: int,
    max_len: int,
    num_ids: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Inputs of a pass that feeds Q tokens of each of B sequences, from length + offset on.

    Token j of a sequence is live iff the sequence is active, its position is within the model,
    and lens >= offset + j + margin; the others are padding, whose keys go to the trash block.

    Args:
        tokens: [B, Q] int64; clamped into 0..num_ids - 1.
        length, lens: [B] int64.
        active: [B] bool.
        block_tables: [B, MB] int32.
        offset, margin: See above.
        block_size: Slots a block.
        max_len: Positions the model knows.
        num_ids: Size of its vocabulary.

    Returns:
        ids [B * Q] int64; positions [B * Q] int64, clamped into the model's; slots [B * Q] int64;
        context_lens [B] int32, the last token's position, unclamped, and one.
    """
    args = (tokens, length, lens, active, block_tables, offset, margin, block_size, max_len)
    if tokens.is_cuda:
        from specdec_kernels.padding_triton import padded_pass_triton

        return padded_pass_triton(*args, num_ids)
    return padded_pass_reference(*args, num_ids)


def accept(
    proposed: Tensor,
    best: Tensor,
    lens: Tensor,
    accept_noise: Tensor | None = None,
    rates: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Greedy verification: proposals stand while they are the target's own choice.

    The one-hot case of `rejection_sample`. With rates, a proposal stands iff its noise is below
    the rate of its place, whatever the target says.

    Args:
        proposed: [B, K] int64, -1 where the draft's logits were not finite.
        best: [B, K + 1] int64, the target's choice at each place, -1 where it has none.
        lens: [B] int64, proposals of each row.
        accept_noise: [B, K] fp32 in [0, 1).
        rates: [K] fp32.

    Returns:
        tokens [B, K + 1] int64, of which accepted + 1 count, and accepted [B] int64; -1 where
        `best` is -1 at a place up to `lens`, -2 where a proposal is.
    """
    if proposed.is_cuda:
        from specdec_kernels.advance_triton import accept_triton

        return accept_triton(proposed, best, lens, accept_noise, rates)
    return accept_reference(proposed, best, lens, accept_noise, rates)


def advance(
    tokens: Tensor,
    accepted: Tensor,
    lens: Tensor,
    tail: Tensor,
    length: Tensor,
    limit: Tensor,
    active: Tensor,
    eos_ids: Tensor,
    record: Tensor,
) -> None:
    """Append what a round decided to every active sequence, in place, and record it.

    accepted + 1 tokens are appended, or those up to the first end-of-sequence token. A sequence
    that meets one, or reaches its limit, is active no more.

    Args:
        tokens: [B, K + 1] int64. accepted, lens: [B] int64.
        tail: [B, 2] int64, the last two tokens.
        length, limit: [B] int64, tokens a sequence has, and at which it ends.
        active: [B] bool.
        eos_ids: [E] int64, or empty.
        record: [B, K + 3] int64: tokens, accepted and lens of every row, active or not.
    """
    args = (tokens, accepted, lens, tail, length, limit, active, eos_ids, record)
    if tokens.is_cuda:
        from specdec_kernels.advance_triton import advance_triton

        return advance_triton(*args)
    return advance_reference(*args)


def logit_rows(logits: Tensor, temperature: float, top_k: int, top_p: float) -> LogitRows:
    """What `sample_logits` and `reject_logits` must know to read logits as `logits.to_probs` does.

    Without top-k and top-p the logits are read once. A row that holds a NaN or +inf, or nothing
    above -inf, is void.

    Args:
        logits: [R, V] bf16, fp16 or fp32, rows contiguous.
        temperature: Above 0.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
    """
    if logits.is_cuda:
        from specdec_kernels.logits_triton import logit_rows_triton

        return logit_rows_triton(logits, temperature, top_k, top_p)
    return logit_rows_reference(logits, temperature, top_k, top_p)


def sample_logits(
    logits: Tensor,
    stats: LogitRows,
    temperature: float,
    top_k: int,
    top_p: float,
    noise: Tensor,
) -> Tensor:
    """Draw from every row's distribution, as `sample_categorical` does from probabilities.

    Args:
        logits, temperature, top_k, top_p: As `logit_rows` had them to make `stats`.
        noise: [R] fp32 in [0, 1).

    Returns:
        [R] int64, -1 for void rows.
    """
    if logits.is_cuda:
        from specdec_kernels.logits_triton import sample_logits_triton

        return sample_logits_triton(logits, stats, temperature, noise)
    return sample_logits_reference(logits, temperature, top_k, top_p, noise)


def reject_logits(
    draft_tokens: Tensor,
    lens: Tensor,
    draft_logits: Tensor,
    draft_rows: Tensor,
    target_logits: Tensor,
    target: LogitRows,
    temperature: float,
    top_k: int,
    top_p: float,
    accept_noise: Tensor,
    sample_noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """`rejection_sample` over logits: no probabilities are stored.

    Args:
        draft_tokens: [B, K] int64, -1 from void rows; what lies at or past `lens` is ignored.
        lens: [B] int64 or int32, 0..K, drafted tokens of each row.
        draft_logits: [B, K, V'] bf16, fp16 or fp32, V' <= V, rows contiguous. Ids at or past V'
            have probability 0.
        draft_rows: [B, K, 4], `rows` of the draft's `logit_rows`.
        target_logits: [B, K + 1, V] of any of these types, rows contiguous.
        target: `logit_rows` of the B * (K + 1) rows.
        temperature, top_k, top_p: As `logit_rows` had them.
        accept_noise: [B, K] fp32 in [0, 1).
        sample_noise: [B, K + 1] fp32 in [0, 1).

    Returns:
        tokens [B, K + 1] int64, the accepted drafts and one more, padded with -1, and accepted [B]
        int64, how many drafts: -2 where a draft token is negative, else -1 (and the tokens too)
        where a row of the target's up to `lens` is void.
    """
    if target_logits.is_cuda:
        from specdec_kernels.logits_triton import reject_logits_triton

        return reject_logits_triton(
            draft_tokens,
            lens,
            draft_logits,
            draft_rows,
            target_logits,
            target,
            temperature,
            accept_noise,
            sample_noise,
        )
    return reject_logits_reference(
        draft_tokens,
        lens,
        draft_logits,
        target_logits,
        temperature,
        top_k,
        top_p,
        accept_noise,
        sample_noise,
    )
