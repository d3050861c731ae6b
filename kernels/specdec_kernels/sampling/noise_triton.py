"""Triton kernel for counter-based uniform random numbers. Each lane computes one number."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import launch_options

BLOCK = 128


@triton.jit(do_not_specialize=["total", "rows"])
def uniform_rows_kernel(
    seed_ptr,  # int64 scalar
    index_ptr,  # [B] int64
    position_ptr,  # [B] int64
    out_ptr,  # [P, B, width] fp32, out
    total,
    rows,
    WIDTH: tl.constexpr,
    BY_ROUND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = lane < total
    row = lane // WIDTH % rows
    purpose = lane // (WIDTH * rows)
    seed = tl.load(seed_ptr)
    index = tl.load(index_ptr + row, mask=live, other=0)
    start = tl.load(position_ptr + row, mask=live, other=0)
    position = start + lane % WIDTH
    zero = lane.to(tl.uint32) * 0
    low = seed.to(tl.uint32) + zero
    high = (seed >> 32).to(tl.uint32) + zero
    c0, c1, c2, c3 = position.to(tl.uint32), purpose.to(tl.uint32), zero, high
    if BY_ROUND:
        c2 = start.to(tl.uint32) + 1
    k0, k1 = low, index.to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    number = (c0 >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
    tl.store(out_ptr + lane, number, mask=live)


def uniform_rows_triton(
    seed: Tensor,
    index: Tensor,
    position: Tensor,
    purposes: int,
    width: int,
    by_round: bool = False,
) -> Tensor:
    """See `ops.uniform_rows`."""
    (rows,) = index.shape
    assert position.shape == index.shape and seed.numel() == 1
    out = torch.empty((purposes, rows, width), dtype=torch.float32, device=index.device)
    uniform_rows_kernel[(triton.cdiv(out.numel(), BLOCK),)](
        seed,
        index,
        position,
        out,
        out.numel(),
        rows,
        WIDTH=width,
        BY_ROUND=by_round,
        BLOCK=BLOCK,
        **launch_options(),
    )
    return out
