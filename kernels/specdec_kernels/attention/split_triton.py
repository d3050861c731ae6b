"""Functions that split a context into parts, one program per part, and combine the partial results.

This is Flash-Decoding (Dao, Haziza, Massa and Sizov, 2023). Maxima are those of the scaled scores
times log2(e), as in `softmax_triton`.
"""

import triton
import triton.language as tl

from specdec_kernels.attention.softmax_triton import finite, weighted_mean

BESIDE = tl.constexpr(8)
NOTHING = tl.constexpr(-(0x800000 << 32))  # `packed_stats` for a maximum of -inf and a sum of 0


@triton.jit
def part_of(keys, part, alone, min_keys, UNIT: tl.constexpr, CUT: tl.constexpr):
    """Divide `keys` older keys into at most CUT.splits parts. Return the number of parts, and the
    begin and end of part `part`, counted from the first of these keys.

    All parts but the first and the last have the same number of keys, at least `min_keys`. The last
    part may have fewer. Part 0 also processes the new keys, which arrive later and need more work.
    It therefore normally gets `min_keys` fewer older keys than the others, which makes the others
    larger. If they would then need another tile of CUT.block_n keys, part 0 gets as many keys as
    the others. If there are at most `alone` keys, part 0 gets all of them.
    """
    least = tl.cdiv(min_keys, UNIT) * UNIT
    share = tl.cdiv(tl.maximum(tl.cdiv(keys, CUT.splits), least), UNIT) * UNIT
    wider = tl.cdiv(tl.maximum(tl.cdiv(keys + least, CUT.splits), least), UNIT) * UNIT
    fewer = least
    if tl.cdiv(wider, CUT.block_n) > tl.cdiv(share, CUT.block_n):
        fewer = 0
    else:
        share = wider
    own = tl.where(keys <= alone, keys, share - fewer)
    parts = tl.cdiv(tl.maximum(keys - own, 0), share) + 1
    first = tl.where(part > 0, own + (part - 1) * share, 0)
    return parts, first, tl.minimum(keys, own + part * share)


@triton.jit
def packed_stats(row_max, row_sum):
    """Pack a row's maximum and sum over one part into 64 bits, so that one load reads both."""
    upper = row_max.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return upper | (row_sum.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def store_part(
    partial_ptr,  # [parts, M, BLOCK_D] fp32, out
    stats_ptr,  # [parts, M] int64, `packed_stats`, out
    part,
    softmax,  # maxima, sums, and weighted values
    row_live,
    CUT: tl.constexpr,
):
    """Store one part's maxima and sums for all rows, and weighted values for live rows."""
    row_max, row_sum, acc = softmax
    row = tl.arange(0, CUT.block_m)
    dim = tl.arange(0, CUT.block_d)
    tl.store(stats_ptr + part * CUT.block_m + row, packed_stats(row_max, row_sum))
    inside = row[:, None] * CUT.block_d + dim[None, :]
    tl.store(partial_ptr + part * (CUT.block_m * CUT.block_d) + inside, acc, mask=row_live[:, None])


@triton.jit
def few_parts(
    partial_ptr,  # [parts, M, BLOCK_D] fp32
    stats_ptr,  # [parts, M] int64: `packed_stats`
    parts,
    row,  # [R], indices of rows
    CUT: tl.constexpr,
):
    """Combine the parts of a softmax. Returns maxima [R], sums [R] and weighted values [R,
    BLOCK_D].

    Every thread iterates over all parts, so threads need not exchange data. The loads are
    independent, so all are in flight together.
    """
    PARTS: tl.constexpr = CUT.few_parts
    dim = tl.arange(0, CUT.block_d)
    maxima, sums, values = (), (), ()
    row_max = tl.full(row.shape, float("-inf"), tl.float32)
    for part in tl.static_range(PARTS):
        there = row < tl.where(part < parts, CUT.block_m, 0)
        at = part * CUT.block_m + row
        stats = tl.load(stats_ptr + at, mask=there, other=NOTHING, cache_modifier=".cg")
        part_max = (stats >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        row_max = tl.maximum(row_max, part_max)
        maxima += (part_max,)
        sums += (stats.to(tl.int32).to(tl.float32, bitcast=True),)
        at = partial_ptr + at[:, None] * CUT.block_d + dim[None, :]
        values += (tl.load(at, mask=there[:, None], other=0.0, cache_modifier=".cg"),)
    base = finite(row_max)
    row_sum = tl.zeros(row.shape, tl.float32)
    acc = tl.zeros([row.shape[0], dim.shape[0]], tl.float32)
    for part in tl.static_range(PARTS):
        weight = tl.exp2(maxima[part] - base)
        row_sum += sums[part] * weight
        acc += values[part] * weight[:, None]
    return row_max, row_sum, acc


@triton.jit
def many_parts(partial_ptr, stats_ptr, parts, row, CUT: tl.constexpr):
    """Do the same as `few_parts`, but for many parts. An unrolled loop over all of them would take
    long to compile, so each iteration processes BESIDE parts side by side. The BESIDE partial sums
    are added up at the end."""
    PARTS: tl.constexpr = CUT.splits
    beside = tl.arange(0, BESIDE)
    dim = tl.arange(0, CUT.block_d)
    maxima, sums, values = (), (), ()
    top = tl.full([row.shape[0], BESIDE], float("-inf"), tl.float32)
    for first in tl.static_range(0, PARTS, BESIDE):
        part = first + beside[None, :]
        there = (part < parts) & (row < CUT.block_m)[:, None]
        at = part * CUT.block_m + row[:, None]
        stats = tl.load(stats_ptr + at, mask=there, other=NOTHING, cache_modifier=".cg")
        part_max = (stats >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        top = tl.maximum(top, part_max)
        maxima += (part_max,)
        sums += (stats.to(tl.int32).to(tl.float32, bitcast=True),)
        at = partial_ptr + at[:, :, None] * CUT.block_d + dim[None, None, :]
        values += (tl.load(at, mask=there[:, :, None], other=0.0, cache_modifier=".cg"),)
    row_max = tl.max(top, axis=1)
    base = finite(row_max)[:, None]
    total = tl.zeros([row.shape[0], BESIDE], tl.float32)
    acc = tl.zeros([row.shape[0], BESIDE, dim.shape[0]], tl.float32)
    for index in tl.static_range(0, (PARTS + BESIDE - 1) // BESIDE):
        weight = tl.exp2(maxima[index] - base)
        total += sums[index] * weight
        acc += values[index] * weight[:, :, None]
    return row_max, tl.sum(total, axis=1), tl.sum(acc, axis=1)


@triton.jit
def combine_rows(
    memory,  # (partial_ptr, stats_ptr, sinks_ptr or None, out_ptr at the key head's first row)
    span,  # (first row, end of rows, step, number of parts, first query head of the key head)
    FORM: tl.constexpr,
    CUT: tl.constexpr,
    FEW: tl.constexpr,
):
    """Combine the parts of some rows, and store the results.

    Each iteration processes a group of consecutive rows. Groups begin at `first`, `first + step`
    and so on. Other programs process the rows between these groups.

    FEW: True if there are at most CUT.few_parts parts.
    """
    HEADS: tl.constexpr = FORM.kv_heads * FORM.group
    partial_ptr, stats_ptr, sinks_ptr, out_ptr = memory
    first, rows, step, parts, head = span
    for start in range(first, rows, step):
        row = start + tl.arange(0, CUT.few_rows if FEW else CUT.many_rows)
        dim = tl.arange(0, CUT.block_d)
        if FEW:
            row_max, row_sum, acc = few_parts(partial_ptr, stats_ptr, parts, row, CUT)
        else:
            row_max, row_sum, acc = many_parts(partial_ptr, stats_ptr, parts, row, CUT)
        live = row < rows
        acc = weighted_mean(row_max, row_sum, acc, sinks_ptr, head + row % FORM.group, live)
        at = row // FORM.group * (HEADS * FORM.dim) + row % FORM.group * FORM.dim
        out_at = out_ptr + at[:, None] + dim[None, :]
        mask = live[:, None] & (dim < FORM.dim)[None, :]
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=mask)
