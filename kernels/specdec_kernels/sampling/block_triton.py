"""Block verification over the model's logits: a Triton kernel, see `acceptance/block.py`.

A program measures, in its part of the vocabulary, the residual of a place of its own. The last
program of a sequence needs the residuals of all its places to decide how many drafts stand. It
then draws the next token.
"""

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import after_predecessor, is_last
from specdec_kernels.sampling.reference import TINY, Verification
from specdec_kernels.sampling.verify_triton import (
    decide_with,
    draw_token,
    residual_weight,
    rows_at,
    token_probability,
    write_round,
)

LEAST = tl.constexpr(TINY)


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
    DRAFT_V: tl.constexpr,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    own_place = tl.program_id(1)
    part = tl.program_id(2)
    after_predecessor(DEPENDENT)
    scale = tl.full([], scale, tl.float32)

    # 1. Every program computes the drafts' probabilities, which is cheaper than another kernel, and
    # from them the running weights.
    length = tl.load(lens_ptr + row).to(tl.int32)
    place = tl.arange(0, BLOCK_K)
    drafted = (place < length) & (place < K)
    draft_rows_ptr += row * K * 4
    draft_logits_ptr += row * draft_stride_b
    target_rows_ptr += row * (K + 1) * 4
    target_logits_ptr += row * target_stride_b
    residuals_ptr += row * (K * CUT.parts)
    drafts = tl.load(draft_tokens_ptr + row * tokens_stride + place, mask=drafted, other=0)
    token = tl.maximum(drafts, 0)
    rows = rows_at(draft_logits_ptr, draft_rows_ptr, place, draft_stride_k)
    q = token_probability(rows, token, drafted, scale, DRAFT_V)
    rows = rows_at(target_logits_ptr, target_rows_ptr, place, target_stride_k)
    p = token_probability(rows, token, drafted, scale, CUT.vocab)
    weights = running_weights(p, q, K, BLOCK_K)

    # 2. The mass of this place's residual in this part, unless nothing was drafted there.
    unused = tl.full([], 0, tl.int64)
    if own_place < length:
        factor = tl.sum(tl.where(place == own_place, weights, 0.0), axis=0)
        p_row = rows_at(target_logits_ptr, target_rows_ptr, own_place, target_stride_k)
        q_row = rows_at(draft_logits_ptr, draft_rows_ptr, own_place, draft_stride_k)
        target = (p_row[0], p_row[1], factor, scale)
        draft = (q_row[0], q_row[1], unused)
        at = part * CUT.block + tl.arange(0, CUT.block)
        residual = residual_weight(at, CUT.vocab, target, draft, CUT.vocab, DRAFT_V)
        tl.store(residuals_ptr + own_place * CUT.parts + part, tl.sum(residual, axis=0))

    # 3. The last program finds the longest prefix that passes, and draws one token, from the
    # residual or from p.
    if is_last(counters_ptr + row, K * CUT.parts):
        every = tl.arange(0, CUT.block_parts)
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
        # The noise of place i - 1 decides whether i drafts stand. Nothing is below a NaN.
        accept_noise_ptr += row * accept_stride
        noise = tl.load(accept_noise_ptr + place - 1, mask=tested, other=1.0)
        accepted = tl.max(tl.where(tested & (noise < chance), place, 0), axis=0)
        residuals = tl.sum(tl.where((place == accepted)[:, None], masses, 0.0), axis=0)
        factor = tl.sum(tl.where(place == accepted, weights, 0.0), axis=0)
        p_row = rows_at(target_logits_ptr, target_rows_ptr, accepted, target_stride_k)
        target = (p_row[0], p_row[1], factor, scale)
        # q is not read after the last place, but needs a valid address.
        behind = tl.minimum(accepted, K - 1)
        q_row = rows_at(draft_logits_ptr, draft_rows_ptr, behind, draft_stride_k)
        draft = (q_row[0], q_row[1], unused)
        parts_ptr = target_parts_ptr + (row * (K + 1) + accepted) * CUT.parts
        draw = tl.load(sample_noise_ptr + row * sample_stride + accepted)
        own = draw_token(residuals, parts_ptr, draw, target, draft, DRAFT_V, K, CUT)
        outputs = (tokens_ptr, accepted_ptr)
        write_round(outputs, row, own, accepted, drafts, length, target_rows_ptr, K, BLOCK_K)


def verify_block_triton(v: Verification) -> tuple[Tensor, Tensor]:
    """See `verify_block` of `acceptance/block.py`."""
    assert v.draft_rows is not None
    return decide_with(block_verify_kernel, v.draft_tokens.shape[1], v)
