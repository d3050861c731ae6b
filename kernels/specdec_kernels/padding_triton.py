"""Inputs of a pass that feeds the same number of tokens for every sequence: Triton kernel."""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import launch_options

BLOCK = 128


@triton.jit(do_not_specialize=["total", "offset", "columns", "table_stride", "max_len", "num_ids"])
def padded_pass_kernel(
    tokens_ptr,  # [B, Q] int64
    length_ptr,  # [B] int64
    lens_ptr,  # [B] int64
    active_ptr,  # [B] bool
    block_tables_ptr,  # [B, MB] int32
    ids_ptr,  # [B * Q] int64, out
    positions_ptr,  # [B * Q] int64, out
    slots_ptr,  # [B * Q] int64, out
    context_lens_ptr,  # [B] int32, out
    total,
    offset,
    columns,
    token_stride_b,
    token_stride_q,
    table_stride,
    max_len,
    num_ids,
    WIDTH: tl.constexpr,
    MARGIN: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = lane < total
    row = lane // WIDTH
    column = lane % WIDTH
    token = tl.load(tokens_ptr + row * token_stride_b + column * token_stride_q, mask=here, other=0)
    token = tl.minimum(tl.maximum(token, 0), num_ids - 1)

    place = offset + column
    at = tl.load(length_ptr + row, mask=here, other=0) + place
    lens = tl.load(lens_ptr + row, mask=here, other=-1)
    active = tl.load(active_ptr + row, mask=here, other=0) != 0
    live = here & active & (at >= 0) & (at < max_len) & (lens >= place + MARGIN)
    position = tl.minimum(tl.maximum(at, 0), max_len - 1)
    entry = tl.minimum(position // BLOCK_SIZE, columns - 1)
    block = tl.load(
        block_tables_ptr + row.to(tl.int64) * table_stride + entry, mask=live, other=0
    ).to(tl.int64)

    tl.store(ids_ptr + lane, token, mask=here)
    tl.store(positions_ptr + lane, position, mask=here)
    tl.store(slots_ptr + lane, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=here)
    tl.store(context_lens_ptr + row, (at + 1).to(tl.int32), mask=here & (column == WIDTH - 1))


def padded_pass_triton(
    tokens: Tensor,
    length: Tensor,
    lens: Tensor,
    active: Tensor,
    block_tables: Tensor,
    offset: int,
    margin: int,
    block_size: int,
    max_len: int,
    num_ids: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `ops.padded_pass`."""
    rows, width = tokens.shape
    assert length.shape == lens.shape == active.shape == (rows,)
    assert block_tables.shape[0] == rows and block_tables.stride(1) == 1
    total = rows * width
    out = torch.empty((3, total), dtype=torch.int64, device=tokens.device)
    context_lens = torch.empty(rows, dtype=torch.int32, device=tokens.device)
    padded_pass_kernel[(triton.cdiv(total, BLOCK),)](
        tokens,
        length,
        lens,
        active,
        block_tables,
        out[0],
        out[1],
        out[2],
        context_lens,
        total,
        offset,
        block_tables.shape[1],
        *tokens.stride(),
        block_tables.stride(0),
        max_len,
        num_ids,
        WIDTH=width,
        MARGIN=margin,
        BLOCK_SIZE=block_size,
        BLOCK=BLOCK,
        **launch_options(),
    )
    return out[0], out[1], out[2], context_lens
