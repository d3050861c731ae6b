"""Kernels that read other GPUs' memory over NVLink: sums over all ranks, and gathers.

The sum is a one-shot all-reduce that also adds the residual and prepares the norm. Every rank reads
the partial sums of all others and adds them in rank order, so the results are bitwise equal on all
ranks. A program handles one tile. It signals the programs of the same tile on all other ranks that
this rank's partial sum is written, and waits for their signals. Flags are counters that are never
reset: in the k-th call that uses a tile, its program waits until they reach k. Calls must alternate
between two buffers. A rank signals only after it has finished its previous call. So once all ranks
have signalled for one buffer, all have read the other, and no second wait is needed. Deadlock is
impossible: programs start in order and wait only for the same program on other ranks, so on every
rank the first unfinished program is running.

For few rows, each rank writes its partial sums to the other ranks instead. A 64-bit word holds two
values and the number of the call, and a rank waits until all words hold the current number. Words
are written atomically, so no separate signal is needed (NCCL's LL protocol). Words may be
overwritten for the same reason as above: a rank that has received all words of one buffer knows
that all ranks have read the other buffer.

If the matmul sends the words itself (`inbox_triton`), the sum starts while the matmul runs. It
waits only for the words, and lets its own successor start at once. At its end it waits for the
matmul to complete, which takes no time then, so that no later kernel can overtake the matmul. Until
then, nothing reads the matmul's output except the words. The sum's other inputs, the residual and
the counts, were complete before the matmul wrote its first word. The sum writes only memory that
the matmul does not read (`split_sums_triton`).

For many rows, each rank sums only its share of the rows, adds the residual and writes the result
over its own partial sums of these rows, which no other rank reads. It signals that this is done,
waits for the others, and then reads their shares. With R ranks, each then reads 2 / R of the bytes
that it would read to sum all rows itself.

The gather puts the ranks' columns of the logits side by side. A program copies some tiles of the
columns of one source rank. It signals to the source rank that this rank's own columns are written,
and waits for the corresponding signal from the source rank. Columns must not be overwritten before
the ranks have synchronised again. The sums of the next forward pass do this.
"""

from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.comm.peers import (
    GATHER_COLUMNS,
    GATHER_GROUPS,
    GATHER_ROWS,
    PUSHED_NUMBERS,
    SHARED_OUT_NUMBERS,
    SUM_COLUMNS,
    SUM_ROWS,
    Peers,
)
from specdec_kernels.launch_triton import (
    after_predecessor,
    beside_predecessor,
    dependence,
    end_beside_predecessor,
    load_acquired,
)
from specdec_kernels.linear.norm_triton import rms_norm_triton
from specdec_kernels.linear.reference import Normed
from specdec_kernels.linear.tiles import leaves_norm


@triton.jit
def wait_for_peers(flags, epoch):
    """Wait until all counters at the addresses `flags` [N] have reached `epoch`."""
    # Compare differences, because counters wrap around.
    behind = tl.min(load_acquired(flags, "sys") - epoch, axis=0)
    while behind < 0:
        behind = tl.min(load_acquired(flags, "sys") - epoch, axis=0)
    tl.debug_barrier()


@triton.jit
def part_of(addresses_ptr, rank, like_ptr):
    """Return a pointer to a rank's `Peers.parts`, of the same type as `like_ptr`."""
    found = tl.load(addresses_ptr + rank).to(tl.pointer_type(like_ptr.dtype.element_ty))
    return tl.multiple_of(found, 16)  # allows 16-byte loads instead of 2-byte ones


@triton.jit
def sum_of_pushed(
    own,  # [M, N / 2] int32, pairs of 16-bit values of this rank's partial sum; None if sent
    pushed_ptr,  # [SIZE] int64, the address of each rank's receive buffers
    place,  # [M, N / 2], each pair's index among the words that one rank writes
    mask,  # [M, N / 2]
    count,
    PUSHED: tl.constexpr,
    number: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    """Write this rank's tile to all other ranks, unless it has been sent already. Wait for all
    tiles, and return their sum, fp32 [M, N]. count: the number of this call, stored in every
    word."""
    stamp = count.to(tl.int64) << 32
    if own is not None:
        word = stamp | (own.to(tl.int64) & 0xFFFFFFFF)
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                theirs = tl.load(pushed_ptr + rank).to(tl.pointer_type(tl.int64))
                tl.store(theirs + RANK * PUSHED + place, word, mask=mask)
    rank = tl.arange(0, BLOCK_RANKS)[:, None, None]
    inbox = tl.load(pushed_ptr + RANK).to(tl.pointer_type(tl.int64))
    inbox += rank * PUSHED + place[None, :, :]
    awaited = (rank < SIZE) & mask[None, :, :]
    if own is not None:
        awaited &= rank != RANK
    found = tl.load(inbox, mask=awaited, other=stamp, volatile=True)
    while tl.max(((found >> 32).to(tl.int32) != count).to(tl.int32)) > 0:
        found = tl.load(inbox, mask=awaited, other=stamp, volatile=True)
    twos = found.to(tl.int32)
    if own is not None:
        twos = tl.where(rank == RANK, own[None, :, :], twos)
    low = twos.to(tl.int16).to(number, bitcast=True).to(tl.float32)
    high = (twos >> 16).to(tl.int16).to(number, bitcast=True).to(tl.float32)
    sums = tl.join(tl.sum(low, axis=0), tl.sum(high, axis=0))
    return tl.reshape(sums, [place.shape[0], 2 * place.shape[1]])


@triton.jit(do_not_specialize=["num_rows"])
def reduce_add_norm_kernel(
    addresses_ptr,  # [SIZE] int64, as in `Peers`
    flags_ptr,  # [SIZE] int64, as in `Peers`
    epochs_ptr,  # [F] int32, in and out: `Peers.pushes` with pushed_ptr, else `Peers.epochs`
    pushed_ptr,  # [SIZE] int64; if None, partial sums are read from the other ranks
    residual_ptr,  # [T, N], or None
    norm_ptr,  # [N], or None
    hidden_ptr,  # [T, N], out
    scaled_ptr,  # [T, N], out; unused if norm_ptr is None
    squares_ptr,  # [T, N / BLOCK_N] fp32, out; unused if norm_ptr is None
    num_rows,
    place,  # offset of the buffer in each rank's `Peers.parts`, in elements
    residual_stride,
    N: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PUSHED: tl.constexpr,  # words per sending rank in a receive buffer
    SENT: tl.constexpr,  # whether the matmul has sent the words; used only with pushed_ptr
    SHARED_OUT: tl.constexpr,  # whether each rank sums a share of the rows
    DEPENDENT: tl.constexpr,
):
    column_block = tl.program_id(0)
    program = tl.program_id(1) * tl.num_programs(0) + column_block
    column = column_block * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    if SHARED_OUT:
        tl.static_assert(norm_ptr is None and pushed_ptr is None)
        total = num_rows
        share = tl.cdiv(num_rows, SIZE)
        num_rows = tl.minimum(num_rows, (RANK + 1) * share)
        row += RANK * share
    mask = (row < num_rows)[:, None] & (column < N)[None, :]
    inside = row[:, None] * N + column[None, :]
    if norm_ptr is not None:
        norm = tl.load(norm_ptr + column, mask=column < N, other=0.0).to(tl.float32)
    residual_at = row.to(tl.int64)[:, None] * residual_stride + column[None, :]
    if pushed_ptr is not None:
        half: tl.constexpr = BLOCK_N // 2
        word = column_block * half + tl.arange(0, half)
        live = (row < num_rows)[:, None] & (word < N // 2)[None, :]
        inside_words = row[:, None] * (N // 2) + word[None, :]
        own = None
        if SENT:
            beside_predecessor(DEPENDENT)
        else:
            own_ptr = tl.load(addresses_ptr + RANK).to(tl.pointer_type(tl.int32))
            own_ptr = tl.multiple_of(own_ptr, 16) + place // 2 + inside_words
            after_predecessor(DEPENDENT)
            own = tl.load(own_ptr, mask=live, other=0)

        count = tl.load(epochs_ptr + program) + 1
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + residual_at, mask=mask, other=0.0).to(tl.float32)
        slot = inside_words + (place > 0).to(tl.int32) * SIZE * PUSHED
        if SENT:
            # Wait for one word of this rank first. Polling all words while the matmul runs would
            # take L2 bandwidth from it.
            first_word = tl.program_id(1) * BLOCK_M * (N // 2) + column_block * half
            inbox = tl.load(pushed_ptr + RANK).to(tl.pointer_type(tl.int64))
            inbox += (place > 0).to(tl.int32) * SIZE * PUSHED + RANK * PUSHED + first_word
            while (tl.load(inbox, volatile=True) >> 32).to(tl.int32) != count:
                pass
        number: tl.constexpr = hidden_ptr.dtype.element_ty
        summed = sum_of_pushed(
            own, pushed_ptr, slot, live, count, PUSHED, number, RANK, SIZE, BLOCK_RANKS
        )
        tl.store(epochs_ptr + program, count)
    else:
        peer = tl.minimum(tl.arange(0, BLOCK_RANKS), SIZE - 1)
        pads = tl.load(flags_ptr + peer)
        own = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32)) + program * SIZE
        after_predecessor(DEPENDENT)

        epoch = tl.load(epochs_ptr + program) + 1
        theirs = pads.to(tl.pointer_type(tl.int32)) + program * SIZE + RANK
        announce = tl.arange(0, BLOCK_RANKS) < SIZE
        tl.atomic_add(theirs, 1, mask=announce, sem="release", scope="sys")
        if residual_ptr is not None:
            residual = tl.load(residual_ptr + residual_at, mask=mask, other=0.0).to(tl.float32)
        wait_for_peers(own + peer, epoch)
        tl.store(epochs_ptr + program, epoch)

        summed = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for rank in tl.static_range(SIZE):
            part_ptr = part_of(addresses_ptr, rank, hidden_ptr) + place + inside
            part = tl.load(part_ptr, mask=mask, other=0.0, cache_modifier=".cg")
            summed += part.to(tl.float32)
    # Round the sum before the residual is added, as a separate all-reduce would.
    hidden = summed.to(hidden_ptr.dtype.element_ty)
    if residual_ptr is not None:
        hidden = (residual + hidden.to(tl.float32)).to(hidden_ptr.dtype.element_ty)
    tl.store(hidden_ptr + inside, hidden, mask=mask)
    if SHARED_OUT:
        mine = part_of(addresses_ptr, RANK, hidden_ptr) + place + inside
        tl.store(mine, hidden, mask=mask)
        tl.debug_barrier()  # signal only after all threads have stored
        tl.atomic_add(theirs, 1, mask=announce, sem="release", scope="sys")
        wait_for_peers(own + peer, epoch + 1)
        tl.store(epochs_ptr + program, epoch + 1)
        for rank in tl.static_range(SIZE):
            if rank != RANK:
                there = row + (rank - RANK) * share
                live = (there < tl.minimum(total, (rank + 1) * share))[:, None] & (column < N)
                at = there[:, None] * N + column[None, :]
                part_ptr = part_of(addresses_ptr, rank, hidden_ptr) + place + at
                part = tl.load(part_ptr, mask=live, other=0.0, cache_modifier=".cg")
                tl.store(hidden_ptr + at, part, mask=live)
    if norm_ptr is not None:
        wide = tl.where(mask, hidden.to(tl.float32), 0.0)
        tl.store(scaled_ptr + inside, (wide * norm[None, :]).to(hidden.dtype), mask=mask)
        squares_at = row * tl.num_programs(0) + column_block
        tl.store(squares_ptr + squares_at, tl.sum(wide * wide, axis=1), mask=row < num_rows)
    if SENT:
        end_beside_predecessor(DEPENDENT)


class Outputs(NamedTuple):
    """Memory for the results of a sum over ranks: the sum [T, N], with the residual added, and the
    fields `scaled` and `squares` of `Normed`, or None if the sum leaves no norm to the next matmul.
    """

    hidden: Tensor
    scaled: Tensor | None
    squares: Tensor | None

    @classmethod
    def allocated(cls, parts: Tensor, num_rows: int, has_norm: bool) -> Self:
        """parts: `Peers.parts`, which have the width and dtype of the sum."""
        kind: dict[str, Any] = {"dtype": parts.dtype, "device": parts.device}
        size = num_rows, parts.shape[2]
        if not has_norm:
            return cls(torch.empty(size, **kind), None, None)
        blocks = triton.cdiv(size[1], SUM_COLUMNS)
        squares = torch.empty((num_rows, blocks), dtype=torch.float32, device=parts.device)
        return cls(torch.empty(size, **kind), torch.empty(size, **kind), squares)


def reduce_add_norm_triton(
    peers: Peers,
    place: int,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    outputs: Outputs | None = None,
    is_sent: bool = False,
) -> Normed:
    """See `ops.reduce_add_norm`. outputs, is_sent: as for `reduce_parts_triton`."""
    num_rows, width = residual.shape
    assert norm_weight.shape == (width,) and residual.stride(1) == 1
    assert residual.dtype == peers.parts.dtype
    if outputs is None:
        outputs = Outputs.allocated(peers.parts, num_rows, leaves_norm(residual))
    reduce_parts_triton(peers, place, outputs, residual, norm_weight, is_sent)
    hidden, scaled, squares = outputs
    if scaled is None:
        return Normed(hidden, rms_norm_triton(hidden, norm_weight, eps), None, eps)
    return Normed(hidden, scaled, squares, eps)


def reduce_parts_triton(
    peers: Peers,
    place: int,
    outputs: Outputs,
    residual: Tensor | None = None,
    norm_weight: Tensor | None = None,
    is_sent: bool = False,
) -> None:
    """Sum the parts of all ranks.

    outputs: where the results go. If parts were sent, this memory must have been allocated before
        the matmul that sent them was launched: see `split_sums_triton`.
    residual: [T, N], added to the sum; None to add nothing.
    norm_weight: [N], the weight of the norm that follows; used only if `outputs` has `scaled`.
    is_sent: whether this rank's part was sent, and not stored in its buffer.
    """
    parts = peers.parts
    hidden, scaled, squares = outputs
    num_rows, width = hidden.shape
    assert peers.take(place, num_rows, width) is not None
    blocks = triton.cdiv(width, SUM_COLUMNS)
    assert peers.epochs.numel() >= blocks * triton.cdiv(num_rows, SUM_ROWS)
    pushed = None if (inbox := peers.inbox(place, num_rows)) is None else inbox.pushed
    assert pushed is not None or not is_sent
    has_norm = scaled is not None
    is_shared_out = not has_norm and peers.size > 2 and num_rows * width >= SHARED_OUT_NUMBERS
    summed_rows = triton.cdiv(num_rows, peers.size) if is_shared_out else num_rows
    # The grid and the flags assume tiles of SUM_ROWS rows. BLOCK_M is smaller only for one or two
    # rows, which form a single tile in any case.
    reduce_add_norm_kernel[(blocks, triton.cdiv(summed_rows, SUM_ROWS))](
        *(peers.addresses, peers.flags, peers.epochs if pushed is None else peers.pushes, pushed),
        *(residual, norm_weight if has_norm else None, hidden, scaled, squares),
        num_rows,
        place * parts.stride(0),
        0 if residual is None else residual.stride(0),
        N=width,
        RANK=peers.rank,
        SIZE=peers.size,
        BLOCK_RANKS=triton.next_power_of_2(peers.size),
        BLOCK_M=min(SUM_ROWS, triton.next_power_of_2(num_rows)),
        BLOCK_N=SUM_COLUMNS,
        PUSHED=PUSHED_NUMBERS // 2,
        SENT=is_sent,
        SHARED_OUT=is_shared_out,
        num_warps=min(SUM_ROWS, triton.next_power_of_2(num_rows)),
        **dependence(parts),
    )


@triton.jit(do_not_specialize=["num_rows"])
def gather_columns_kernel(
    addresses_ptr,  # [SIZE] int64, as in `Peers`
    flags_ptr,  # [SIZE] int64, as in `Peers`
    epochs_ptr,  # [F, SIZE] int32, `Peers.epochs`, in and out
    out_ptr,  # [T, SIZE * SHARE], out
    num_rows,
    SHARE: tl.constexpr,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    DEPENDENT: tl.constexpr,
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
        wait_for_peers(own + source + tl.arange(0, 1), epoch)
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
    block_m = min(GATHER_ROWS, triton.next_power_of_2(num_rows))
    groups = min(GATHER_GROUPS, triton.cdiv(num_rows, block_m))
    # The source rank is the first grid dimension, so that programs on different ranks that wait
    # for each other start at about the same time.
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
        num_warps=4,
        **dependence(out),
    )
    return out
