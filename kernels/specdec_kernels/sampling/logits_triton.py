"""Draws and rejection sampling over the model's logits: Triton kernels.

Rows are cut into the parts of `logit_rows_triton`. Probabilities are never stored.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import COUNTERS, after_predecessor, counters, dependence, is_last
from specdec_kernels.sampling.logit_rows_triton import cut, exponent_scale, kept_weight
from specdec_kernels.sampling.logits import LogitRows


@triton.jit
def first_above(weights, before, threshold, index, NONE: tl.constexpr):
    """Smallest index of a positive weight whose running sum exceeds the threshold.

    The last positive one if rounding leaves none, and the last index if no weight is positive.
    """
    positive = weights > 0
    hit = positive & (before + tl.cumsum(weights, axis=0) > threshold)
    first = tl.min(tl.where(hit, index, NONE), axis=0)
    last = tl.max(tl.where(positive, index, -1), axis=0)
    last = tl.where(last < 0, NONE - 1, last)
    return tl.where(first == NONE, last, first)


@triton.jit
def sample_logits_kernel(
    logits_ptr,  # [R, V]
    rows_ptr,  # [R, 4] fp32
    parts_ptr,  # [R, PARTS] fp32
    noise_ptr,  # [R] fp32
    out_ptr,  # [R] int64, out
    stride,
    noise_stride,
    scale,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    after_predecessor(DEPENDENT)
    scale = tl.full([], scale, tl.float32)

    every = tl.arange(0, BLOCK_PARTS)
    parts = tl.load(parts_ptr + row * PARTS + every, mask=every < PARTS, other=0.0)
    total = tl.sum(parts, axis=0)
    level = tl.load(noise_ptr + row * noise_stride) * total
    part = first_above(parts, 0.0, level, every, PARTS)
    before = tl.sum(tl.where(every < part, parts, 0.0), axis=0)

    lane = tl.arange(0, BLOCK)
    at = part * BLOCK + lane
    x = tl.load(logits_ptr + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    weight = kept_weight(x, at, rows_ptr + row * 4, True, scale)
    token = part * BLOCK + first_above(weight, before, level, lane, BLOCK)
    token = tl.where(total == total, tl.minimum(token, V - 1), -1)
    tl.store(out_ptr + row, token.to(tl.int64))


@triton.jit
def token_probability(logits_ptr, token, mask, row_ptr, scale, V: tl.constexpr):
    """Probability of one token in each of several rows, under `mask`."""
    x = tl.load(logits_ptr + token, mask=mask & (token < V), other=float("-inf")).to(tl.float32)
    return kept_weight(x, token, row_ptr, mask, scale) / tl.load(row_ptr + 1, mask=mask, other=1.0)


@triton.jit
def residual_weight(
    at,
    end,
    target,  # pointers to the target's logits and row statistics
    draft,  # the same of the draft; with ONE_HOT q is 1 at `proposed` instead
    proposed,
    factor,
    scale,
    V: tl.constexpr,
    DRAFT_V: tl.constexpr,
    ONE_HOT: tl.constexpr,
):
    """max(factor * p - q, 0) at places `at` before `end`.

    A NaN stays a NaN, so that no sum over it is positive.
    """
    p_ptr, p_row_ptr = target
    q_ptr, q_row_ptr = draft
    here = at < end
    x = tl.load(p_ptr + at, mask=here & (at < V), other=float("-inf")).to(tl.float32)
    p = factor * kept_weight(x, at, p_row_ptr, True, scale) / tl.load(p_row_ptr + 1)
    if ONE_HOT:
        q = (at == proposed).to(tl.float32)
    else:
        x = tl.load(q_ptr + at, mask=here & (at < DRAFT_V), other=float("-inf")).to(tl.float32)
        q = kept_weight(x, at, q_row_ptr, True, scale) / tl.load(q_row_ptr + 1)
    return tl.where(p - q <= 0.0, 0.0, p - q)


@triton.jit
def draw_token(
    residuals,  # [BLOCK_PARTS], the residual's mass in each part; zeros to draw from p
    parts_ptr,  # the target's, [PARTS] of this place
    noise,
    target,  # this and the next as in `residual_weight`
    draft,
    proposed,
    factor,
    scale,
    V: tl.constexpr,
    DRAFT_V: tl.constexpr,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_HOT: tl.constexpr,
):
    """Draw one token, from the residual if it has any mass, else from p."""
    every = tl.arange(0, BLOCK_PARTS)
    lane = tl.arange(0, BLOCK)
    p_ptr, p_row_ptr = target
    sums = tl.load(parts_ptr + every, mask=every < PARTS, other=0.0)
    from_residual = tl.sum(residuals, axis=0) > 0.0
    sums = tl.where(from_residual, residuals, sums)
    level = noise * tl.sum(sums, axis=0)
    drawn = first_above(sums, 0.0, level, every, PARTS)
    before = tl.sum(tl.where(every < drawn, sums, 0.0), axis=0)
    at = drawn * BLOCK + lane
    x = tl.load(p_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
    weights = kept_weight(x, at, p_row_ptr, True, scale)
    if K > 0:
        end = tl.where(from_residual, V, 0)
        residual = residual_weight(
            at, end, target, draft, proposed, factor, scale, V, DRAFT_V, ONE_HOT
        )
        weights = tl.where(from_residual, residual, weights)
    token = drawn * BLOCK + first_above(weights, before, level, lane, BLOCK)
    return tl.minimum(token, V - 1)


@triton.jit
def store_decision(
    tokens_ptr,  # [K + 1] int64 of this sequence, out
    accepted_ptr,  # int64 of this sequence, out
    target_rows_ptr,  # [K + 1, 4] fp32 of this sequence
    drafts,  # [BLOCK_K] int64
    length,
    accepted,
    own,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Store accepted drafts, the drawn token, and -1; and the count, or -2 or -1 if not finite."""
    place = tl.arange(0, BLOCK_K)
    totals = tl.load(
        target_rows_ptr + place * 4 + 1, mask=(place <= length) & (place <= K), other=1.0
    )
    void = tl.max((totals != totals).to(tl.int32), axis=0) > 0
    spoilt = tl.max(((place < length) & (drafts < 0)).to(tl.int32), axis=0) > 0
    out = tl.where(place == accepted, own, -1).to(tl.int64)
    out = tl.where(place < accepted, drafts, out)
    out = tl.where(void, -1, out)
    tl.store(tokens_ptr + place, out, mask=place <= K)
    told = tl.where(spoilt, -2, tl.where(void, -1, accepted))
    tl.store(accepted_ptr, told.to(tl.int64))


@triton.jit
def reject_logits_kernel(
    draft_tokens_ptr,  # [B, K] int64, -1 where the draft had no token
    lens_ptr,  # [B] int64 or int32
    draft_logits_ptr,  # [B, K, DRAFT_V], or anything where drafts are ONE_HOT
    draft_rows_ptr,  # [B, K, 4] fp32, likewise
    target_logits_ptr,  # [B, K + 1, V]
    target_rows_ptr,  # [B, K + 1, 4] fp32
    target_parts_ptr,  # [B, K + 1, PARTS] fp32
    accept_noise_ptr,  # [B, K] fp32
    sample_noise_ptr,  # [B, K + 1] fp32
    residuals_ptr,  # [B, PARTS] fp32, scratch
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
    V: tl.constexpr,
    DRAFT_V: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_HOT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    after_predecessor(DEPENDENT)
    scale = tl.full([], scale, tl.float32)

    # 1. Every program counts the acceptances, which is cheaper than another kernel.
    length = tl.load(lens_ptr + row).to(tl.int32)
    place = tl.arange(0, BLOCK_K)
    drafted = (place < length) & (place < K)
    target_rows_ptr += row * (K + 1) * 4
    target_logits_ptr += row * target_stride_b
    drafts = tl.full([BLOCK_K], 0, tl.int64)
    accepted = tl.full([], 0, tl.int32)
    if K > 0:
        draft_rows_ptr += row * K * 4
        draft_logits_ptr += row * draft_stride_b
        drafts = tl.load(draft_tokens_ptr + row * tokens_stride + place, mask=drafted, other=0)
        token = tl.maximum(drafts, 0)
        q = tl.full([BLOCK_K], 1.0, tl.float32)
        if not ONE_HOT:
            q = token_probability(
                draft_logits_ptr + place * draft_stride_k,
                token,
                drafted,
                draft_rows_ptr + place * 4,
                scale,
                DRAFT_V,
            )
        p = token_probability(
            target_logits_ptr + place * target_stride_k,
            token,
            drafted,
            target_rows_ptr + place * 4,
            scale,
            V,
        )
        noise = tl.load(accept_noise_ptr + row * accept_stride + place, mask=drafted, other=0.0)
        stays = drafted & (noise * q < p)
        accepted = tl.minimum(tl.min(tl.where(stays, BLOCK_K, place), axis=0), length)

    # 2. After a rejection, the residual's mass in this part.
    rejected = accepted < length
    lane = tl.arange(0, BLOCK)
    p_ptr = target_logits_ptr + accepted.to(tl.int64) * target_stride_k
    p_row_ptr = target_rows_ptr + accepted * 4
    q_ptr = draft_logits_ptr
    q_row_ptr = draft_rows_ptr
    proposed = tl.full([], 0, tl.int64)
    if K > 0:
        # q is not read after the last place, but needs a valid address.
        behind = tl.minimum(accepted, K - 1)
        if ONE_HOT:
            proposed = tl.sum(tl.where(place == accepted, drafts, 0), axis=0)
        else:
            q_ptr += behind.to(tl.int64) * draft_stride_k
            q_row_ptr += behind * 4
        if rejected:
            own_part = part * BLOCK + lane
            target, draft = (p_ptr, p_row_ptr), (q_ptr, q_row_ptr)
            weight = residual_weight(
                own_part, V, target, draft, proposed, 1.0, scale, V, DRAFT_V, ONE_HOT
            )
            tl.store(residuals_ptr + row * PARTS + part, tl.sum(weight, axis=0))

    # 3. The last program draws one token, from the residual or from p.
    if is_last(counters_ptr + row, PARTS):
        every = tl.arange(0, BLOCK_PARTS)
        residuals = tl.zeros([BLOCK_PARTS], tl.float32)
        if K > 0:
            residuals = tl.load(
                residuals_ptr + row * PARTS + every,
                mask=every < tl.where(rejected, PARTS, 0),
                other=0.0,
                cache_modifier=".cg",
            )
        own = draw_token(
            residuals,
            target_parts_ptr + (row * (K + 1) + accepted) * PARTS,
            tl.load(sample_noise_ptr + row * sample_stride + accepted),
            (p_ptr, p_row_ptr),
            (q_ptr, q_row_ptr),
            proposed,
            1.0,
            scale,
            V,
            DRAFT_V,
            K,
            PARTS,
            BLOCK_PARTS,
            BLOCK,
            ONE_HOT,
        )
        store_decision(
            tokens_ptr + row * (K + 1),
            accepted_ptr + row,
            target_rows_ptr,
            drafts,
            length,
            accepted,
            own,
            K,
            BLOCK_K,
        )


def sample_logits_triton(
    logits: Tensor,
    stats: LogitRows | None,
    temperature: float,
    top_k: int,
    top_p: float,
    noise: Tensor,
) -> Tensor:
    """See `ops.sample_logits`."""
    assert stats is not None
    num_rows, vocabulary = logits.shape
    assert logits.stride(1) == 1 and stats.rows.is_contiguous() and stats.parts.is_contiguous()
    assert noise.shape == (num_rows,) and stats.rows.shape == (num_rows, 4)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    sample_logits_kernel[(num_rows,)](
        *(logits, stats.rows, stats.parts, noise, out),
        *(logits.stride(0), noise.stride(0), exponent_scale(temperature)),
        num_warps=8,
        **cut(vocabulary, stats.parts.shape[1]),
        **dependence(logits),
    )
    return out


def reject_logits_triton(
    draft_tokens: Tensor,
    lens: Tensor,
    draft_logits: Tensor | None,
    draft_rows: Tensor | None,
    target_logits: Tensor,
    target: LogitRows | None,
    temperature: float,
    top_k: int,
    top_p: float,
    accept_noise: Tensor,
    sample_noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `ops.reject_logits`."""
    assert target is not None
    (batch, width), vocabulary = draft_tokens.shape, target_logits.shape[2]
    is_one_hot = draft_logits is None or draft_rows is None
    if draft_logits is None or draft_rows is None:
        # Not read, but they need valid addresses.
        draft_logits, draft_rows = target_logits[:, :width], target.rows
    else:
        assert draft_rows.shape == (batch, width, 4) and draft_rows.is_contiguous()
    assert target_logits.shape[:2] == (batch, width + 1)
    assert draft_logits.shape[:2] == (batch, width)
    assert target.rows.shape == (batch * (width + 1), 4)
    assert draft_logits.shape[2] <= vocabulary
    assert lens.shape == (batch,) and lens.is_contiguous() and batch <= COUNTERS
    assert width == 0 or draft_tokens.stride(1) == accept_noise.stride(1) == 1
    assert accept_noise.shape == (batch, width) and sample_noise.shape == (batch, width + 1)
    assert target_logits.stride(2) == 1 and (width == 0 or draft_logits.stride(2) == 1)
    assert all(t.is_contiguous() for t in target)
    parts = target.parts.shape[1]
    device = target_logits.device
    residuals = torch.empty((batch, parts), dtype=torch.float32, device=device)
    tokens = torch.empty((batch, width + 1), dtype=torch.int64, device=device)
    accepted = torch.empty(batch, dtype=torch.int64, device=device)
    reject_logits_kernel[(batch, parts)](
        *(draft_tokens, lens, draft_logits, draft_rows, target_logits, *target),
        *(accept_noise, sample_noise, residuals, counters(device), tokens, accepted),
        draft_tokens.stride(0),
        *draft_logits.stride()[:2],
        *target_logits.stride()[:2],
        accept_noise.stride(0),
        sample_noise.stride(0),
        exponent_scale(temperature),
        DRAFT_V=draft_logits.shape[2],
        K=width,
        BLOCK_K=triton.next_power_of_2(width + 1),
        ONE_HOT=is_one_hot,
        num_warps=8,
        **cut(vocabulary, parts),
        **dependence(target_logits),
    )
    return tokens, accepted
