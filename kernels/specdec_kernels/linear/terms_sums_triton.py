"""Multiplies the fp8 terms of x (see `terms_triton`) by four-bit codes.

A byte whose low four bits are a code n, and whose other bits are 0, is a valid e4m3 with the value
n * CODE, where CODE is 2^-9. So codes need no decoding: it is enough to separate the two codes of
each byte, which takes less than one instruction for both. A block of codes is the left operand of
one matmul, in registers.

To subtract zeros from the codes, the kernel would have to decode the codes first. Instead, a
separate matmul multiplies the sums of x over each block by the products of the block's scales and
zeros, and its result is subtracted. This is possible because a block of codes has one scale and one
zero per row. If each row has a single scale, it is applied at the end.
"""

import triton
import triton.language as tl

from specdec_kernels.linear.decode_triton import CODE, block_as_fp8, scale_of
from specdec_kernels.linear.few_rows_triton import add_product, load_weight
from specdec_kernels.linear.stored import BLOCK
from specdec_kernels.linear.stored_groups_triton import groups_of
from specdec_kernels.linear.terms_triton import sum_of_terms

COLUMNS = tl.constexpr(BLOCK)
BYTES = tl.constexpr(BLOCK // 2)
AT_ONCE = tl.constexpr(32)  # blocks of codes per step of `part_of_zeros`
LIFT = tl.constexpr(2.0**24)  # factor for scales, since a matmul reads denormal numbers as zero


@triton.jit
def add_block(x, codes, scale, sums, FORM: tl.constexpr):
    """Multiply x by a block of codes. If the block has its own scales, multiply by these, too. Add
    the results to `sums`, and return `sums`.

    The results contain the factor CODE, because the codes are read as e4m3.

    x: [M * TERMS, COLUMNS]. codes: bytes [N, BYTES]. sums: [N, M].
    """
    none = tl.zeros([codes.shape[0], x.shape[0]], tl.float32)
    found = sum_of_terms(add_product(x, block_as_fp8(codes), none, 1, True))
    if FORM.wide > 0:
        found *= scale_of(scale)
    return sums + found


@triton.jit
def part_of_zeros(
    sums,  # [N, M]; only its shape is used
    x_sums,
    scales,
    zeros,
    live,
    first,
    stop,
    K: tl.constexpr,
    FORM: tl.constexpr,
):
    """Return the part of the sums [N, M] that is due to the zeros and must be subtracted: the sums
    of x times the scales times the zeros. Like the sums, it contains the factor CODE.

    The arguments are as in `sums_of_blocks`.
    """
    pointer, num_rows, row, row_live = x_sums
    part = tl.zeros(sums.shape, tl.float32)
    for begin in tl.range(first // BYTES, stop // BYTES, AT_ONCE, num_stages=1):
        block = begin + tl.arange(0, AT_ONCE)
        inside = block < tl.minimum(stop // BYTES, K // COLUMNS)
        group = block * 0
        if FORM.wide > 0:
            group = block * COLUMNS // FORM.wide
        mask = live[:, None] & inside[None, :]
        shift = tl.full(mask.shape, 8 * LIFT, tl.float32)
        if FORM.has_zeros:
            zero = tl.load(zeros[:, None] + group[None, :], mask=mask, other=0)
            shift = zero.to(tl.float32) * LIFT
        if FORM.wide > 0:
            shift *= scale_of(tl.load(scales[:, None] + group[None, :], mask=mask, other=0.0))
        place = block.to(tl.int64)[:, None] * num_rows + row[None, :]
        x_sum = tl.load(pointer + place, mask=inside[:, None] & row_live[None, :], other=0.0)
        part = tl.dot(shift, x_sum * (CODE / LIFT), part, input_precision="tf32x3")
    return part


@triton.jit
def sums_of_blocks(
    x_rows,  # [M * TERMS] pointers to the rows of x's terms
    x_live,  # [M * TERMS], mask
    x_sums,  # a tuple: pointer to sums [K / COLUMNS, T], T, row numbers [M], mask of rows [M]
    codes,  # [N] pointers to the weight's rows of codes
    scales,  # [N] pointers to the scales of these rows
    zeros,  # [N] pointers to the zeros of these rows
    codes_up,  # pointers for the up projection, read only if GATED
    scales_up,
    zeros_up,
    live,  # [N], mask of the weight's rows
    first,  # the first byte to read in each row of the weight
    stop,
    sums,  # [N, M] fp32
    sums_up,
    K: tl.constexpr,
    FORM: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,  # whether the columns form whole blocks, so that no mask is needed
):
    """Multiply x by the codes in bytes `first` to `stop` of the weight's rows, with their zeros
    subtracted. Add the results, times CODE, to `sums` and `sums_up`, and return both. If each row
    has a single scale, it is not applied here."""
    scale, _ = groups_of(scales, zeros, 2 * first, live, FORM, 1)
    scale_up = scale
    if GATED:
        scale_up, _ = groups_of(scales_up, zeros_up, 2 * first, live, FORM, 1)
    for start in range(first, stop, BYTES):
        # Load scales one block ahead: the compiler's pipeline only prefetches operands of matmuls.
        after = 2 * (start + BYTES)
        next_scale, _ = groups_of(scales, zeros, after, live, FORM, 1)
        column = 2 * start + tl.arange(0, COLUMNS)
        byte = start + tl.arange(0, BYTES)
        x_mask, inside = x_live[:, None], (byte < K // 2)[None, :]
        if not EVEN:
            x_mask = x_mask & (column < K)[None, :]
        x = tl.load(x_rows[:, None] + column[None, :], mask=x_mask, other=0.0)
        tile = load_weight(codes[:, None] + byte[None, :], inside, EVEN)
        sums = add_block(x, tile, scale, sums, FORM)
        scale = next_scale
        if GATED:
            next_scale, _ = groups_of(scales_up, zeros_up, after, live, FORM, 1)
            tile = load_weight(codes_up[:, None] + byte[None, :], inside, EVEN)
            sums_up = add_block(x, tile, scale_up, sums_up, FORM)
            scale_up = next_scale
    sums -= part_of_zeros(sums, x_sums, scales, zeros, live, first, stop, K, FORM)
    if GATED:
        sums_up -= part_of_zeros(sums, x_sums, scales_up, zeros_up, live, first, stop, K, FORM)
    return sums, sums_up
