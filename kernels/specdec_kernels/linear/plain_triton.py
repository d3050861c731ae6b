"""Dequantises weights, so that cuBLAS can multiply many rows by them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import launch_options
from specdec_kernels.linear.decode_triton import decoded, decoded_halves, scale_of
from specdec_kernels.linear.stored import BLOCK, TILE_ROWS, Stored
from specdec_kernels.linear.stored_groups_triton import HALF, ROWS, Form, high_columns

WIDTH = 1024  # bytes that a program decodes, all from one row
READ = ("fp8", "int8", "int4", "mxfp4")


@triton.jit
def plain_kernel(
    codes_ptr,  # [N, K / FORM.per_code] bytes
    scales_ptr,  # [N / FORM.high, FORM.groups]
    zeros_ptr,  # zeros or minima in the shape of the scales, or None
    out_ptr,  # [N, K], output
    K: tl.constexpr,
    FORM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    ROW: tl.constexpr = K // FORM.per_code
    row = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = byte < ROW
    codes = tl.load(codes_ptr + row * ROW + byte, mask=live, other=0)
    groups = row // FORM.high * FORM.groups
    scales, zeros = scales_ptr + groups, zeros_ptr
    if FORM.has_zeros:
        zeros += groups
    out_ptr += row * K
    if FORM.per_code == 1:
        numbers = decoded(codes, FORM, tl.float32)
        store_scaled(out_ptr, numbers, byte, scales, zeros, live, FORM)
    else:
        low, high = decoded_halves(codes, FORM, tl.float32)
        column = byte + byte // HALF * HALF
        store_scaled(out_ptr, low, column, scales, zeros, live, FORM)
        column = high_columns(column, FORM)
        store_scaled(out_ptr, high, column, scales, zeros, live, FORM)


@triton.jit
def store_scaled(out_ptr, numbers, column, scales_ptr, zeros_ptr, live, FORM: tl.constexpr):
    """Store (numbers - zeros) * scales - minima. numbers: the result of `decoded`, or one of the
    two results of `decoded_halves`."""
    group = column // FORM.wide if FORM.wide > 0 else tl.zeros(column.shape, tl.int32)
    shift = 0.0
    if FORM.has_zeros:
        shift = tl.load(zeros_ptr + group, mask=live, other=0).to(tl.float32)
    if FORM.has_zeros and not FORM.has_minima:
        numbers -= shift
    elif FORM.kind == "int4" and not FORM.has_minima:
        numbers -= 8.0
    if FORM.kind == "int4":
        numbers -= 128.0
    scale = scale_of(tl.load(scales_ptr + group, mask=live, other=0))
    numbers *= scale
    if FORM.has_minima:
        numbers -= shift
    tl.store(out_ptr + column, numbers.to(out_ptr.dtype.element_ty), mask=live)


@triton.jit
def plain_tiled_kernel(
    codes_ptr,  # the bytes of a tiled weight
    scales_ptr,
    out_ptr,  # [N, K], output
    K: tl.constexpr,
    FORM: tl.constexpr,
):
    """Decode a run of rows in one block of columns."""
    WHOLE: tl.constexpr = FORM.whole // (2 * HALF)
    run = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    codes_ptr += run * (ROWS * K // 2) + block * (ROWS * HALF)
    scales_ptr += run * (ROWS * FORM.groups) + block * (ROWS * 4)
    out_ptr += run * (ROWS * K) + block * (2 * HALF)
    if block < WHOLE:
        store_block(out_ptr, codes_ptr, scales_ptr, HALF, K, FORM)
    elif FORM.rest > 0:
        store_block(out_ptr, codes_ptr, scales_ptr, FORM.rest, K, FORM)


@triton.jit
def store_block(
    out_ptr, codes_ptr, scales_ptr, WIDE: tl.constexpr, K: tl.constexpr, FORM: tl.constexpr
):
    """Decode and store a run of rows in a block of columns, whose rows have WIDE bytes."""
    row = tl.arange(0, ROWS)[:, None]
    byte = tl.arange(0, HALF)[None, :]
    live = (row >= 0) & (byte < WIDE)
    codes = tl.load(codes_ptr + row * WIDE + byte, mask=live, other=0)
    low, high = decoded_halves(codes, FORM, tl.float32)
    scales_ptr += row * (2 * WIDE // FORM.wide)
    none = scales_ptr  # a placeholder for zeros
    store_scaled(out_ptr + row * K, low, byte, scales_ptr, none, live, FORM)
    store_scaled(out_ptr + row * K, high, byte + WIDE, scales_ptr, none, live, FORM)


def plain_triton(weight: Tensor | Stored, dtype: torch.dtype) -> Tensor:
    """Compute `stored.plain_of` on CUDA, with bitwise equal results except for the uint8 scales 0
    and 255 (see `scale_of`). Weights that the kernel does not support are dequantised by
    `Stored.plain`."""
    if isinstance(weight, Tensor):
        return weight
    *outer, features, width = weight.shape
    high = weight.storage.group[0]
    if weight.storage.kind not in READ or (outer and features % high):
        return weight.plain(dtype)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.codes.device)
    rows, row = out.numel() // width, weight.codes.shape[-1]
    if weight.storage.is_tiled:
        plain_tiled_kernel[(rows // TILE_ROWS, triton.cdiv(width, BLOCK))](
            *(weight.codes, weight.scales, out), K=width, FORM=Form.of(weight), **launch_options()
        )
        return out
    plain_kernel[(rows, triton.cdiv(row, WIDTH))](
        weight.codes.view(torch.uint8),
        *(weight.scales, weight.zeros, out),
        K=width,
        FORM=Form.of(weight),
        BLOCK=WIDTH,
        **launch_options(),
    )
    return out
