"""Multiplies x in bf16 by mxfp4 codes.

Two bytes of a row hold four codes. Of two such pairs of bytes, which lie in one register, tensor
cores want every two codes of the same place in the two halves of a register. Shifts and masks move
the bits of an e2m1 code to where bf16 has its sign, its last exponent bits and its first mantissa
bit; a multiplication by the group's scale then gives the exact number. Three instructions a code
are left for everything, so x is stored in the order in which the codes come out: see `place_of`.

A program's tile has 64 rows, which the tensor cores read from registers. The weight is in the
order of `Stored.tiled`, so a program reads neighbouring bytes, and one load finds the four scales
of a row and a block.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.gpu import power_of_2_from
from specdec_kernels.launch_triton import INTERPRETED, after_predecessor, dependence
from specdec_kernels.linear.few_rows_triton import add_product
from specdec_kernels.linear.stored import BLOCK, Stored
from specdec_kernels.linear.stored_groups_triton import ROWS
from specdec_kernels.linear.tiles import is_tiled

COLUMNS = tl.constexpr(BLOCK)
WORDS = tl.constexpr(BLOCK // 4)  # pairs of bytes in a block of columns
# The numbers that tensor cores read are too small by this factor. Their exponents have to fit into
# bf16, which lacks the 126 that separate its exponents from those of e2m1.
LIFT = tl.constexpr(2.0**32)
# $4 has two words, $5 and $7 the scales of their low and high codes. Code 0 is in bits 3 to 0.
_NUMBERS = tl.constexpr(
    """{ .reg .b32 a, b;
    and.b32 a, $4, 0x000f000f; mul.lo.u32 a, a, 0x1040; and.b32 a, a, 0x81c081c0;
    mul.rn.bf16x2 $0, a, $5;
    and.b32 a, $4, 0x00f000f0; mul.lo.u32 a, a, 0x104; and.b32 a, a, 0x81c081c0;
    mul.rn.bf16x2 $1, a, $7;
    shr.b32 a, $4, 2; shl.b32 b, $4, 4; and.b32 b, b, 0x80008000;
    lop3.b32 a, a, 0x01c001c0, b, 0xea; mul.rn.bf16x2 $2, a, $5;
    shr.b32 a, $4, 6; and.b32 b, $4, 0x80008000;
    lop3.b32 a, a, 0x01c001c0, b, 0xea; mul.rn.bf16x2 $3, a, $7; }"""
)


@triton.jit
def place_of(column, K):
    """Return where x with K columns has a column for `mx_sums`. Each half of a block of 128 columns
    has its even columns first. A last block may be shorter."""
    block = column // COLUMNS * COLUMNS
    half = tl.minimum(K - block, COLUMNS) // 2
    column -= block
    low = tl.where(column < half, 0, half)
    column -= low
    return block + low + column % 2 * (half // 2) + column // 2


@triton.jit(do_not_specialize=["x_stride"])
def in_order_kernel(
    x_ptr,  # [T, K]
    out_ptr,  # [T, K], out
    x_stride,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    after_predecessor(DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + column, mask=column < K, other=0.0)
    tl.store(out_ptr + row * K + place_of(column, K), x, mask=column < K)


def in_order(x: Tensor, weight: Tensor | Stored) -> Tensor:
    """Return x [T, K] as the kernels of the weight read it: x, or for a tiled weight a copy that
    has the columns where `place_of` says."""
    if not is_tiled(weight):
        return x
    num_rows, width = x.shape
    assert x.stride(1) == 1
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    block = min(1024, power_of_2_from(width))
    in_order_kernel[(num_rows, triton.cdiv(width, block))](
        *(x, out, x.stride(0)), K=width, BLOCK_K=block, **dependence(x)
    )
    return out


@triton.jit
def as_factors(scales):
    """Return scales twice in bf16, divided by LIFT, and times the 2^126 by which `_NUMBERS` makes
    numbers too small."""
    return scales * 0x00800080 + (126 - 32) * 0x00800080


@triton.jit
def along_words(first, second):
    """Return the scales [N] of the first and of the second half of the words as factors, [N,
    WORDS]."""
    N: tl.constexpr = first.shape[0]
    both = as_factors(tl.join(first, second))
    return tl.reshape(tl.broadcast_to(both[:, :, None], [N, 2, WORDS // 2]), [N, WORDS])


@triton.jit
def block_of(words, scales):
    """Decode the words of a whole block. scales: [N] int32, four each, those of low codes in bits
    15 to 0."""
    low = along_words(scales & 255, scales >> 8 & 255)
    high = along_words(scales >> 16 & 255, scales >> 24 & 255)
    return numbers_of(words, low, high)


@triton.jit
def numbers_of(words, low, high):
    """Decode words of four codes each to bf16 [N, COLUMNS], divided by LIFT.

    words: [N, WORDS] int16.
    low, high: [N, WORDS], factors of the low and of the high codes.
    """
    N: tl.constexpr = words.shape[0]
    if INTERPRETED:
        words = words.to(tl.int32) & 0xFFFF
        even_low = e2m1(words, 0, low)
        even_high = e2m1(words, 4, high)
        odd_low = e2m1(words, 8, low)
        odd_high = e2m1(words, 12, high)
    else:
        even_low, even_high, odd_low, odd_high = tl.inline_asm_elementwise(
            _NUMBERS,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [words, low, high],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    # [N, WORDS, low or high, even or odd], in the order of `place_of`
    both = tl.join(tl.join(even_low, even_high), tl.join(odd_low, odd_high))
    return tl.reshape(tl.permute(both, (0, 2, 3, 1)), [N, COLUMNS])


@triton.jit
def e2m1(words, SHIFT: tl.constexpr, scale):
    """The codes from bit SHIFT of `words` on as bf16, times a factor."""
    code = words >> SHIFT
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    scale = (scale << 16).to(tl.float32, bitcast=True)
    return (bits.to(tl.float32, bitcast=True) * scale).to(tl.bfloat16)


@triton.jit
def mx_sums(
    x_rows,  # [M] pointers to rows of x, which has its columns where `place_of` says
    x_live,  # [M], mask
    codes_ptr,  # the bytes of a tiled weight
    scales_ptr,  # its scales
    row,  # [N] int64, the weight's rows; those of an expert follow those of the one before
    part,  # which of the parts to multiply
    K: tl.constexpr,
    FORM: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of columns that a step of the loop multiplies
    PARTS: tl.constexpr,  # the number of parts into which the columns are divided
    STAGES: tl.constexpr,
):
    """Multiply x by a part of the columns of the weight's rows: [N, M] fp32, divided by LIFT."""
    WHOLE: tl.constexpr = FORM.whole // COLUMNS
    STEPS: tl.constexpr = WHOLE // BLOCKS * BLOCKS
    SHARE: tl.constexpr = (STEPS + BLOCKS * PARTS - 1) // (BLOCKS * PARTS) * BLOCKS
    place = tl.arange(0, COLUMNS)
    word = tl.arange(0, WORDS)
    x_at = x_rows[:, None] + place[None, :]
    run = row // ROWS * ROWS
    words_at = codes_ptr.to(tl.pointer_type(tl.int16)) + run * (K // 4) + row % ROWS * WORDS
    words_at = words_at[:, None] + word[None, :]
    bytes_at = scales_ptr + run * FORM.groups
    scales_at = bytes_at.to(tl.pointer_type(tl.int32)) + row % ROWS
    x_mask = x_live[:, None]
    sums = tl.zeros([row.shape[0], x_rows.shape[0]], tl.float32)
    if STEPS > 0:
        begin = 0 if PARTS == 1 else part * SHARE
        end = STEPS if PARTS == 1 else tl.minimum(begin + SHARE, STEPS)
        held = ()
        for n in tl.static_range(BLOCKS):
            held += (tl.load(scales_at + (tl.minimum(begin, STEPS - BLOCKS) + n) * ROWS),)
        for block in tl.range(begin, end, BLOCKS, num_stages=STAGES):
            # Load scales one step ahead: the compiler's pipeline only prefetches operands of
            # matmuls.
            ahead = ()
            for n in tl.static_range(BLOCKS):
                following = tl.minimum(block + BLOCKS, STEPS - BLOCKS) + n
                ahead += (tl.load(scales_at + following * ROWS),)
            for n in tl.static_range(BLOCKS):
                x = tl.load(x_at + (block + n) * COLUMNS, mask=x_mask, other=0.0)
                words = tl.load(words_at + (block + n) * (ROWS * WORDS))
                sums = add_product(x, block_of(words, held[n]), sums, 1, True)
            held = ahead
    if PARTS == 1 or part == PARTS - 1:
        for n in tl.static_range(STEPS, WHOLE):
            x = tl.load(x_at + n * COLUMNS, mask=x_mask, other=0.0)
            words = tl.load(words_at + n * (ROWS * WORDS))
            numbers = block_of(words, tl.load(scales_at + n * ROWS))
            sums = add_product(x, numbers, sums, 1, True)
        if FORM.rest > 0:
            REST: tl.constexpr = FORM.rest // 2
            GROUPS: tl.constexpr = FORM.groups - 4 * WHOLE
            inside = (place % WORDS < REST)[None, :]
            at = WHOLE * COLUMNS + place // WORDS * REST + place % WORDS
            x = tl.load(x_rows[:, None] + at[None, :], mask=x_mask & inside, other=0.0)
            words_at += WHOLE * ROWS * WORDS
            words_at -= (row % ROWS * (WORDS - REST))[:, None]
            words = tl.load(words_at, mask=(word < REST)[None, :], other=0)
            bytes_at += row % ROWS * GROUPS + WHOLE * ROWS * 4
            first, last = (
                tl.load(bytes_at).to(tl.int32),
                tl.load(bytes_at + (GROUPS - 1)).to(tl.int32),
            )
            if GROUPS < 3:
                low, high = along_words(first, first), along_words(last, last)
            else:  # the middle one of three groups has the last low codes and the first high ones
                middle = tl.load(bytes_at + 1).to(tl.int32)
                low = along_words(first, middle)
                both = tl.where((word < WORDS // 4)[None, :], middle[:, None], last[:, None])
                high = as_factors(both)
            sums = add_product(x, numbers_of(words, low, high), sums, 1, True)
    return sums
