"""Decodes the codes of quantised weights into values, in registers.

A byte with two codes holds columns that are 64 apart (see `stored`). The low codes of consecutive
bytes therefore belong to consecutive columns, and so do their high codes: each half of a tile is
multiplied by contiguous values of x. For bf16, inline assembly takes less than one instruction per
value. For other dtypes, and in Triton's interpreter, Triton code does the same.
"""

import triton
import triton.language as tl

from specdec_kernels.launch_triton import INTERPRETED

# Shift the bits of an e4m3 number to where bf16 has its sign, exponent and mantissa. The two
# formats differ in exponent bias, so every value, even a subnormal, is multiplied by 2^-120.
# `corrected` multiplies the fp32 sums by 2^120 to undo this.
_FP8 = tl.constexpr(
    """{ .reg .b32 a, b;
    prmt.b32 a, $2, 0, 0x9180; prmt.b32 b, $2, 0, 0xb3a2;  // with 8 more: a byte of its sign
    shl.b32 a, a, 4; shl.b32 b, b, 4;
    and.b32 $0, a, 0x87f087f0; and.b32 $1, b, 0x87f087f0; }"""
)
# In bf16, the number 128 + n has n in its last bits, for n below 16. Adding the constant upper bits
# 0x4300 to a code n therefore gives 128 + n.
_INT4 = tl.constexpr(
    """{ .reg .b32 a, b, c;
    and.b32 a, $4, 0x0f0f0f0f; shr.b32 b, $4, 4; and.b32 b, b, 0x0f0f0f0f;
    mov.b32 c, 0x43434343;
    prmt.b32 $0, a, c, 0x5140; prmt.b32 $1, a, c, 0x7362;
    prmt.b32 $2, b, c, 0x5140; prmt.b32 $3, b, c, 0x7362; }"""
)
# A byte that holds only a four-bit code n is a valid e4m3 with the value n * CODE.
_INT4_FP8 = tl.constexpr(
    "and.b32 $0, $2, 0x0f0f0f0f; shr.b32 $1, $2, 4; and.b32 $1, $1, 0x0f0f0f0f;"
)
CODE = tl.constexpr(2.0**-9)
# Convert e2m1 codes to bf16 with two lookup tables: one has the high bytes of the bf16 values, the
# other the low bytes. One prmt looks up four codes, by their low three bits, in a table of eight
# bytes. The fourth bit of a code is the sign, which is added separately.
_FP4 = tl.constexpr(
    """{ .reg .b32 a, b, p, q; .reg .b32 h<2>; .reg .b32 l<2>; .reg .b32 s<2>;
    and.b32 a, $4, 0x77777777; shr.b32 b, a, 16;
    mov.b32 p, 0x3f3f3f00; mov.b32 q, 0x40404040;
    prmt.b32 h0, p, q, a; prmt.b32 h1, p, q, b;
    mov.b32 p, 0xc0800000; mov.b32 q, 0xc0804000;
    prmt.b32 l0, p, q, a; prmt.b32 l1, p, q, b;
    prmt.b32 $0, l0, h0, 0x6240; prmt.b32 $1, l1, h1, 0x6240;
    prmt.b32 $2, l0, h0, 0x7351; prmt.b32 $3, l1, h1, 0x7351;
    prmt.b32 s0, $4, 0, 0x1404; prmt.b32 s1, $4, 0, 0x3424;
    lop3.b32 $2, $2, s0, 0x80008000, 0xf8; lop3.b32 $3, $3, s1, 0x80008000, 0xf8;
    shl.b32 s0, s0, 4; shl.b32 s1, s1, 4;
    lop3.b32 $0, $0, s0, 0x80008000, 0xf8; lop3.b32 $1, $1, s1, 0x80008000, 0xf8; }"""
)


@triton.jit
def decoded(codes, FORM: tl.constexpr, dtype: tl.constexpr):
    """Decode a tile of bytes, each with one code, to `dtype`. The caller applies zero points
    and scales.

    In bf16, fp8 values come out too small by the factor 2^-120. The caller must pass the sums of
    their products to `corrected`, which undoes this.
    """
    if FORM.kind == "int8":
        numbers = codes.to(tl.int8, bitcast=True).to(dtype)
    elif dtype == tl.float8e4nv:
        numbers = codes.to(dtype, bitcast=True)
    elif dtype == tl.bfloat16 and not INTERPRETED:
        numbers = tl.inline_asm_elementwise(
            _FP8, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        code = codes.to(tl.int32)
        bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
        numbers = (bits.to(tl.float32, bitcast=True) * 2.0**120).to(dtype)
    return numbers


@triton.jit
def corrected(sums, FORM: tl.constexpr, dtype: tl.constexpr):
    """Multiply fp32 sums by 2^120 if `decoded` returned fp8 values that were too small."""
    if FORM.kind == "fp8" and dtype == tl.bfloat16 and not INTERPRETED:
        sums *= 2.0**120
    return sums


@triton.jit
def decoded_halves(codes, FORM: tl.constexpr, dtype: tl.constexpr):
    """Decode a tile of bytes, each with two codes, to two tiles of `dtype`: the values of the low
    codes, and those of the high codes. The caller applies zero points and scales.

    int4 values come out too large by 128, which the caller must subtract.
    """
    if dtype == tl.bfloat16 and not INTERPRETED:
        low, high = tl.inline_asm_elementwise(
            _INT4 if FORM.kind == "int4" else _FP4,
            "=&r,=&r,=&r,=&r,r",
            [codes],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        low = _number(codes.to(tl.int32) & 15, FORM, dtype)
        high = _number(codes.to(tl.int32) >> 4, FORM, dtype)
    return low, high


@triton.jit
def block_as_fp8(codes):
    """Convert bytes [N, W] of two int4 codes each to e4m3 [N, 2 W], with all low codes of a row
    before its high codes. A code n becomes the value n * CODE."""
    if INTERPRETED:
        low, high = codes & 15, codes >> 4
    else:
        low, high = tl.inline_asm_elementwise(
            _INT4_FP8, "=&r,=&r,r", [codes], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    both = tl.permute(tl.join(low, high), (0, 2, 1))
    both = tl.reshape(both, [codes.shape[0], 2 * codes.shape[1]])
    return both.to(tl.float8e4nv, bitcast=True)


@triton.jit
def _number(code, FORM: tl.constexpr, dtype: tl.constexpr):
    if FORM.kind == "int4":
        number = (code + 128).to(dtype)
    else:
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        number = (bits.to(tl.float32, bitcast=True) * 2.0**126).to(dtype)
    return number


@triton.jit
def ones_beside(numbers):
    """Return ones with the shape and dtype of `numbers`, to compute sums of x with a matmul."""
    if numbers.dtype == tl.bfloat16 and not INTERPRETED:
        # Triton would give a constant a different register layout from that of `numbers`, and would
        # then have to convert x to a second layout.
        ones = tl.inline_asm_elementwise(
            "mov.b32 $0, 0x3f803f80;", "=r,r", [numbers], tl.bfloat16, is_pure=True, pack=2
        )
    else:
        ones = tl.full(numbers.shape, 1.0, numbers.dtype)
    return ones


@triton.jit
def scale_of(stored):
    """Convert scales to fp32. A uint8 scale is the biased exponent of a power of two. Two of them
    differ from `Storage.factors`: 0, which means 2^-127, becomes 0, and 255, which means NaN and
    which loading refuses, becomes infinity."""
    if stored.dtype == tl.uint8:
        scale = (stored.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    else:
        scale = stored.to(tl.float32)
    return scale
