"""Where in the paged KV cache each token's key and value go: Triton kernel, one lane a token."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import launch_options
from specdec_kernels.rows_triton import row_of

BLOCK = 256


# Counts change from pass to pass; a variant compiled for each kind of value would cost seconds.
@triton.jit(do_not_specialize=["num_tokens", "num_rows", "num_columns", "limit", "table_stride"])
def slot_mapping_kernel(
    block_tables_ptr,  # [B, MB] int32
    out_start_ptr,  # [B + 1] int32
    positions_ptr,  # [T] int64
    rejected_ptr,  # [T] bool, or anything without HAS_REJECTED
    slots_ptr,  # [T] int64, out
    num_tokens,
    num_rows,
    num_columns,
    limit,
    table_stride,
    HAS_REJECTED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = place < num_tokens
    row = row_of(out_start_ptr, place, num_rows, STEPS)
    position = tl.load(positions_ptr + place, mask=live, other=0)
    keep = (position < limit) & (place < tl.load(out_start_ptr + num_rows))
    if HAS_REJECTED:
        keep = keep & (tl.load(rejected_ptr + place, mask=live, other=1) == 0)
    column = tl.maximum(tl.minimum(position // BLOCK_SIZE, num_columns - 1), 0)
    entry = block_tables_ptr + row.to(tl.int64) * table_stride + column
    block = tl.load(entry, mask=live & keep, other=0).to(tl.int64)
    tl.store(slots_ptr + place, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=live)


def slot_mapping_triton(
    block_tables: Tensor,
    out_start: Tensor,
    positions: Tensor,
    rejected: Tensor | None,
    block_size: int,
    max_model_len: int,
) -> Tensor:
    """See `ops.slot_mapping`."""
    (num_rows, num_columns), (num_tokens,) = block_tables.shape, positions.shape
    assert out_start.shape == (num_rows + 1,)
    assert rejected is None or rejected.shape == positions.shape
    slots = torch.empty(num_tokens, dtype=torch.int64, device=positions.device)
    slot_mapping_kernel[(triton.cdiv(num_tokens, BLOCK),)](
        block_tables,
        out_start,
        positions,
        positions if rejected is None else rejected,
        slots,
        num_tokens,
        num_rows,
        num_columns,
        min(max_model_len, num_columns * block_size),
        block_tables.stride(0),
        HAS_REJECTED=rejected is not None,
        BLOCK_SIZE=block_size,
        STEPS=num_rows.bit_length(),
        BLOCK=BLOCK,
        **launch_options(),
    )
    return slots
