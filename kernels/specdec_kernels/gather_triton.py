"""Logits of all ranks' shares of the vocabulary, side by side, in one kernel.

Every rank reads the others' shares from their memory, over NVLink, and writes whole rows. A program
copies some tiles of one rank's share: it tells that rank that its own share is written, and waits
until that rank, by the program that is here in its place, has told it the same. Shares must not be
written again before the group has met elsewhere: the sums of the next pass see to it.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (Triton's decorator is untyped, and its parameters are device values without a Python type.)

import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import after_predecessor, dependent_launch, launch_options
from specdec_kernels.peers import GATHER_COLUMNS, GATHER_GROUPS, GATHER_ROWS, Peers
from specdec_kernels.peers_triton import part_of, read_flags


@triton.jit(do_not_specialize=["num_rows"])
def gather_columns_kernel(
    addresses_ptr,  # [SIZE] int64
    flags_ptr,  # [SIZE] int64
    epochs_ptr,  # [F, SIZE] int32, in and out
    out_ptr,  # [T, SIZE * SHARE], out
    num_rows,
    SHARE: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    source = tl.program_id(0)
    group = tl.program_id(2)
    pair = tl.program_id(1) * GROUPS + group
    own = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32)) + pair * SIZE
    theirs = tl.load(flags_ptr + source).to(tl.pointer_type(tl.int32)) + pair * SIZE
    part = part_of(addresses_ptr, source, out_ptr)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < SHARE
    after_predecessor(DEPENDENT)

    if source != RANK:
        epoch = tl.load(epochs_ptr + pair * SIZE + source) + 1
        tl.atomic_add(theirs + RANK, 1, sem="release", scope="sys")
        # The difference, since counters wrap around.
        one = tl.arange(0, 1)
        behind = tl.min(read_flags(own + source + one, INTERPRETED) - epoch, axis=0)
        while behind < 0:
            behind = tl.min(read_flags(own + source + one, INTERPRETED) - epoch, axis=0)
        tl.debug_barrier()
        tl.store(epochs_ptr + pair * SIZE + source, epoch)

    for first in range(group * BLOCK_M, num_rows, GROUPS * BLOCK_M):
        row = (first + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
        mask = (row < num_rows) & inside[None, :]
        found = tl.load(part + row * SHARE + column[None, :], mask=mask, cache_modifier=".cg")
        out = out_ptr + (row * SIZE + source) * SHARE + column[None, :]
        tl.store(out, found, mask=mask)


def gather_columns_triton(peers: Peers, num_rows: int) -> Tensor:
    """See `ops.gather_columns`."""
    share = peers.parts.shape[2]
    assert num_rows and peers.take(0, num_rows, share) is not None
    out = peers.parts.new_empty(num_rows, peers.size * share)
    blocks = triton.cdiv(share, GATHER_COLUMNS)
    assert peers.epochs.numel() >= blocks * GATHER_GROUPS * peers.size
    dependent = dependent_launch(out)
    block_m = min(GATHER_ROWS, triton.next_power_of_2(num_rows))
    groups = min(GATHER_GROUPS, triton.cdiv(num_rows, block_m))
    # Ranks come first: all that wait for each other start together.
    gather_columns_kernel[(peers.size, blocks, groups)](
        peers.addresses,
        peers.flags,
        peers.epochs,
        out,
        num_rows,
        SHARE=share,
        RANK=peers.rank,
        SIZE=peers.size,
        BLOCK_M=block_m,
        BLOCK_N=GATHER_COLUMNS,
        GROUPS=groups,
        DEPENDENT=dependent,
        INTERPRETED=not out.is_cuda,
        num_warps=4,
        **launch_options(dependent),
    )
    return out
