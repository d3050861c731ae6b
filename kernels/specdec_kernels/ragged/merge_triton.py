"""Merging valid tokens with the tokens that follow: Triton kernel, one lane an output token."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.attention.cache_triton import row_of
from specdec_kernels.launch_triton import launch_options

BLOCK = 256


# Counts change from pass to pass; a variant compiled for each kind of value would cost seconds.
@triton.jit(do_not_specialize=["total", "fill", "num_rows", "next_stride"])
def merge_tokens_kernel(
    tokens_ptr,  # [N] int64
    start_ptr,  # [B + 1] int32
    end_ptr,  # [B] int32
    next_tokens_ptr,  # [B, M] int64
    next_lens_ptr,  # [B] int32
    out_start_ptr,  # [B + 1] int32
    merged_ptr,  # [T] int64, out
    rejected_ptr,  # [T] bool, out
    total,
    fill,
    num_rows,
    next_stride,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = place < total
    row = row_of(out_start_ptr, place, num_rows, STEPS)
    offset = place - tl.load(out_start_ptr + row)
    begin = tl.load(start_ptr + row)
    beyond = offset - (tl.load(end_ptr + row) - begin)
    kept = beyond < 0
    added = (beyond >= 0) & (beyond < tl.load(next_lens_ptr + row))

    old = tl.load(tokens_ptr + begin + offset, mask=live & kept, other=0)
    new = tl.load(
        next_tokens_ptr + row.to(tl.int64) * next_stride + beyond, mask=live & added, other=0
    )
    merged = tl.where(kept, old, tl.where(added, new, fill))
    tl.store(merged_ptr + place, merged, mask=live)
    tl.store(rejected_ptr + place, (beyond >= 0) & (added == 0), mask=live)


def merge_tokens_triton(
    tokens: Tensor,
    start: Tensor,
    end: Tensor,
    next_tokens: Tensor,
    next_lens: Tensor,
    out_start: Tensor,
    total: int,
    fill: int = 0,
) -> tuple[Tensor, Tensor]:
    """See `ops.merge_tokens`."""
    num_rows = next_tokens.shape[0]
    assert start.shape == out_start.shape == (num_rows + 1,)
    assert end.shape == next_lens.shape == (num_rows,)
    merged = torch.empty(total, dtype=tokens.dtype, device=tokens.device)
    rejected = torch.empty(total, dtype=torch.bool, device=tokens.device)
    merge_tokens_kernel[(triton.cdiv(total, BLOCK),)](
        tokens,
        start,
        end,
        next_tokens,
        next_lens,
        out_start,
        merged,
        rejected,
        total,
        fill,
        num_rows,
        next_tokens.stride(0),
        STEPS=num_rows.bit_length(),
        BLOCK=BLOCK,
        **launch_options(),
    )
    return merged, rejected
