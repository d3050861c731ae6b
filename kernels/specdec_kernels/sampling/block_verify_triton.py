"""Block verification over logits: one Triton kernel.

A program measures the residual of one place in one part of the vocabulary; the last program of a
sequence has the masses of all of them, decides how many drafts stand and draws the next token.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import COUNTERS, after_predecessor, counters, dependence, is_last
from specdec_kernels.sampling.logit_rows_triton import cut, exponent_scale
from specdec_kernels.sampling.logits import TINY, LogitRows
from specdec_kernels.sampling.logits_triton import (
    draw_token,
    reject_logits_triton,
    residual_weight,
    store_decision,
    token_probability,
)

LEAST: tl.constexpr = tl.constexpr(TINY)


@triton.jit
def running_weights(p, q, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """w_0 = 1 and w_i = min(1, w_(i-1) p_i / q_i) from the drafts' probabilities: [BLOCK_K]."""
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
def block_verify_kernel(
    draft_tokens_ptr,  # [B, K] int64, -1 where the draft had no token
    lens_ptr,  # [B] int64 or int32
    draft_logits_ptr,  # [B, K, DRAFT_V]
    draft_rows_ptr,  # [B, K, 4] fp32
    target_logits_ptr,  # [B, K + 1, V]
    target_rows_ptr,  # [B, K + 1, 4] fp32
    target_parts_ptr,  # [B, K + 1, PARTS] fp32
    accept_noise_ptr,  # [B, K] fp32
    sample_noise_ptr,  # [B, K + 1] fp32
    residuals_ptr,  # [B, K, PARTS] fp32, scratch
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
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own_place = tl.program_id(1)
    part = tl.program_id(2)
    after_predecessor(DEPENDENT)
    scale = tl.full([], scale, tl.float32)

    # 1. Every program computes the running weights, which is cheaper than another kernel.
    length = tl.load(lens_ptr + row).to(tl.int32)
    place = tl.arange(0, BLOCK_K)
    drafted = (place < length) & (place < K)
    draft_rows_ptr += row * K * 4
    draft_logits_ptr += row * draft_stride_b
    target_rows_ptr += row * (K + 1) * 4
    target_logits_ptr += row * target_stride_b
    residuals_ptr += row * K * PARTS
    drafts = tl.load(draft_tokens_ptr + row * tokens_stride + place, mask=drafted, other=0)
    token = tl.maximum(drafts, 0)
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
    weights = running_weights(p, q, K, BLOCK_K)

    # 2. Mass of the residual w p - q of this program's place in its part.
    if own_place < length:
        at = part * BLOCK + tl.arange(0, BLOCK)
        step = own_place.to(tl.int64)
        target = (target_logits_ptr + step * target_stride_k, target_rows_ptr + step * 4)
        draft = (draft_logits_ptr + step * draft_stride_k, draft_rows_ptr + step * 4)
        factor = tl.sum(tl.where(place == own_place, weights, 0.0), axis=0)
        residual = residual_weight(at, V, target, draft, 0, factor, scale, V, DRAFT_V, False)
        tl.store(residuals_ptr + step * PARTS + part, tl.sum(residual, axis=0))

    # 3. The last program accepts the longest prefix that passes, and draws one token.
    if is_last(counters_ptr + row, K * PARTS):
        every = tl.arange(0, BLOCK_PARTS)
        masses = tl.load(
            residuals_ptr + place[:, None] * PARTS + every[None, :],
            mask=drafted[:, None] & (every < PARTS)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        mass = tl.sum(masses, axis=1)
        rest = mass + (1.0 - weights)
        chance = tl.where(rest == 0.0, 1.0, mass / rest)
        chance = tl.where(place == length, weights, chance)
        tested = (place >= 1) & (place <= length)
        # The noise of place i - 1 decides whether i drafts stand. Nothing is below a NaN.
        noise = tl.load(accept_noise_ptr + row * accept_stride + place - 1, mask=tested, other=1.0)
        accepted = tl.max(tl.where(tested & (noise < chance), place, 0), axis=0)

        residuals = tl.sum(tl.where((place == accepted)[:, None], masses, 0.0), axis=0)
        behind = tl.minimum(accepted, K - 1).to(tl.int64)  # after the last place q is not read
        own = draw_token(
            residuals,
            target_parts_ptr + (row * (K + 1) + accepted) * PARTS,
            tl.load(sample_noise_ptr + row * sample_stride + accepted),
            (
                target_logits_ptr + accepted.to(tl.int64) * target_stride_k,
                target_rows_ptr + accepted * 4,
            ),
            (draft_logits_ptr + behind * draft_stride_k, draft_rows_ptr + behind * 4),
            0,
            tl.sum(tl.where(place == accepted, weights, 0.0), axis=0),
            scale,
            V,
            DRAFT_V,
            K,
            PARTS,
            BLOCK_PARTS,
            BLOCK,
            False,
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


def block_verify_logits_triton(
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
    """See `ops.block_verify_logits`."""
    assert target is not None
    (batch, width), vocabulary = draft_tokens.shape, target_logits.shape[2]
    if width == 0 or draft_logits is None or draft_rows is None:
        return reject_logits_triton(
            *(draft_tokens, lens, draft_logits, draft_rows, target_logits, target),
            *(temperature, top_k, top_p, accept_noise, sample_noise),
        )
    assert draft_rows.shape == (batch, width, 4) and draft_rows.is_contiguous()
    assert target_logits.shape[:2] == (batch, width + 1)
    assert draft_logits.shape[:2] == (batch, width) and draft_logits.shape[2] <= vocabulary
    assert target.rows.shape == (batch * (width + 1), 4)
    assert lens.shape == (batch,) and lens.is_contiguous() and batch <= COUNTERS
    assert draft_tokens.stride(1) == accept_noise.stride(1) == 1
    assert accept_noise.shape == (batch, width) and sample_noise.shape == (batch, width + 1)
    assert target_logits.stride(2) == draft_logits.stride(2) == sample_noise.stride(1) == 1
    assert all(t.is_contiguous() for t in target)
    parts = target.parts.shape[1]
    device = target_logits.device
    residuals = torch.empty((batch, width, parts), dtype=torch.float32, device=device)
    tokens = torch.empty((batch, width + 1), dtype=torch.int64, device=device)
    accepted = torch.empty(batch, dtype=torch.int64, device=device)
    block_verify_kernel[(batch, width, parts)](
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
        num_warps=8,
        **cut(vocabulary, parts),
        **dependence(target_logits),
    )
    return tokens, accepted
