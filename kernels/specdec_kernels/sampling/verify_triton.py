"""Rejection sampling and block verification from the models' logits: one Triton kernel for both.

Rows are divided into the same parts as in `logit_rows_triton`. Probabilities are never stored. Each
program adds up the mass of a residual, max(p - q, 0), in its part of the vocabulary. Rejection
sampling needs only the residual at the first rejected position. Block verification
(`acceptance/block.py`) needs the residuals of all positions, because they decide how many draft
tokens are accepted, so each position has its own programs. The last program of a sequence samples
the next token.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import (
    COUNTERS,
    after_predecessor,
    counters,
    dependence,
    is_last,
)
from specdec_kernels.sampling.logit_rows_triton import cut, exponent_scale, kept_weight, logits_at
from specdec_kernels.sampling.logits_triton import first_above
from specdec_kernels.sampling.reference import TINY, Verification

LEAST = tl.constexpr(TINY)


@triton.jit
def token_probability(rows, token, mask, scale, V: tl.constexpr):
    """Return the probability of one token per row, for several rows.

    rows: the result of `rows_at` for these rows.
    mask: which rows to read. The result is 0 for the others.
    """
    logits_ptr, row_ptr = rows
    x = logits_at(logits_ptr, token, mask, V)
    return kept_weight(x, token, row_ptr, mask, scale) / tl.load(row_ptr + 1, mask=mask, other=1.0)


@triton.jit
def rows_at(logits_ptr, rows_ptr, place, stride):
    """Return pointers to the logits, and to the statistics, of the rows with index `place`."""
    return logits_ptr + place.to(tl.int64) * stride, rows_ptr + place * 4


@triton.jit
def residual_weight(at, end, target, draft, V: tl.constexpr, DRAFT_V: tl.constexpr):
    """Return max(factor * p - q, 0) for token ids `at` below `end`. The other arguments are as in
    `draw_token`.

    NaN is kept instead of being replaced by 0. The sum of the residual is then NaN and fails the
    test `> 0`, so the caller samples from p instead.
    """
    p_ptr, p_row_ptr, factor, scale = target
    q_ptr, q_row_ptr, proposed = draft
    here = at < end
    x = logits_at(p_ptr, at, here, V)
    p = factor * kept_weight(x, at, p_row_ptr, True, scale) / tl.load(p_row_ptr + 1)
    if q_ptr is None:
        q = (at == proposed).to(tl.float32)
    else:
        x = logits_at(q_ptr, at, here, DRAFT_V)
        q = kept_weight(x, at, q_row_ptr, True, scale) / tl.load(q_row_ptr + 1)
    return tl.where(p - q <= 0.0, 0.0, p - q)


@triton.jit
def draw_token(
    residuals,  # [BLOCK_PARTS], the residual's mass in each part; all 0 to sample from p
    parts_ptr,  # [PARTS], the target's mass in each part at this position
    noise,
    target,  # a tuple: both results of `rows_at`, the factor of p, and `scale`, log2(e) / T
    draft,  # a tuple: both results of `rows_at`, and 0; if q is one-hot, (None, None, token)
    DRAFT_V: tl.constexpr,
    K: tl.constexpr,
    CUT: tl.constexpr,
):
    """Sample one token: from the residual if it has any mass, otherwise from p."""
    every = tl.arange(0, CUT.block_parts)
    lane = tl.arange(0, CUT.block)
    p_ptr, p_row_ptr, _, scale = target
    sums = tl.load(parts_ptr + every, mask=every < CUT.parts, other=0.0)
    from_residual = tl.sum(residuals, axis=0) > 0.0
    sums = tl.where(from_residual, residuals, sums)
    level = noise * tl.sum(sums, axis=0)
    drawn = first_above(sums, 0.0, level, every, CUT.parts)
    before = tl.sum(tl.where(every < drawn, sums, 0.0), axis=0)
    at = drawn * CUT.block + lane
    weights = kept_weight(logits_at(p_ptr, at, True, CUT.vocab), at, p_row_ptr, True, scale)
    if K > 0:
        end = tl.where(from_residual, CUT.vocab, 0)
        residual = residual_weight(at, end, target, draft, CUT.vocab, DRAFT_V)
        weights = tl.where(from_residual, residual, weights)
    token = drawn * CUT.block + first_above(weights, before, level, lane, CUT.block)
    return tl.minimum(token, CUT.vocab - 1)


@triton.jit
def write_round(
    outputs,  # tokens [B, K + 1] int64 and accepted [B] int64
    row,
    own,  # the token sampled after the accepted ones
    accepted,
    drafts,  # [BLOCK_K], 0 from `length` on
    length,
    target_rows_ptr,  # [K + 1, 4] fp32, this sequence's statistics
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write a sequence's accepted draft tokens, the sampled token, and -1 as padding. Also write
    the number of accepted tokens, or -2 or -1 as in `ops.reject_logits`."""
    tokens_ptr, accepted_ptr = outputs
    place = tl.arange(0, BLOCK_K)
    counts = (place <= length) & (place <= K)
    totals = tl.load(target_rows_ptr + place * 4 + 1, mask=counts, other=1.0)
    void = tl.max((totals != totals).to(tl.int32), axis=0) > 0
    spoilt = tl.max(((place < length) & (drafts < 0)).to(tl.int32), axis=0) > 0
    out = tl.where(place == accepted, own, -1).to(tl.int64)
    out = tl.where(place < accepted, drafts, out)
    out = tl.where(void, -1, out)
    tl.store(tokens_ptr + row * (K + 1) + place, out, mask=place <= K)
    told = tl.where(spoilt, -2, tl.where(void, -1, accepted))
    tl.store(accepted_ptr + row, told.to(tl.int64))


@triton.jit
def running_weights(p, q, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Return the weights [BLOCK_K] of block verification: w_0 = 1, w_i = min(1, w_(i-1) p_i / q_i).

    p, q: [BLOCK_K], the probability of each draft token under the target and under the draft.
    """
    place = tl.arange(0, BLOCK_K)
    ratios = p / tl.maximum(q, LEAST)
    weights = tl.full([BLOCK_K], 1.0, tl.float32)
    weight = tl.full([], 1.0, tl.float32)
    for i in range(K):
        ratio = tl.sum(tl.where(place == i, ratios, 0.0), axis=0)
        weight = tl.minimum(weight * ratio, 1.0)
        weights = tl.where(place == i + 1, weight, weights)
    return weights


@triton.jit
def target_at(target, place, factor, scale):
    """Return the tuple that `draw_token` expects as `target`, for one position."""
    logits_ptr, row_ptr = rows_at(target[0], target[1], place, target[2])
    return logits_ptr, row_ptr, factor, scale


@triton.jit
def draft_at(draft, place, K: tl.constexpr):
    """Return the tuple that `draw_token` expects as `draft`, for one position."""
    # After the last draft token there is no q. It is not read, but its address must be valid.
    logits_ptr, row_ptr = rows_at(draft[0], draft[1], tl.minimum(place, K - 1), draft[2])
    return logits_ptr, row_ptr, tl.full([], 0, tl.int64)


@triton.jit
def verify_kernel(
    draft_tokens_ptr,  # [B, K] int64, -1 where the draft had no valid distribution
    lens_ptr,  # [B] int64 or int32
    draft_logits_ptr,  # [B, K, DRAFT_V], or None if q is one-hot
    draft_rows_ptr,  # [B, K, 4] fp32, or None if q is one-hot
    target_logits_ptr,  # [B, K + 1, V]
    target_rows_ptr,  # [B, K + 1, 4] fp32
    target_parts_ptr,  # [B, K + 1, PARTS] fp32
    accept_noise_ptr,  # [B, K] fp32
    sample_noise_ptr,  # [B, K + 1] fp32
    residuals_ptr,  # [B, PLACES, PARTS] fp32, scratch
    counters_ptr,  # [>= B] int32, zeros
    tokens_ptr,  # [B, K + 1] int64, out
    accepted_ptr,  # [B] int64, out
    tokens_stride,
    draft_stride_b,
    draft_stride_k,
    target_stride_b,
    target_stride_k,
    accept_stride,
    sample_stride,
    scale,
    DRAFT_V: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BY_BLOCK: tl.constexpr,  # whether to use block verification; then PLACES is K, otherwise 1
    CUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    ONE_HOT: tl.constexpr = draft_logits_ptr is None
    PLACES: tl.constexpr = K if BY_BLOCK else 1
    row = tl.program_id(0).to(tl.int64)
    own_place = tl.program_id(1)
    part = tl.program_id(2)
    after_predecessor(DEPENDENT)
    scale = tl.full([], scale, tl.float32)

    # 1. Compute the draft tokens' probabilities. Every program does so, which is cheaper than a
    # separate kernel. Block verification turns them into the running weights, and rejection
    # sampling into the number of accepted tokens.
    length = tl.load(lens_ptr + row).to(tl.int32)
    place = tl.arange(0, BLOCK_K)
    drafted = (place < length) & (place < K)
    target_rows_ptr += row * (K + 1) * 4
    target_logits_ptr += row * target_stride_b
    residuals_ptr += row * (PLACES * CUT.parts)
    accept_noise_ptr += row * accept_stride
    drafts = tl.full([BLOCK_K], 0, tl.int64)
    accepted = tl.full([], 0, tl.int32)
    if K > 0:
        drafts = tl.load(draft_tokens_ptr + row * tokens_stride + place, mask=drafted, other=0)
        token = tl.maximum(drafts, 0)
        q = tl.full([BLOCK_K], 1.0, tl.float32)
        if not ONE_HOT:
            draft_rows_ptr += row * K * 4
            draft_logits_ptr += row * draft_stride_b
            rows = rows_at(draft_logits_ptr, draft_rows_ptr, place, draft_stride_k)
            q = token_probability(rows, token, drafted, scale, DRAFT_V)
        rows = rows_at(target_logits_ptr, target_rows_ptr, place, target_stride_k)
        p = token_probability(rows, token, drafted, scale, CUT.vocab)
        if BY_BLOCK:
            weights = running_weights(p, q, K, BLOCK_K)
        else:
            noise = tl.load(accept_noise_ptr + place, mask=drafted, other=0.0)
            stays = drafted & (noise * q < p)
            accepted = tl.minimum(tl.min(tl.where(stays, BLOCK_K, place), axis=0), length)

    # 2. Add up the mass of a position's residual in this part, unless nothing was drafted there.
    measured = own_place if BY_BLOCK else accepted
    target_all = (target_logits_ptr, target_rows_ptr, target_stride_k)
    if not ONE_HOT:
        draft_all = (draft_logits_ptr, draft_rows_ptr, draft_stride_k)
    factor = 1.0
    if BY_BLOCK:
        factor = tl.sum(tl.where(place == own_place, weights, 0.0), axis=0)
    target = target_at(target_all, measured, factor, scale)
    draft = (None, None, tl.full([], 0, tl.int64))
    if K > 0:
        if ONE_HOT:
            draft = (None, None, tl.sum(tl.where(place == accepted, drafts, 0), axis=0))
        else:
            draft = draft_at(draft_all, measured, K)
        if measured < length:
            at = part * CUT.block + tl.arange(0, CUT.block)
            residual = residual_weight(at, CUT.vocab, target, draft, CUT.vocab, DRAFT_V)
            own = residuals_ptr + part
            if BY_BLOCK:
                own += own_place * CUT.parts
            tl.store(own, tl.sum(residual, axis=0))

    # 3. The last program samples one token, from the residual or from p. In block verification it
    # first finds the longest prefix that passes its test.
    if is_last(counters_ptr + row, PLACES * CUT.parts):
        every = tl.arange(0, CUT.block_parts)
        residuals = tl.zeros(every.shape, tl.float32)
        if BY_BLOCK:
            masses = tl.load(
                residuals_ptr + place[:, None] * CUT.parts + every[None, :],
                mask=drafted[:, None] & (every < CUT.parts)[None, :],
                other=0.0,
                cache_modifier=".cg",
            )
            mass = tl.sum(masses, axis=1)
            rest = mass + (1.0 - weights)
            chance = tl.where(rest == 0.0, 1.0, mass / rest)
            chance = tl.where(place == length, weights, chance)
            tested = (place >= 1) & (place <= length)
            # The noise at position i - 1 decides whether the first i draft tokens pass. If their
            # chance is NaN, the comparison is false, so they fail.
            noise = tl.load(accept_noise_ptr + place - 1, mask=tested, other=1.0)
            accepted = tl.max(tl.where(tested & (noise < chance), place, 0), axis=0)
            residuals = tl.sum(tl.where((place == accepted)[:, None], masses, 0.0), axis=0)
            factor = tl.sum(tl.where(place == accepted, weights, 0.0), axis=0)
            target = target_at(target_all, accepted, factor, scale)
            draft = draft_at(draft_all, accepted, K)
        elif K > 0:
            residuals = tl.load(
                residuals_ptr + every,
                mask=every < tl.where(accepted < length, CUT.parts, 0),
                other=0.0,
                cache_modifier=".cg",
            )
        parts_ptr = target_parts_ptr + (row * (K + 1) + accepted) * CUT.parts
        draw = tl.load(sample_noise_ptr + row * sample_stride + accepted)
        own = draw_token(residuals, parts_ptr, draw, target, draft, DRAFT_V, K, CUT)
        outputs = (tokens_ptr, accepted_ptr)
        write_round(outputs, row, own, accepted, drafts, length, target_rows_ptr, K, BLOCK_K)


def verified(v: Verification, by_block: bool) -> tuple[Tensor, Tensor]:
    """Launch `verify_kernel`. Return tokens and accepted as in `ops.reject_logits`.

    by_block: whether to use block verification instead of rejection sampling.
    """
    assert v.target is not None
    (batch, width), vocabulary = v.draft_tokens.shape, v.target_logits.shape[2]
    draft_logits, draft_rows = v.draft_logits, v.draft_rows
    draft_vocabulary, draft_strides = vocabulary, [0, 0]
    if draft_logits is None or draft_rows is None:
        draft_logits = draft_rows = None
    else:
        draft_vocabulary, draft_strides = draft_logits.shape[2], [*draft_logits.stride()[:2]]
        assert draft_rows.shape == (batch, width, 4) and draft_rows.is_contiguous()
        assert draft_logits.shape[:2] == (batch, width) and draft_vocabulary <= vocabulary
        assert width == 0 or draft_logits.stride(2) == 1
    assert v.target_logits.shape[:2] == (batch, width + 1) and v.target_logits.stride(2) == 1
    assert v.target.rows.shape == (batch * (width + 1), 4)
    assert v.lens.shape == (batch,) and v.lens.is_contiguous() and batch <= COUNTERS
    places = v.draft_tokens, v.accept_noise, v.sample_noise
    assert width == 0 or all(t.stride(1) == 1 for t in places)
    assert v.accept_noise.shape == (batch, width) and v.sample_noise.shape == (batch, width + 1)
    assert all(t.is_contiguous() for t in v.target)
    parts, num_places = v.target.parts.shape[1], width if by_block else 1
    device = v.target_logits.device
    residuals = torch.empty((batch, num_places, parts), dtype=torch.float32, device=device)
    tokens = torch.empty((batch, width + 1), dtype=torch.int64, device=device)
    accepted = torch.empty(batch, dtype=torch.int64, device=device)
    verify_kernel[(batch, num_places, parts)](
        *(v.draft_tokens, v.lens, draft_logits, draft_rows, v.target_logits, *v.target),
        *(v.accept_noise, v.sample_noise, residuals, counters(device), tokens, accepted),
        *(v.draft_tokens.stride(0), *draft_strides, *v.target_logits.stride()[:2]),
        *(v.accept_noise.stride(0), v.sample_noise.stride(0), exponent_scale(v.temperature)),
        DRAFT_V=draft_vocabulary,
        K=width,
        BLOCK_K=triton.next_power_of_2(width + 1),
        BY_BLOCK=by_block,
        CUT=cut(vocabulary, parts),
        num_warps=8,
        **dependence(v.target_logits),
    )
    return tokens, accepted


def reject_logits_triton(v: Verification) -> tuple[Tensor, Tensor]:
    """See `ops.reject_logits`."""
    return verified(v, by_block=False)


def verify_block_triton(v: Verification) -> tuple[Tensor, Tensor]:
    """See `verify_block` in `specdec_cli/acceptance/block.py`."""
    assert v.draft_rows is not None
    return verified(v, by_block=True)
