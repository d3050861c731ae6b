"""Softmax statistics of rows of logits, with temperature, top-k and top-p: Triton kernels.

A row is cut into parts with one program each, so that even a few rows use the whole GPU. The last
program to finish a row combines the row's parts. The normaliser is computed online, part by part
(Milakov and Gimelshein, arXiv 1805.02867). Probabilities are never stored.

Top-k and top-p need no sorting. Both keep the logits above a threshold, which is one of the values
that the dtype can represent (65281 in bf16). A search over these values finds the threshold in a
few passes. Each pass tries several values. For each value, it counts the tokens at or above it
(top-k) or adds up their probability mass (top-p).
"""

import math
from typing import NamedTuple

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
from specdec_kernels.sampling.reference import TINY, LogitRows

BLOCKS = (1024, 4096)  # tokens per program, for few and for many programs
FEW_PROGRAMS = 264
# Each pass of the search divides the remaining values into this many ranges, for few and for many
# programs. More ranges need fewer passes, but more sums per pass. With few rows, the number of
# passes determines the time; with many rows, the sums do.
WAYS = (16, 4)
# SHIFT: the number of low bits that are always zero when a dtype's values are converted to fp32.
# BITS: the number of remaining bits.
SHIFT = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}
BITS = {torch.bfloat16: 16, torch.float16: 19, torch.float32: 32}


@triton.jit
def key_of(value, SHIFT: tl.constexpr):
    """Map fp32 values to integers in the same order. Neighbouring values of the original dtype get
    consecutive integers, and both zeros get 0."""
    bits = value.to(tl.int32, bitcast=True)
    magnitude = (bits & 0x7FFFFFFF) >> SHIFT
    return tl.where(bits < 0, -magnitude, magnitude).to(tl.int64)


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """Return the fp32 value of a key from `key_of`; +0 for key 0."""
    key = key.to(tl.int32)
    magnitude = tl.where(key < 0, -key, key) << SHIFT
    value = magnitude.to(tl.float32, bitcast=True)
    return tl.where(key < 0, -value, value)


@triton.jit
def logits_at(logits_ptr, at, mask, V: tl.constexpr):
    """Load a row's logits at indices `at` as fp32; -inf outside `mask` and past its V entries."""
    return tl.load(logits_ptr + at, mask=mask & (at < V), other=float("-inf")).to(tl.float32)


@triton.jit
def kept_weight(x, at, row_ptr, mask, scale):
    """Return exp((x - maximum) / T) for logits x at indices `at`; 0 for tokens that top-k or top-p
    drop.

    row_ptr: pointer to the row's four statistics (`LogitRows.rows`), or one pointer for each x.
    scale: log2(e) / T.
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
    CUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the maximum and the normaliser of each row, without top-k and top-p."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    after_predecessor(DEPENDENT)
    # Inside torch.compile a Python float reaches a kernel as fp64.
    scale = tl.full([], scale, tl.float32)

    at = part * CUT.block + tl.arange(0, CUT.block)
    x = logits_at(logits_ptr + row * stride, at, True, CUT.vocab)
    top = tl.max(x, axis=0)
    # If a part has only -inf, subtract 0 instead of its maximum, because -inf - -inf is NaN. A NaN
    # or +inf in the part still makes the sum NaN.
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2((x - base) * scale), axis=0)
    tl.store(tops_ptr + row * CUT.parts + part, top)
    tl.store(parts_ptr + row * CUT.parts + part, total)

    if is_last(counters_ptr + row, CUT.parts):
        every = tl.arange(0, CUT.block_parts)
        here = every < CUT.parts
        cell = row * CUT.parts + every
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
    keys_ptr,  # [R, 2] int32, in and out: (lo, hi); lo <= key of the threshold < hi
    sums_ptr,  # [R, 2] fp32, in and out: (count or mass of keys >= hi, target)
    partial_ptr,  # [R, PARTS, WAYS] fp32, scratch
    counters_ptr,  # [>= R] int32, zeros
    stride,
    scale,
    goal,
    CUT: tl.constexpr,
    WAYS: tl.constexpr,
    SHIFT: tl.constexpr,
    BY_MASS: tl.constexpr,
    FIRST: tl.constexpr,
    AFTER_TOP_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Narrow down the search for a threshold. For top-k, it is the largest value such that at least
    `goal` tokens are at or above it. For top-p (BY_MASS), it is the largest value such that the
    tokens at or above it have at least the share `goal` of the probability mass.

    Each call divides the range of keys into WAYS smaller ranges and keeps the one that contains the
    threshold. It changes nothing if only one value is left, or if the row's sum is NaN.
    """
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
            # Start the search at a lower bound. Even if all V tokens were at or below the bound,
            # they would have at most half of the mass that top-p may drop. So top-p drops all
            # tokens at or below the bound, and the threshold is above it.
            share = (1.0 - goal) * total / CUT.vocab
            bound = maximum + (tl.log2(share) - 1.0) / scale
            low = tl.maximum(key_of(bound, SHIFT) - 1, lowest)
    else:
        low = tl.load(keys_ptr + row * 2).to(tl.int64)
        high = tl.load(keys_ptr + row * 2 + 1).to(tl.int64)
        above = tl.load(sums_ptr + row * 2)
        target = tl.load(sums_ptr + row * 2 + 1)
        is_open = is_open & (high - low > 1)

    if is_open:
        at = part * CUT.block + tl.arange(0, CUT.block)
        x = logits_at(logits_ptr + row * stride, at, True, CUT.vocab)
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
        tl.store(partial_ptr + (row * CUT.parts + part) * WAYS + way, found)

        if is_last(counters_ptr + row, CUT.parts):
            every = tl.arange(0, CUT.block_parts)[:, None]
            partial = tl.load(
                partial_ptr + (row * CUT.parts + every) * WAYS + way[None, :],
                mask=every < CUT.parts,
                other=0.0,
                cache_modifier=".cg",
            )
            sums = tl.sum(partial, axis=0)
            if FIRST and AFTER_TOP_K:
                target = goal * tl.sum(tl.where(way == 0, sums, 0.0), axis=0)
            # `sums` holds the count or mass at or above the lower border of each range. It never
            # increases from one range to the next, even after rounding, because all sums are added
            # up in the same order. Choose the highest range whose sum reaches the target. The sum
            # of the lowest range is not checked: only rounding can leave it below the target.
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
    CUT: tl.constexpr,
    SHIFT: tl.constexpr,
    BY_MASS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Compute the normaliser over the kept tokens. Also find the first kept token among those equal
    to the threshold, and store its index."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    after_predecessor(DEPENDENT)
    scale = tl.full([], scale, tl.float32)

    maximum = tl.load(rows_ptr + row * 4)
    total = tl.load(rows_ptr + row * 4 + 1)
    if total == total:
        threshold = value_of(tl.load(keys_ptr + row * 2), SHIFT)
        lane = tl.arange(0, CUT.block)
        at = part * CUT.block + lane
        x = logits_at(logits_ptr + row * stride, at, True, CUT.vocab)
        more = tl.sum(tl.where(x > threshold, tl.exp2((x - maximum) * scale), 0.0), axis=0)
        equal = tl.sum(((x == threshold) & (at < CUT.vocab)).to(tl.int32), axis=0)
        tl.store(parts_ptr + row * CUT.parts + part, more)
        tl.store(equals_ptr + row * CUT.parts + part, equal)

        if is_last(counters_ptr + row, CUT.parts):
            every = tl.arange(0, CUT.block_parts)
            here = every < CUT.parts
            cell = row * CUT.parts + every
            parts = tl.load(parts_ptr + cell, mask=here, other=0.0, cache_modifier=".cg")
            equals = tl.load(equals_ptr + cell, mask=here, other=0, cache_modifier=".cg")
            kept = equals
            first = tl.full([], 0, tl.int32)
            weight = tl.exp2((threshold - maximum) * scale)
            if BY_MASS:
                # Of the tokens that equal the threshold, keep only as many as are needed to reach
                # the target: those with the highest indices.
                ties = tl.sum(equals, axis=0)
                missing = tl.load(sums_ptr + row * 2 + 1) - tl.load(sums_ptr + row * 2)
                need = tl.where(weight > 0.0, tl.ceil(missing / weight), ties.to(tl.float32))
                need = tl.minimum(tl.maximum(need, 1.0), ties.to(tl.float32)).to(tl.int32)
                later = ties - tl.cumsum(equals, axis=0)
                kept = tl.minimum(tl.maximum(need - later, 0), equals)
                at_border = (later < need) & (need <= later + equals)
                border = tl.max(tl.where(at_border, every, 0), axis=0)
                skipped = tl.sum(tl.where(every == border, equals - kept, 0), axis=0)
                at = border * CUT.block + lane
                x = logits_at(logits_ptr + row * stride, at, True, CUT.vocab)
                tied = (x == threshold) & (at < CUT.vocab)
                rank = tl.cumsum(tied.to(tl.int32), axis=0)
                first = tl.min(tl.where(tied & (rank > skipped), at, CUT.vocab), axis=0)
            parts += kept.to(tl.float32) * weight
            tl.store(parts_ptr + cell, parts, mask=here)
            tl.store(rows_ptr + row * 4 + 1, tl.sum(parts, axis=0))
            tl.store(rows_ptr + row * 4 + 2, threshold)
            tl.store(rows_ptr + row * 4 + 3, first.to(tl.float32))


def exponent_scale(temperature: float) -> float:
    """Return log2(e) / T, by which logits are multiplied to become exponents of 2."""
    assert temperature > 0.0
    return math.log2(math.e) / max(temperature, TINY)


class RowCut(NamedTuple):
    """The division of rows of logits into parts, as a compile-time constant for kernels."""

    vocab: int
    """V, the number of tokens."""
    parts: int
    block_parts: int
    """A power of 2, at least `parts`."""
    block: int
    """Tokens per part."""


def cut(vocabulary: int, parts: int) -> RowCut:
    """Return the division of rows of V = `vocabulary` logits into `parts` parts."""
    block = next(size for size in BLOCKS if triton.cdiv(vocabulary, size) == parts)
    return RowCut(vocabulary, parts, triton.next_power_of_2(parts), block)


def logit_rows_triton(logits: Tensor, temperature: float, top_k: int, top_p: float) -> LogitRows:
    """See `ops.logit_rows`."""
    num_rows, vocabulary = logits.shape
    assert logits.stride(1) == 1 and num_rows <= COUNTERS and logits.dtype in SHIFT
    is_many = num_rows * triton.cdiv(vocabulary, BLOCKS[1]) > FEW_PROGRAMS
    parts = triton.cdiv(vocabulary, BLOCKS[is_many])
    device, scale = logits.device, exponent_scale(temperature)
    constants = {"CUT": cut(vocabulary, parts)} | dependence(logits)
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
