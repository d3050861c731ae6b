"""Triton kernel that samples tokens from rows of logits.

Rows are divided into the same parts as in `logit_rows_triton`. Probabilities are never stored.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import after_predecessor, dependence
from specdec_kernels.sampling.logit_rows_triton import cut, exponent_scale, kept_weight, logits_at
from specdec_kernels.sampling.reference import LogitRows


@triton.jit
def first_above(weights, before, threshold, index, NONE: tl.constexpr):
    """Return the first index with a positive weight at which the running sum exceeds the threshold.

    If rounding leaves no such index, return the index of the last positive weight. If no weight is
    positive, return the last index, NONE - 1.
    before: the sum of all earlier weights.
    """
    positive = weights > 0
    hit = positive & (before + tl.cumsum(weights, axis=0) > threshold)
    first = tl.min(tl.where(hit, index, NONE), axis=0)
    last = tl.max(tl.where(positive, index, -1), axis=0)
    last = tl.where(last < 0, NONE - 1, last)
    return tl.where(first == NONE, last, first)


@triton.jit
def sample_logits_kernel(
    logits_ptr,  # [R, V]
    rows_ptr,  # [R, 4] fp32
    parts_ptr,  # [R, PARTS] fp32
    noise_ptr,  # [R] fp32
    out_ptr,  # [R] int64, out
    stride,
    noise_stride,
    scale,
    CUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    after_predecessor(DEPENDENT)
    scale = tl.full([], scale, tl.float32)

    every = tl.arange(0, CUT.block_parts)
    parts = tl.load(parts_ptr + row * CUT.parts + every, mask=every < CUT.parts, other=0.0)
    total = tl.sum(parts, axis=0)
    level = tl.load(noise_ptr + row * noise_stride) * total
    part = first_above(parts, 0.0, level, every, CUT.parts)
    before = tl.sum(tl.where(every < part, parts, 0.0), axis=0)

    lane = tl.arange(0, CUT.block)
    at = part * CUT.block + lane
    x = logits_at(logits_ptr + row * stride, at, True, CUT.vocab)
    weight = kept_weight(x, at, rows_ptr + row * 4, True, scale)
    token = part * CUT.block + first_above(weight, before, level, lane, CUT.block)
    token = tl.where(total == total, tl.minimum(token, CUT.vocab - 1), -1)
    tl.store(out_ptr + row, token.to(tl.int64))


def sample_logits_triton(
    logits: Tensor,
    stats: LogitRows | None,
    temperature: float,
    top_k: int,
    top_p: float,
    noise: Tensor,
) -> Tensor:
    """See `ops.sample_logits`."""
    assert stats is not None
    num_rows, vocabulary = logits.shape
    assert logits.stride(1) == 1 and stats.rows.is_contiguous() and stats.parts.is_contiguous()
    assert noise.shape == (num_rows,) and stats.rows.shape == (num_rows, 4)
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    sample_logits_kernel[(num_rows,)](
        *(logits, stats.rows, stats.parts, noise, out),
        *(logits.stride(0), noise.stride(0), exponent_scale(temperature)),
        num_warps=8,
        CUT=cut(vocabulary, stats.parts.shape[1]),
        **dependence(logits),
    )
    return out
