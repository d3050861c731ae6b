"""Multiplies the fp8 terms of x (see `terms_triton`) by mxfp4 codes.

The bits of an e2m1 code, moved within a byte, are an e4m3 with the value of the code times CODE. So
seven instructions decode eight codes into the left operand of fp8 matmuls, which tensor cores read
from registers. Each matmul has the 32 columns of one group, and its result is multiplied by the
group's scale in fp32. This also limits how many products are added up with the few bits of fp8
matmuls.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.gpu import CAPABILITY, gpu_of
from specdec_kernels.launch_triton import INTERPRETED
from specdec_kernels.linear.decode_triton import scale_of
from specdec_kernels.linear.few_rows_triton import add_product
from specdec_kernels.linear.stored import BLOCK, MXFP4, Stored
from specdec_kernels.linear.stored_groups_triton import HALF
from specdec_kernels.linear.terms_triton import TERMS, terms_triton

GROUP = 32  # columns that share a scale
READ = MXFP4, (1, GROUP)  # kind and group of the weights
WIDTH = tl.constexpr(GROUP)
CODE = tl.constexpr(2.0**-6)
_MOVED = "and.b32 a, a, 0x1c1c1c1c; lop3.b32 $0, b, 0x80808080, a, 0xea;"
_LOW = tl.constexpr("{ .reg .b32 a, b; shl.b32 a, $1, 2; shl.b32 b, $1, 4;" + _MOVED + "}")
_HIGH = tl.constexpr("{ .reg .b32 a, b; shr.b32 a, $1, 2; mov.b32 b, $1;" + _MOVED + "}")


def are_read_by_terms(dtype: torch.dtype, *weights: Tensor | Stored) -> bool:
    """Return whether `mx_sums` multiplies x of a dtype by all these weights: x is bf16, the GPU is
    the one with these fp8 matmuls, and groups of mxfp4 begin where tiles of codes do. In a last
    block of 96 columns they do not."""
    return dtype == torch.bfloat16 and all(map(_is_read_by_terms, weights))


def _is_read_by_terms(weight: Tensor | Stored) -> bool:
    if isinstance(weight, Tensor) or (weight.storage.kind, weight.storage.group) != READ:
        return False
    is_whole = weight.shape[-1] % BLOCK in (0, GROUP, 2 * GROUP)
    return is_whole and gpu_of(weight.codes.device).capability == CAPABILITY


def for_weights(x: Tensor, *weights: Tensor | Stored) -> tuple[Tensor, Tensor | None]:
    """Return x [..., K] as the kernels of these weights read it: x and None, or the terms of its R
    rows, [R, TERMS, K] e4m3, and their scales [R]."""
    if not are_read_by_terms(x.dtype, *weights):
        return x, None
    terms, scales, _ = terms_triton(x if x.dim() == 2 else x.view(-1, x.shape[-1]))
    return terms, scales


@triton.jit
def terms_of(TILES: tl.constexpr):
    """Return the numbers of the terms of `block_m` rows of x as often as `mx_sums` reads them. Row
    t // TERMS has term t."""
    M: tl.constexpr = TILES.block_m * TERMS
    return tl.arange(0, TILES.slices * M) % M


@triton.jit
def halves_as_fp8(codes):
    """Convert bytes of two e2m1 codes each to two tiles of e4m3: the low codes, and the high codes.
    A code becomes its value times CODE."""
    if INTERPRETED:
        low = ((codes & 8) << 4) | ((codes & 7) << 2)
        high = (codes & 0x80) | ((codes >> 2) & 0x1C)
    else:
        # One piece of assembly with two results would hide from the compiler that the bytes of a
        # thread should be adjacent.
        low = tl.inline_asm_elementwise(_LOW, "=&r,r", [codes], tl.uint8, is_pure=True, pack=4)
        high = tl.inline_asm_elementwise(_HIGH, "=&r,r", [codes], tl.uint8, is_pure=True, pack=4)
    return low.to(tl.float8e4nv, bitcast=True), high.to(tl.float8e4nv, bitcast=True)


@triton.jit
def scales_of(scales, first, live, COUNT: tl.constexpr):
    """Load the scales of COUNT groups from `first` on, as a tuple of [N].

    scales: [N], pointers to the scales of rows.
    """
    found = ()
    for group in tl.static_range(COUNT):
        found += (tl.load(scales + (first + group), mask=live, other=0),)
    return found


@triton.jit
def add_groups(x, numbers, scales, sums, AT_ONCE: tl.constexpr):
    """Multiply x by the groups of a tile of numbers. Return sums + products times scales.

    x: [AT_ONCE * M * TERMS, AT_ONCE * WIDTH], block-diagonal: only a group's own columns are not
        zero in its rows, so that one matmul keeps the sums of groups apart.
    numbers: [N, AT_ONCE * WIDTH]. scales: a tuple of [N], one for each group.
    """
    N: tl.constexpr = sums.shape[0]
    M: tl.constexpr = sums.shape[1]
    none = tl.zeros([N, AT_ONCE * M], tl.float32)
    found = add_product(x, numbers, none, 1, True)
    if AT_ONCE == 1:
        sums += found * scale_of(scales[0])[:, None]
    else:
        one, other = tl.split(tl.permute(tl.reshape(found, [N, 2, M]), (0, 2, 1)))
        sums += one * scale_of(scales[0])[:, None]
        sums += other * scale_of(scales[1])[:, None]
    return sums


@triton.jit
def mx_sums(
    x_rows,  # [AT_ONCE * M * TERMS] pointers to the rows of x's terms, AT_ONCE times over
    x_live,  # [AT_ONCE * M * TERMS], mask
    codes,  # [N], pointers to the codes of rows of the weight
    scales,  # [N], pointers to the scales of these rows
    live,  # [N], mask of the weight's rows
    K: tl.constexpr,
    FORM: tl.constexpr,
    AT_ONCE: tl.constexpr,  # groups that a matmul multiplies, 1 or 2
    STAGES: tl.constexpr,
):
    """Multiply the terms of x by the weight's rows: [N, M * TERMS] fp32. The results contain the
    factor CODE."""
    PART: tl.constexpr = AT_ONCE * WIDTH
    M: tl.constexpr = x_rows.shape[0] // AT_ONCE
    WHOLE: tl.constexpr = FORM.whole // FORM.per_code  # bytes in complete blocks
    IN_BLOCK: tl.constexpr = 2 * HALF // WIDTH
    place = tl.arange(0, PART)
    mine = tl.arange(0, AT_ONCE * M) // M
    x_mask = x_live[:, None] & (mine[:, None] == (place // WIDTH)[None, :])
    x_at = x_rows[:, None] + place[None, :]
    codes_at = codes[:, None] + place[None, :]
    sums = tl.zeros([codes.shape[0], M], tl.float32)
    if FORM.rest > 0:
        rest = scales_of(scales, FORM.whole // WIDTH, live, FORM.groups - FORM.whole // WIDTH)
    if WHOLE > 0:
        held = scales_of(scales, 0, live, IN_BLOCK)
        for start in tl.range(0, WHOLE, HALF, num_stages=STAGES):
            # Load scales one block ahead: the compiler's pipeline only prefetches operands of
            # matmuls. The low codes of a block come before its high codes, in whole groups.
            after = tl.minimum(start + HALF, WHOLE - HALF)
            ahead = scales_of(scales, 2 * after // WIDTH, live, IN_BLOCK)
            for part in tl.static_range(0, HALF, PART):
                x_low = tl.load(x_at + (2 * start + part), mask=x_mask, other=0.0)
                x_high = tl.load(x_at + (2 * start + HALF + part), mask=x_mask, other=0.0)
                low, high = halves_as_fp8(tl.load(codes_at + (start + part)))
                sums = add_groups(x_low, low, held[part // WIDTH :], sums, AT_ONCE)
                sums = add_groups(x_high, high, held[(HALF + part) // WIDTH :], sums, AT_ONCE)
            held = ahead
    if FORM.rest > 0:  # its low codes are in one group, and its high codes in the next or the same
        inside = (place < FORM.rest)[None, :]
        x_mask &= inside
        x_low = tl.load(x_at + FORM.whole, mask=x_mask, other=0.0)
        x_high = tl.load(x_at + (FORM.whole + FORM.rest), mask=x_mask, other=0.0)
        low, high = halves_as_fp8(tl.load(codes_at + WHOLE, mask=inside, other=0))
        sums = add_groups(x_low, low, (rest[0], rest[0]), sums, AT_ONCE)
        of_high = rest[FORM.rest // WIDTH]
        sums = add_groups(x_high, high, (of_high, of_high), sums, AT_ONCE)
    return sums
