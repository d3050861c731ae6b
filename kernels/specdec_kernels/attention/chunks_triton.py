"""Gathering the keys and values of a long context, and merging attention over two parts of it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.attention.softmax_triton import finite
from specdec_kernels.launch_triton import launch_options

ROWS = 8  # positions of a program that gathers


# Lengths change from pass to pass; a variant for each kind of value would cost seconds.
@triton.jit(do_not_specialize=["first", "context", "length"])
def gather_kv_kernel(
    key_cache_ptr,  # [NB, BLOCK_SIZE, Hkv, D]
    value_cache_ptr,  # [NB, BLOCK_SIZE, Hkv, D]
    block_tables_ptr,  # [MB] int32, of one sequence
    key_ptr,  # [length, Hkv, D], out
    value_ptr,  # [length, Hkv, D], out
    first,  # position of the first key
    context,
    length,
    key_stride_b,
    key_stride_s,
    key_stride_h,
    value_stride_b,
    value_stride_s,
    value_stride_h,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    position = first + row
    stored = position < context
    block = tl.load(block_tables_ptr + position // BLOCK_SIZE, mask=stored, other=0).to(tl.int64)
    inside = position % BLOCK_SIZE
    place = tl.arange(0, BLOCK)
    head = place // D
    dim = place % D
    live = (place < KV_HEADS * D)[None, :]
    read = stored[:, None] & live
    write = (row < length)[:, None] & live
    key_at = (block * key_stride_b + inside * key_stride_s)[:, None]
    value_at = (block * value_stride_b + inside * value_stride_s)[:, None]
    key_at += (head * key_stride_h + dim)[None, :]
    value_at += (head * value_stride_h + dim)[None, :]
    key = tl.load(key_cache_ptr + key_at, mask=read, other=0.0)
    value = tl.load(value_cache_ptr + value_at, mask=read, other=0.0)
    to = row.to(tl.int64)[:, None] * (KV_HEADS * D) + place[None, :]
    tl.store(key_ptr + to, key, mask=write)
    tl.store(value_ptr + to, value, mask=write)


def gather_kv_triton(
    key_cache: Tensor, value_cache: Tensor, table: Tensor, first: int, context: int, length: int
) -> tuple[Tensor, Tensor]:
    """See `chunks.gather_kv`."""
    _, block_size, kv_heads, dim = key_cache.shape
    assert value_cache.shape == key_cache.shape and table.dim() == 1
    assert all(t.stride(-1) == 1 for t in (key_cache, value_cache, table))
    size = length, kv_heads, dim
    key, value = (
        torch.empty(size, dtype=c.dtype, device=c.device) for c in (key_cache, value_cache)
    )
    gather_kv_kernel[(triton.cdiv(length, ROWS),)](
        *(key_cache, value_cache, table, key, value, first, context, length),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        KV_HEADS=kv_heads,
        D=dim,
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=ROWS,
        BLOCK=triton.next_power_of_2(kv_heads * dim),
        num_warps=4,
        **launch_options(),
    )
    return key, value


@triton.jit
def merge_parts_kernel(
    out_ptr,  # [L, H, D], out
    first_ptr,  # [L, H, D]
    first_lse_ptr,  # [L, H] fp32, and out
    second_ptr,  # [L, H, D]
    second_lse_ptr,  # [L, H] fp32
    out_stride,
    first_stride_t,
    first_stride_h,
    first_lse_stride_t,
    first_lse_stride_h,
    second_stride_t,
    second_stride_h,
    second_lse_stride_t,
    second_lse_stride_h,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, BLOCK_D)
    live = head < HEADS
    mask = live[:, None] & (dim < D)[None, :]
    first_lse_at = first_lse_ptr + token * first_lse_stride_t + head * first_lse_stride_h
    first_lse = tl.load(first_lse_at, mask=live, other=0.0)
    second_lse = tl.load(
        second_lse_ptr + token * second_lse_stride_t + head * second_lse_stride_h,
        mask=live,
        other=0.0,
    )
    first_at = first_ptr + token * first_stride_t + (head * first_stride_h)[:, None] + dim[None, :]
    second_at = second_ptr + token * second_stride_t + (head * second_stride_h)[:, None]
    first = tl.load(first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_at + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    top = finite(tl.maximum(first_lse, second_lse))
    first_weight = tl.exp(first_lse - top)
    second_weight = tl.exp(second_lse - top)
    out = first * first_weight[:, None] + second * second_weight[:, None]
    total = first_weight + second_weight
    out /= total[:, None]
    out_at = out_ptr + token * out_stride + (head * D)[:, None] + dim[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(first_lse_at, top + tl.log(total), mask=live)


def merge_parts_triton(
    out: Tensor, first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> None:
    """See `chunks.merge_parts`."""
    tokens, heads, dim = out.shape
    assert first.shape == second.shape == out.shape and out.stride()[1:] == (dim, 1)
    assert first_lse.shape == second_lse.shape == (tokens, heads)
    assert first.stride(2) == second.stride(2) == 1
    merge_parts_kernel[(tokens,)](
        *(out, first, first_lse, second, second_lse, out.stride(0)),
        *(*first.stride()[:2], *first_lse.stride(), *second.stride()[:2], *second_lse.stride()),
        HEADS=heads,
        D=dim,
        BLOCK_HEADS=triton.next_power_of_2(heads),
        BLOCK_D=triton.next_power_of_2(dim),
        num_warps=8,
        **launch_options(),
    )
