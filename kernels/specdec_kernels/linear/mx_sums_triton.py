"""Multiplies x in bf16 by mxfp4 codes.

Two bytes of a row hold four codes. Of two such pairs of bytes, which lie in one register, tensor
cores want every two codes of the same place in the two halves of a register. Shifts and masks move
the bits of an e2m1 code to where bf16 has its sign, its last exponent bits and its first mantissa
bit; a multiplication by the group's scale then gives the exact number. Three instructions a code
are left for everything, so x is stored in the order in which the codes come out: see `place_of`.

A program's tile has 64 rows, which the tensor cores read from registers, and reads at least 128
bytes of each row at a time. With 64 bytes, memory reached two thirds of the rate.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.gpu import CAPABILITY, gpu_of, power_of_2_from
from specdec_kernels.launch_triton import INTERPRETED, after_predecessor, dependence
from specdec_kernels.linear.few_rows_triton import add_product
from specdec_kernels.linear.stored import BLOCK, MXFP4, Stored

GROUP = 32  # columns that share a scale
READ = MXFP4, (1, GROUP)  # kind and group of the weights
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


def are_read_in_order(dtype: torch.dtype, *weights: Tensor | Stored) -> bool:
    """Return whether `mx_sums` multiplies x of a dtype by all these weights: x is bf16, the GPU has
    these matmuls, and groups of mxfp4 begin where halves of blocks do. In a last block of 96
    columns they do not."""
    return dtype == torch.bfloat16 and all(map(_is_read_in_order, weights))


def _is_read_in_order(weight: Tensor | Stored) -> bool:
    if isinstance(weight, Tensor) or (weight.storage.kind, weight.storage.group) != READ:
        return False
    is_whole = weight.shape[-1] % BLOCK in (0, GROUP, 2 * GROUP)
    return is_whole and gpu_of(weight.codes.device).capability == CAPABILITY


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


def in_order(x: Tensor, *weights: Tensor | Stored) -> Tensor:
    """Return x [T, K] as the kernels of these weights read it: x, or a copy that has the columns
    where `place_of` says."""
    if not are_read_in_order(x.dtype, *weights):
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
def scales_of(scales, block, live, FORM: tl.constexpr):
    """Load the scales of rows in a block of columns: the first two are those of the low codes.
    Return a tuple of [N], with two scales in 16 bits each if rows of scales have even addresses.

    scales: [N], pointers to the scales of rows.
    """
    if FORM.groups % 2 == 0:
        pairs = scales.to(tl.pointer_type(tl.uint16)) + 2 * block
        found = tl.load(pairs, mask=live, other=0), tl.load(pairs + 1, mask=live, other=0)
    else:
        found = ()
        for group in tl.static_range(4):
            found += (tl.load(scales + (4 * block + group), mask=live, other=0),)
    return found


@triton.jit
def along_words(first, second):
    """Return the scales [N] of the first and of the second half of the words, as [N, WORDS]: twice
    in bf16, divided by LIFT, and times the 2^126 by which `_NUMBERS` makes numbers too small."""
    N: tl.constexpr = first.shape[0]
    both = tl.join(first, second).to(tl.int32) * 0x00800080 + (126 - 32) * 0x00800080
    return tl.reshape(tl.broadcast_to(both[:, :, None], [N, 2, WORDS // 2]), [N, WORDS])


@triton.jit
def numbers_of(words, scales):
    """Decode words of four codes each to bf16 [N, COLUMNS], divided by LIFT.

    words: [N, WORDS] int16. scales: as `scales_of` returns them.
    """
    N: tl.constexpr = words.shape[0]
    if len(scales) == 2:
        low = along_words(scales[0] & 255, scales[0] >> 8)
        high = along_words(scales[1] & 255, scales[1] >> 8)
    else:
        low = along_words(scales[0], scales[1])
        high = along_words(scales[2], scales[3])
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
    """The codes from bit SHIFT of `words` on as bf16, times `scale` as `along_words` returns it."""
    code = words >> SHIFT
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    scale = (scale << 16).to(tl.float32, bitcast=True)
    return (bits.to(tl.float32, bitcast=True) * scale).to(tl.bfloat16)


@triton.jit
def mx_sums(
    x_rows,  # [M] pointers to rows of x, which has its columns where `place_of` says
    x_live,  # [M], mask
    codes,  # [N], pointers to the bytes of rows of the weight
    scales,  # [N], pointers to the scales of these rows
    live,  # [N], mask of the weight's rows
    K: tl.constexpr,
    FORM: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of columns that a step of the loop multiplies
    STAGES: tl.constexpr,
):
    """Multiply x by the weight's rows: [N, M] fp32, divided by LIFT."""
    WHOLE: tl.constexpr = FORM.whole // COLUMNS
    STEPS: tl.constexpr = WHOLE // BLOCKS * BLOCKS
    place = tl.arange(0, COLUMNS)
    word = tl.arange(0, WORDS)
    x_at = x_rows[:, None] + place[None, :]
    codes = codes.to(tl.pointer_type(tl.int16))
    codes_at = codes[:, None] + word[None, :]
    x_mask = x_live[:, None]
    sums = tl.zeros([codes.shape[0], x_rows.shape[0]], tl.float32)
    if STEPS > 0:
        held = ()
        for n in tl.static_range(BLOCKS):
            held += (scales_of(scales, n, live, FORM),)
        for first in tl.range(0, STEPS, BLOCKS, num_stages=STAGES):
            # Load scales one step ahead: the compiler's pipeline only prefetches operands of
            # matmuls.
            ahead = ()
            for n in tl.static_range(BLOCKS):
                block = tl.minimum(first + BLOCKS, STEPS - BLOCKS) + n
                ahead += (scales_of(scales, block, live, FORM),)
            for n in tl.static_range(BLOCKS):
                x = tl.load(x_at + (first + n) * COLUMNS, mask=x_mask, other=0.0)
                words = tl.load(codes_at + (first + n) * WORDS)
                sums = add_product(x, numbers_of(words, held[n]), sums, 1, True)
            held = ahead
    for block in tl.static_range(STEPS, WHOLE):
        x = tl.load(x_at + block * COLUMNS, mask=x_mask, other=0.0)
        words = tl.load(codes_at + block * WORDS)
        numbers = numbers_of(words, scales_of(scales, block, live, FORM))
        sums = add_product(x, numbers, sums, 1, True)
    if FORM.rest > 0:  # its low codes are in one group, its high codes in the next or the same
        REST: tl.constexpr = FORM.rest // 2
        inside = (place % WORDS < REST)[None, :]
        at = WHOLE * COLUMNS + place // WORDS * REST + place % WORDS
        x = tl.load(x_rows[:, None] + at[None, :], mask=x_mask & inside, other=0.0)
        words = tl.load(codes_at + WHOLE * WORDS, mask=(word < REST)[None, :], other=0)
        low = tl.load(scales + 4 * WHOLE, mask=live, other=0)
        high = tl.load(scales + (FORM.groups - 1), mask=live, other=0)
        sums = add_product(x, numbers_of(words, (low, low, high, high)), sums, 1, True)
    return sums
