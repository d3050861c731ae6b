"""Chooses each row's most likely token: every program finds the maximum in one part of a row, and
the last program compares the maxima of the parts."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import (
    COUNTERS,
    after_predecessor,
    counters,
    dependence,
    is_last,
)

PARTS = 32
BLOCK = 4096


@triton.jit
def first_maximum(value, index):
    """Return the largest value [N] and its index from `index` [N]. Of equal values, the one with
    the smallest index wins."""
    top = tl.max(value, axis=0)
    return top, tl.min(tl.where(value == top, index, 2**31 - 1), axis=0)


@triton.jit
def greedy_argmax_kernel(
    logits_ptr,  # [R, V]
    tops_ptr,  # [R, PARTS] fp32, out
    indices_ptr,  # [R, PARTS] int32, out
    counters_ptr,  # [>= R] int32, zeros
    out_ptr,  # [R] int64, out
    stride,
    V: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    SHARE: tl.constexpr = (V + PARTS * BLOCK - 1) // (PARTS * BLOCK) * BLOCK
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    after_predecessor(DEPENDENT)

    logits_ptr += row * stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    index = part * SHARE + lane
    for start in range(0, SHARE, BLOCK):
        at = part * SHARE + start + lane
        value = tl.load(logits_ptr + at, mask=at < V, other=float("-inf")).to(tl.float32)
        # Treat NaN as larger than any number. If there are several, take the first.
        better = (value > best) | ((value != value) & (best == best))
        best = tl.where(better, value, best)
        index = tl.where(better, at, index)
    top, first = first_maximum(tl.where(best != best, float("inf"), best), index)
    tl.store(tops_ptr + row * PARTS + part, top)
    tl.store(indices_ptr + row * PARTS + part, first)

    if is_last(counters_ptr + row, PARTS):
        every = tl.arange(0, PARTS)
        tops = tl.load(tops_ptr + row * PARTS + every, cache_modifier=".cg")
        indices = tl.load(indices_ptr + row * PARTS + every, cache_modifier=".cg")
        top, first = first_maximum(tops, indices)
        first = tl.where(tl.abs(top) == float("inf"), -1, first)  # NaN was replaced by inf above
        tl.store(out_ptr + row, first.to(tl.int64))


def greedy_argmax_triton(logits: Tensor) -> Tensor:
    """See `ops.greedy_argmax`."""
    num_rows, vocabulary = logits.shape
    assert logits.stride(1) == 1 and num_rows <= COUNTERS
    device = logits.device
    out = torch.empty(num_rows, dtype=torch.int64, device=device)
    tops = torch.empty((num_rows, PARTS), dtype=torch.float32, device=device)
    indices = torch.empty((num_rows, PARTS), dtype=torch.int32, device=device)
    greedy_argmax_kernel[(num_rows, PARTS)](
        logits,
        tops,
        indices,
        counters(device),
        out,
        logits.stride(0),
        V=vocabulary,
        PARTS=PARTS,
        BLOCK=BLOCK,
        **dependence(logits),
    )
    return out
