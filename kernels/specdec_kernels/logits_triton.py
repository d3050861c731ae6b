"""Distributions, draws and rejection over logits as the model wrote them: Triton kernels.

A row is cut into parts, a program each, so that few rows use the whole GPU; the last program of a
row puts its parts together. The normaliser is the online one of Milakov and Gimelshein
(arXiv 1805.02867), by parts. What top-k and top-p keep is found without sorting: a logit has few
possible values (65281 in bf16), and a pass of the search asks at several of them at once how many
tokens, or how much mass, are that large or larger. Probabilities are never stored.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import (
    COUNTERS,
    after_predecessor,
    counters,
    dependent_launch,
    is_last,
)
from specdec_kernels.logits import TINY, LogitRows
from specdec_kernels.rejection_triton import first_above

BLOCKS = (1024, 4096)  # tokens a program, where programs are few and where they are many
FEW_PROGRAMS = 264
# Into how many a pass cuts what it searches: passes cost time where rows are few, and sums where
# they are many.
WAYS = (16, 4)
# Low bits that are zero in a dtype's numbers as fp32, and the bits that tell its values apart.
SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
BITS = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 32}


@triton.jit
def key_of(value, SHIFT: tl.constexpr):
    """Integer in the order of fp32 values, neighbours one apart; both zeros are 0."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF) >> SHIFT
    return tl.where(bits < 0, -magnitude, magnitude).to(tl.int64)


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """fp32 value of a key, +0 for 0."""
    key = key.to(tl.int32)
    magnitude = tl.where(key < 0, -key, key) << SHIFT
    value = magnitude.to(tl.float32, bitcast=True)
    return tl.where(key < 0, -value, value)


@triton.jit
def kept_weight(x, at, row_ptr, mask, scale):
    """exp((x - maximum) / T) of logits x at places `at`; 0 where the row does not keep them.

    row_ptr: to the four numbers of the row, or one for each x.
    """
    maximum = tl.load(row_ptr, mask=mask, other=0.0)
    threshold = tl.load(row_ptr + 2, mask=mask, other=0.0)
    first = tl.load(row_ptr + 3, mask=mask, other=0.0).to(tl.int32)
    kept = (x > threshold) | ((x == threshold) & (at >= first))
    return tl.where(kept, tl.exp2((x - maximum) * scale), 0.0)


@triton.jit
def row_sums_kernel(
    logits_ptr,  # [R, V]
    tops_ptr,  # [R, PARTS] fp32, out
    parts_ptr,  # [R, PARTS] fp32, out
    rows_ptr,  # [R, 4] fp32, out
    counters_ptr,  # [>= R] int32, zeros
    stride,
    scale,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Maximum and normaliser of rows that are kept whole."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    after_predecessor(DEPENDENT)
    # A Python float reaches a kernel inside torch.compile as fp64.
    scale = tl.full([], scale, tl.float32)

    at = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    # -inf alone gives no NaN here; NaN and +inf do, and so spoil the sum.
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((x - base) * scale), axis=0)
    tl.store(tops_ptr + row * PARTS + part, top)
    tl.store(parts_ptr + row * PARTS + part, total)

    if is_last(counters_ptr + row, PARTS):
        every = tl.arange(0, BLOCK_PARTS)
        here = every < PARTS
        cell = row * PARTS + every
        tops = tl.load(tops_ptr + cell, mask=here, other=float("-inf"), cache_modifier=".cg")
        parts = tl.load(parts_ptr + cell, mask=here, other=0.0, cache_modifier=".cg")
        maximum = tl.max(tops, axis=0)
        parts *= tl.exp2((tops - maximum) * scale)
        tl.store(parts_ptr + cell, parts, mask=here)
        tl.store(rows_ptr + row * 4, maximum)
        tl.store(rows_ptr + row * 4 + 1, tl.sum(parts, axis=0))
        tl.store(rows_ptr + row * 4 + 2, float("-inf"))
        tl.store(rows_ptr + row * 4 + 3, 0.0)


@triton.jit
def search_kernel(
    logits_ptr,  # [R, V]
    rows_ptr,  # [R, 4] fp32
    keys_ptr,  # [R, 2] int32, in and out: the threshold's key is in [lo, hi)
    sums_ptr,  # [R, 2] fp32, in and out: count or mass at hi or more, and what is to be reached
    partial_ptr,  # [R, PARTS, WAYS] fp32, scratch
    counters_ptr,  # [>= R] int32, zeros
    stride,
    scale,
    goal,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WAYS: tl.constexpr,
    SHIFT: tl.constexpr,
    BY_MASS: tl.constexpr,
    FIRST: tl.constexpr,
    AFTER_TOP_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Look for the largest threshold at or above which are `goal` tokens, or that share of the
    mass: leave one of WAYS parts of its range. Once that is one value, as in void rows, nothing."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    after_predecessor(DEPENDENT)
    scale = tl.full([], scale, tl.float32)
    goal = tl.full([], goal, tl.float32)

    maximum = tl.load(rows_ptr + row * 4)
    total = tl.load(rows_ptr + row * 4 + 1)
    lowest = -(tl.full([], 0x7F800000, tl.int64) >> SHIFT)
    low = lowest
    high = key_of(maximum, SHIFT) + 1
    above = tl.full([], 0.0, tl.float32)
    target = goal
    is_open = total == total
    if FIRST:
        if AFTER_TOP_K:
            low = tl.load(keys_ptr + row * 2).to(tl.int64)
        elif BY_MASS:
            target = goal * total
            # V tokens at or below this have half of the mass that may be dropped, or less.
            share = (1.0 - goal) * total / V
            bound = maximum + (tl.log2(share) - 1.0) / scale
            low = tl.maximum(key_of(bound, SHIFT) - 1, lowest)
    else:
        low = tl.load(keys_ptr + row * 2).to(tl.int64)
        high = tl.load(keys_ptr + row * 2 + 1).to(tl.int64)
        above = tl.load(sums_ptr + row * 2)
        target = tl.load(sums_ptr + row * 2 + 1)
        is_open = is_open & (high - low > 1)

    if is_open:
        at = part * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * stride + at, mask=at < V, other=float("-inf"))
        x = x.to(tl.float32)
        weight = tl.exp2((x - maximum) * scale)
        way = tl.arange(0, WAYS)
        found = tl.zeros([WAYS], tl.float32)
        for n in tl.static_range(0 if FIRST and AFTER_TOP_K else 1, WAYS):
            border = value_of(low + (high - low) * n // WAYS, SHIFT)
            if BY_MASS:
                reached = tl.sum(tl.where(x >= border, weight, 0.0), axis=0)
            else:
                reached = tl.sum((x >= border).to(tl.int32), axis=0).to(tl.float32)
            found = tl.where(way == n, reached, found)
        tl.store(partial_ptr + (row * PARTS + part) * WAYS + way, found)

        if is_last(counters_ptr + row, PARTS):
            every = tl.arange(0, BLOCK_PARTS)[:, None]
            partial = tl.load(
                partial_ptr + (row * PARTS + every) * WAYS + way[None, :],
                mask=every < PARTS,
                other=0.0,
                cache_modifier=".cg",
            )
            sums = tl.sum(partial, axis=0)
            if FIRST and AFTER_TOP_K:
                target = goal * tl.sum(tl.where(way == 0, sums, 0.0), axis=0)
            # Sums fall from way to way, rounded alike. What rounding denies to the lowest it has.
            last = tl.sum(((sums >= target) & (way > 0)).to(tl.int32), axis=0)
            beyond = tl.sum(tl.where(way == last + 1, sums, 0.0), axis=0)
            above = tl.where(last + 1 < WAYS, beyond, above)
            tl.store(keys_ptr + row * 2, (low + (high - low) * last // WAYS).to(tl.int32))
            tl.store(keys_ptr + row * 2 + 1, (low + (high - low) * (last + 1) // WAYS).to(tl.int32))
            tl.store(sums_ptr + row * 2, above)
            tl.store(sums_ptr + row * 2 + 1, target)


@triton.jit
def settle_kernel(
    logits_ptr,  # [R, V]
    keys_ptr,  # [R, 2] int32
    sums_ptr,  # [R, 2] fp32
    equals_ptr,  # [R, PARTS] int32, scratch
    parts_ptr,  # [R, PARTS] fp32, out
    rows_ptr,  # [R, 4] fp32, in and out
    counters_ptr,  # [>= R] int32, zeros
    stride,
    scale,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    BY_MASS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Normaliser over what is kept, and which of the tokens at the threshold are."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    after_predecessor(DEPENDENT)
    scale = tl.full([], scale, tl.float32)

    maximum = tl.load(rows_ptr + row * 4)
    total = tl.load(rows_ptr + row * 4 + 1)
    if total == total:
        threshold = value_of(tl.load(keys_ptr + row * 2), SHIFT)
        lane = tl.arange(0, BLOCK)
        at = part * BLOCK + lane
        x = tl.load(logits_ptr + row * stride + at, mask=at < V, other=float("-inf"))
        x = x.to(tl.float32)
        more = tl.sum(tl.where(x > threshold, tl.exp2((x - maximum) * scale), 0.0), axis=0)
        equal = tl.sum(((x == threshold) & (at < V)).to(tl.int32), axis=0)
        tl.store(parts_ptr + row * PARTS + part, more)
        tl.store(equals_ptr + row * PARTS + part, equal)

        if is_last(counters_ptr + row, PARTS):
            every = tl.arange(0, BLOCK_PARTS)
            here = every < PARTS
            cell = row * PARTS + every
            parts = tl.load(parts_ptr + cell, mask=here, other=0.0, cache_modifier=".cg")
            equals = tl.load(equals_ptr + cell, mask=here, other=0, cache_modifier=".cg")
            kept = equals
            first = tl.full([], 0, tl.int32)
            weight = tl.exp2((threshold - maximum) * scale)
            if BY_MASS:
                # Of equal tokens the last ones, as many as the target still needs.
                ties = tl.sum(equals, axis=0)
                missing = tl.load(sums_ptr + row * 2 + 1) - tl.load(sums_ptr + row * 2)
                need = tl.where(weight > 0.0, tl.ceil(missing / weight), ties.to(tl.float32))
                need = tl.minimum(tl.maximum(need, 1.0), ties.to(tl.float32)).to(tl.int32)
                later = ties - tl.cumsum(equals, axis=0)
                kept = tl.minimum(tl.maximum(need - later, 0), equals)
                at_border = (later < need) & (need <= later + equals)
                border = tl.max(tl.where(at_border, every, 0), axis=0)
                skipped = tl.sum(tl.where(every == border, equals - kept, 0), axis=0)
                at = border * BLOCK + lane
                x = tl.load(logits_ptr + row * stride + at, mask=at < V, other=float("-inf"))
                x = x.to(tl.float32)
                tied = (x == threshold) & (at < V)
                rank = tl.cumsum(tied.to(tl.int32), axis=0)
                first = tl.min(tl.where(tied & (rank > skipped), at, V), axis=0)
            parts += kept.to(tl.float32) * weight
            tl.store(parts_ptr + cell, parts, mask=here)
            tl.store(rows_ptr + row * 4 + 1, tl.sum(parts, axis=0))
            tl.store(rows_ptr + row * 4 + 2, threshold)
            tl.store(rows_ptr + row * 4 + 3, first.to(tl.float32))


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
    at, end, p_ptr, q_ptr, p_row_ptr, q_row_ptr, scale, V: tl.constexpr, DRAFT_V: tl.constexpr
):
    """max(p - q, 0) at places `at` before `end`. A NaN stays one: no sum over it is positive."""
    here = at < end
    x = tl.load(p_ptr + at, mask=here & (at < V), other=float("-inf")).to(tl.float32)
    p = kept_weight(x, at, p_row_ptr, True, scale) / tl.load(p_row_ptr + 1)
    x = tl.load(q_ptr + at, mask=here & (at < DRAFT_V), other=float("-inf")).to(tl.float32)
    q = kept_weight(x, at, q_row_ptr, True, scale) / tl.load(q_row_ptr + 1)
    return tl.where(p - q <= 0.0, 0.0, p - q)


@triton.jit
def reject_logits_kernel(
    draft_tokens_ptr,  # [B, K] int64, -1 where the draft had no token
    lens_ptr,  # [B] int64 or int32
    draft_logits_ptr,  # [B, K, DRAFT_V]
    draft_rows_ptr,  # [B, K, 4] fp32
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
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    after_predecessor(DEPENDENT)
    scale = tl.full([], scale, tl.float32)

    # 1. Every program counts the acceptances: K numbers are cheaper than another kernel.
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

    # 2. Mass of the residual in this part, where there was a rejection.
    rejected = accepted < length
    lane = tl.arange(0, BLOCK)
    p_ptr = target_logits_ptr + accepted.to(tl.int64) * target_stride_k
    p_row_ptr = target_rows_ptr + accepted * 4
    q_ptr = draft_logits_ptr
    q_row_ptr = draft_rows_ptr
    if K > 0:
        # After the last place q is not read, but has an address.
        behind = tl.minimum(accepted, K - 1)
        q_ptr += behind.to(tl.int64) * draft_stride_k
        q_row_ptr += behind * 4
        if rejected:
            weight = residual_weight(
                part * BLOCK + lane, V, p_ptr, q_ptr, p_row_ptr, q_row_ptr, scale, V, DRAFT_V
            )
            tl.store(residuals_ptr + row * PARTS + part, tl.sum(weight, axis=0))

    # 3. The last program draws one token, from the residual or from p.
    if is_last(counters_ptr + row, PARTS):
        every = tl.arange(0, BLOCK_PARTS)
        here = every < PARTS
        cell = (row * (K + 1) + accepted) * PARTS + every
        sums = tl.load(target_parts_ptr + cell, mask=here, other=0.0)
        from_residual = rejected
        if K > 0:
            residuals = tl.load(
                residuals_ptr + row * PARTS + every,
                mask=every < tl.where(rejected, PARTS, 0),
                other=0.0,
                cache_modifier=".cg",
            )
            from_residual = tl.sum(residuals, axis=0) > 0.0
            sums = tl.where(from_residual, residuals, sums)
        level = tl.load(sample_noise_ptr + row * sample_stride + accepted)
        level *= tl.sum(sums, axis=0)
        drawn = first_above(sums, 0.0, level, every, PARTS)
        before = tl.sum(tl.where(every < drawn, sums, 0.0), axis=0)
        at = drawn * BLOCK + lane
        x = tl.load(p_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
        weights = kept_weight(x, at, p_row_ptr, True, scale)
        if K > 0:
            end = tl.where(from_residual, V, 0)
            residual = residual_weight(
                at, end, p_ptr, q_ptr, p_row_ptr, q_row_ptr, scale, V, DRAFT_V
            )
            weights = tl.where(from_residual, residual, weights)
        own = drawn * BLOCK + first_above(weights, before, level, lane, BLOCK)
        own = tl.minimum(own, V - 1)

        totals = tl.load(
            target_rows_ptr + place * 4 + 1, mask=(place <= length) & (place <= K), other=1.0
        )
        void = tl.max((totals != totals).to(tl.int32), axis=0) > 0
        spoilt = tl.max((drafted & (drafts < 0)).to(tl.int32), axis=0) > 0
        out = tl.where(place == accepted, own, -1).to(tl.int64)
        out = tl.where(place < accepted, drafts, out)
        out = tl.where(void, -1, out)
        tl.store(tokens_ptr + row * (K + 1) + place, out, mask=place <= K)
        told = tl.where(spoilt, -2, tl.where(void, -1, accepted))
        tl.store(accepted_ptr + row, told.to(tl.int64))


def _scale(temperature: float) -> float:
    """Of the exponent of 2."""
    assert temperature > 0.0
    return math.log2(math.e) / max(temperature, TINY)


def _cut(vocabulary: int, parts: int) -> dict[str, int]:
    """Constants for rows that are cut into `parts`."""
    block = next(size for size in BLOCKS if triton.cdiv(vocabulary, size) == parts)
    return {
        "V": vocabulary,
        "PARTS": parts,
        "BLOCK_PARTS": triton.next_power_of_2(parts),
        "BLOCK": block,
    }


def _dependence(logits: Tensor) -> dict[str, bool]:
    dependent = dependent_launch(logits)
    return {"DEPENDENT": dependent, **({"launch_pdl": True} if dependent else {})}


def logit_rows_triton(logits: Tensor, temperature: float, top_k: int, top_p: float) -> LogitRows:
    """See `ops.logit_rows`."""
    num_rows, vocabulary = logits.shape
    assert logits.stride(1) == 1 and num_rows <= COUNTERS and logits.dtype in SHIFT
    is_many = num_rows * triton.cdiv(vocabulary, BLOCKS[1]) > FEW_PROGRAMS
    parts = triton.cdiv(vocabulary, BLOCKS[is_many])
    device, scale = logits.device, _scale(temperature)
    constants = _cut(vocabulary, parts) | _dependence(logits)
    found = LogitRows(
        torch.empty((num_rows, 4), dtype=torch.float32, device=device),
        torch.empty((num_rows, parts), dtype=torch.float32, device=device),
    )
    grid = (num_rows, parts)
    count = counters(device)
    tops = torch.empty((num_rows, parts), dtype=torch.float32, device=device)
    row_sums_kernel[grid](
        logits, tops, found.parts, found.rows, count, logits.stride(0), scale, **constants
    )
    has_top_k, has_top_p = 0 < top_k < vocabulary, top_p < 1.0
    if not (has_top_k or has_top_p):
        return found

    keys = torch.empty((num_rows, 2), dtype=torch.int32, device=device)
    sums = torch.empty((num_rows, 2), dtype=torch.float32, device=device)
    ways, shift = WAYS[is_many], SHIFT[logits.dtype]
    passes = math.ceil(BITS[logits.dtype] / math.log2(ways))
    partial = torch.empty((num_rows, parts, ways), dtype=torch.float32, device=device)
    goals = [(False, float(top_k))] * has_top_k + [(True, float(top_p))] * has_top_p
    for by_mass, goal in goals:
        for step in range(passes):
            search_kernel[grid](
                *(logits, found.rows, keys, sums, partial, count),
                *(logits.stride(0), scale, goal),
                WAYS=ways,
                SHIFT=shift,
                BY_MASS=by_mass,
                FIRST=step == 0,
                AFTER_TOP_K=by_mass and has_top_k,
                **constants,
            )
    equals = torch.empty((num_rows, parts), dtype=torch.int32, device=device)
    settle_kernel[grid](
        *(logits, keys, sums, equals, found.parts, found.rows, count),
        *(logits.stride(0), scale),
        SHIFT=shift,
        BY_MASS=has_top_p,
        **constants,
    )
    return found


def sample_logits_triton(
    logits: Tensor, stats: LogitRows, temperature: float, noise: Tensor
) -> Tensor:
    """See `ops.sample_logits`."""
    num_rows, vocabulary = logits.shape
    assert logits.stride(1) == 1 and stats.rows.is_contiguous() and stats.parts.is_contiguous()
    assert noise.shape == (num_rows,) and stats.rows.shape == (num_rows, 4)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    sample_logits_kernel[(num_rows,)](
        *(logits, stats.rows, stats.parts, noise, out),
        *(logits.stride(0), noise.stride(0), _scale(temperature)),
        num_warps=8,
        **_cut(vocabulary, stats.parts.shape[1]),
        **_dependence(logits),
    )
    return out


def reject_logits_triton(
    draft_tokens: Tensor,
    lens: Tensor,
    draft_logits: Tensor,
    draft_rows: Tensor,
    target_logits: Tensor,
    target: LogitRows,
    temperature: float,
    accept_noise: Tensor,
    sample_noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """See `ops.reject_logits`."""
    (batch, width), vocabulary = draft_tokens.shape, target_logits.shape[2]
    assert target_logits.shape[:2] == (batch, width + 1) and draft_logits.shape[:2] == (
        batch,
        width,
    )
    assert draft_rows.shape == (batch, width, 4) and target.rows.shape == (batch * (width + 1), 4)
    assert draft_logits.shape[2] <= vocabulary
    assert lens.shape == (batch,) and lens.is_contiguous() and batch <= COUNTERS
    assert width == 0 or draft_tokens.stride(1) == accept_noise.stride(1) == 1
    assert accept_noise.shape == (batch, width) and sample_noise.shape == (batch, width + 1)
    assert target_logits.stride(2) == 1 and (width == 0 or draft_logits.stride(2) == 1)
    assert all(t.is_contiguous() for t in (draft_rows, *target))
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
        _scale(temperature),
        DRAFT_V=draft_logits.shape[2],
        K=width,
        BLOCK_K=triton.next_power_of_2(width + 1),
        num_warps=8,
        **_cut(vocabulary, parts),
        **_dependence(target_logits),
    )
    return tokens, accepted
