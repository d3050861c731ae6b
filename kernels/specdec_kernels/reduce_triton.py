"""The sum of all ranks' parts of a projection, the residual and the norm, in one kernel.

A one-shot all-reduce: every rank reads the parts of all the others from their memory, over NVLink,
and adds them up in the order of ranks, so that all hold the same sums to the bit. A program handles
some columns of all rows; it tells its like on the other ranks that this rank's part is written, and
waits until all have told it. Flags count and are never reset: the k-th call waits for k. Calls must
use the two places in turn: that all have announced the one place means that all have read the
other, so nobody has to wait a second time.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import after_predecessor, dependent_launch
from specdec_kernels.linear import Normed
from specdec_kernels.peers import COLUMNS, MAX_ROWS, Peers, num_flags


@triton.jit
def read_flags(flags, INTERPRETED: tl.constexpr):
    """int32 counters at addresses [SIZE], and all that their writers wrote before."""
    if INTERPRETED:
        found = tl.load(flags)
    else:
        found = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.s32 $0, [$1];",
            "=r,l",
            [flags.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return found


@triton.jit(do_not_specialize=["num_rows", "place"])
def reduce_add_norm_kernel(
    addresses_ptr,  # [SIZE] int64
    flags_ptr,  # [SIZE] int64
    epochs_ptr,  # [F] int32, in and out
    residual_ptr,  # [T, N]
    norm_ptr,  # [N]
    hidden_ptr,  # [T, N], out
    scaled_ptr,  # [T, N], out
    squares_ptr,  # [T, programs] fp32, out
    num_rows,
    place,  # elements before the part in each rank's memory
    residual_stride,
    N: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DEPENDENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    program = tl.program_id(0)
    column = program * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    inside = row[:, None] * N + column[None, :]
    norm = tl.load(norm_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    peer = tl.minimum(tl.arange(0, BLOCK_RANKS), SIZE - 1)
    pads = tl.load(flags_ptr + peer)
    own = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32)) + program * SIZE
    after_predecessor(DEPENDENT)

    epoch = tl.load(epochs_ptr + program) + 1
    theirs = pads.to(tl.pointer_type(tl.int32)) + program * SIZE + RANK
    announce = tl.arange(0, BLOCK_RANKS) < SIZE
    tl.atomic_add(theirs, 1, mask=announce, sem="release", scope="sys")
    residual_at = row.to(tl.int64)[:, None] * residual_stride + column[None, :]
    total = tl.load(residual_ptr + residual_at, mask=mask, other=0.0).to(tl.float32)
    # The difference, since counters wrap around.
    behind = tl.min(read_flags(own + peer, INTERPRETED) - epoch, axis=0)
    while behind < 0:
        behind = tl.min(read_flags(own + peer, INTERPRETED) - epoch, axis=0)
    tl.debug_barrier()
    tl.store(epochs_ptr + program, epoch)

    summed = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for rank in tl.static_range(SIZE):
        part_ptr = tl.load(addresses_ptr + rank).to(tl.pointer_type(hidden_ptr.dtype.element_ty))
        part = tl.load(part_ptr + place + inside, mask=mask, other=0.0, cache_modifier=".cg")
        summed += part.to(tl.float32)
    # Rounded first, as an all-reduce that returns a tensor would.
    total += summed.to(hidden_ptr.dtype.element_ty).to(tl.float32)
    hidden = total.to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + inside, hidden, mask=mask)
    wide = tl.where(mask, hidden.to(tl.float32), 0.0)
    tl.store(scaled_ptr + inside, (wide * norm[None, :]).to(hidden.dtype), mask=mask)
    squares_at = row * tl.num_programs(0) + program
    tl.store(squares_ptr + squares_at, tl.sum(wide * wide, axis=1), mask=row < num_rows)


def reduce_add_norm_triton(
    peers: Peers, place: int, residual: Tensor, norm_weight: Tensor, eps: float
) -> Normed:
    """See `ops.reduce_add_norm`."""
    num_rows, width = residual.shape
    assert peers.take(place, num_rows, width) is not None and num_rows <= MAX_ROWS
    assert norm_weight.shape == (width,) and residual.stride(1) == 1
    assert residual.dtype == peers.parts.dtype
    programs = num_flags(width)
    assert peers.epochs.shape[0] >= programs
    hidden = torch.empty((num_rows, width), dtype=residual.dtype, device=residual.device)
    scaled = torch.empty_like(hidden)
    squares = torch.empty((num_rows, programs), dtype=torch.float32, device=residual.device)
    dependent = dependent_launch(residual)
    reduce_add_norm_kernel[(programs,)](
        peers.addresses,
        peers.flags,
        peers.epochs,
        residual,
        norm_weight,
        hidden,
        scaled,
        squares,
        num_rows,
        place * peers.parts.stride(0),
        residual.stride(0),
        N=width,
        RANK=peers.rank,
        SIZE=peers.size,
        BLOCK_RANKS=triton.next_power_of_2(peers.size),
        BLOCK_M=triton.next_power_of_2(num_rows),
        BLOCK_N=COLUMNS,
        DEPENDENT=dependent,
        INTERPRETED=not residual.is_cuda,
        num_warps=4 if num_rows <= 8 else 8,
        **({"launch_pdl": True} if dependent else {}),
    )
    return Normed(hidden, scaled, squares, eps)
