"""Sends the result of a matmul to all ranks, from within the matmul's kernel.

A rank's partial sums go to the receive buffers of every rank, itself included, as the words that
`peers_triton` describes. Each program sends its tile as soon as it is computed. So the sum over
ranks waits for words, and not for the matmul's last program, its end and its stores.
"""

import triton
import triton.language as tl

from specdec_kernels.comm.peers import SUM_COLUMNS, SUM_ROWS

ROWS, COLUMNS = tl.constexpr(SUM_ROWS), tl.constexpr(SUM_COLUMNS)


@triton.jit
def inbox_of(
    inboxes_ptr,  # [SIZE] int64, `Inbox.pushed`
    counts_ptr,  # `Inbox.pushes`
    first,  # `Inbox.first`
    row,  # [M]
    row_live,  # [M]
    first_column,  # of the tile, whose columns must lie in one block of COLUMNS
    num_features,  # even
    SIZE: tl.constexpr,
):
    """Load what `send` needs, early, so that no store has to wait for it: the addresses of the
    receive buffers, the offset of each row's first word in them, and the upper half of each row's
    words.

    Call this only after `after_predecessor`, since the upper halves hold the number of the sum: one
    more than the number of sums that have ended.
    """
    tile = row // ROWS * tl.cdiv(num_features, COLUMNS) + first_column // COLUMNS
    count = tl.load(counts_ptr + tile, mask=row_live, other=0) + 1
    inboxes = ()
    for rank in tl.static_range(SIZE):
        inboxes += (tl.load(inboxes_ptr + rank),)
    places = first + row * (num_features // 2) + first_column // 2
    return inboxes, places, count.to(tl.int64) << 32


@triton.jit
def send(
    out,  # [M, N], 16-bit values
    inbox,  # from `inbox_of`
    row_live,  # [M]
    first_column,
    num_features,
    SIZE: tl.constexpr,
):
    """Write a tile of this rank's partial sums to the receive buffers of all ranks."""
    M: tl.constexpr = out.shape[0]
    HALF: tl.constexpr = out.shape[1] // 2
    inboxes, places, stamps = inbox
    bits = out.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    low, high = tl.split(tl.reshape(bits, [M, HALF, 2]))
    word = stamps[:, None] | ((low | (high << 16)).to(tl.int64) & 0xFFFFFFFF)
    half = tl.arange(0, HALF)[None, :]
    mask = row_live[:, None] & (half < (num_features - first_column) // 2)
    for rank in tl.static_range(SIZE):
        inbox_ptr = inboxes[rank].to(tl.pointer_type(tl.int64))
        tl.store(inbox_ptr + places[:, None] + half, word, mask=mask)
