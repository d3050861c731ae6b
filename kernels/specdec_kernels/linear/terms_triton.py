"""Splits each value of bf16 rows into a sum of two fp8 terms. Tensor cores can multiply these by
fp8 codes, and by four-bit codes, which are also valid e4m3 values.

A bf16 has 8 significant bits and an e4m3 has 4. The first term has the value's first four bits, and
the second term has the rest. Each row is first scaled by a power of two, so that its largest value
lies between 128 and 256. Then the sum of both terms is exact for values down to 2^-9 of the row's
largest. For smaller values the error is at most 2^-16 of the largest.

The kernel can also add up x over blocks of columns. `terms_sums_triton` needs these sums to
subtract the zeros of codes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.gpu import power_of_2_from
from specdec_kernels.launch_triton import after_predecessor, dependence

TERMS = tl.constexpr(2)


@triton.jit
def terms_kernel(
    x_ptr,  # [T, K]
    terms_ptr,  # [T, TERMS, K] e4m3, out
    scales_ptr,  # [T] fp32, out
    sums_ptr,  # [K / SUM, T] fp32, out; None if SUM is 0
    x_stride,
    K: tl.constexpr,
    SUM: tl.constexpr,  # columns per sum, or 0
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    after_predecessor(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < K, other=0.0).to(tl.float32)
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)  # bits of the largest |x|
    exponent = tl.maximum(bits >> 23, 8)  # at least 8, so that both factors below are normal
    x *= ((261 - exponent) << 23).to(tl.float32, bitcast=True)
    scale = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    # Get the first term by truncating bits, not by rounding x to e4m3 and converting that back to
    # fp32: if a converted value is also packed into a word, ptxas 12.8 reads a wrong register.
    first = (x.to(tl.int32, bitcast=True) & -(1 << 20)).to(tl.float32, bitcast=True)
    second = (x - first).to(tl.float8e4nv)
    terms_ptr += row * (TERMS * K) + column
    tl.store(terms_ptr, first.to(tl.float8e4nv), mask=column < K)
    tl.store(terms_ptr + K, second, mask=column < K)
    # e4m3 has no infinity, so the terms cannot represent one. If a row has an infinity or a NaN,
    # set its scale to NaN, which makes all its results NaN.
    tl.store(scales_ptr + row, tl.where(bits < 0x7F800000, scale, float("nan")))
    if SUM > 0:
        part = tl.arange(0, BLOCK // SUM)
        sums = tl.sum(tl.reshape(x, [BLOCK // SUM, SUM]), axis=1)
        place = part.to(tl.int64) * tl.num_programs(0) + row
        tl.store(sums_ptr + place, sums, mask=part < K // SUM)


@triton.jit
def sum_of_terms(sums):
    """Add up the results for the terms of each row: sums [N, M * TERMS], where the terms of a row
    are adjacent, become [N, M]."""
    M: tl.constexpr = sums.shape[1] // TERMS
    return tl.sum(tl.reshape(sums, [sums.shape[0], M, TERMS]), axis=2)


def terms_triton(x: Tensor, summed: int = 0) -> tuple[Tensor, Tensor, Tensor | None]:
    """Split x [T, K] bf16 into two e4m3 terms per value.

    summed: the number of columns per sum of x, a power of two that divides K; 0 for no sums.

    Returns:
        Terms [T, 2, K] e4m3.
        Scales [T] fp32; x is terms.sum(1) times the scales of its rows.
        Sums [K / summed, T] fp32: x / scales, added up over every `summed` columns; None if
            `summed` is 0.
    """
    num_rows, width = x.shape
    assert not summed or width % summed == 0
    terms = torch.empty(num_rows, TERMS.value, width, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block, sums = power_of_2_from(width), None
    if summed:
        sums = torch.empty(width // summed, num_rows, dtype=torch.float32, device=x.device)
    terms_kernel[(num_rows,)](
        *(x, terms, scales, sums, x.stride(0)),
        K=width,
        SUM=summed,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **dependence(x),
    )
    return terms, scales, sums
