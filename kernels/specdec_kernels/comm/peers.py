"""Sums and gathers over the GPUs of a group, through memory that all of them can read."""

from dataclasses import dataclass

from torch import Tensor

from specdec_kernels.linear.reference import Normed

MAX_ROWS = 256  # maximum rows that a shared buffer holds

# The tile that one program sums. Each tile has its own flags. A thread reads 8 16-bit values from
# each rank.
SUM_ROWS, SUM_COLUMNS = 4, 256
# Up to this many 16-bit values, each rank writes its partial sums to the others, with a count next
# to each pair of values. That takes one trip between GPUs. Reading the others' partial sums takes
# two trips but moves half the bytes.
PUSHED_NUMBERS = 8 * 8192
# From this many values on, groups of more than two ranks divide a sum: each rank sums a share of
# the rows and reads the other shares.
SHARED_OUT_NUMBERS = 40 * 8192
# The tile of a gather of logits. A program copies every GATHER_GROUPS-th tile along the rows.
GATHER_ROWS, GATHER_COLUMNS, GATHER_GROUPS = 4, 1024, 8


def num_sum_flags(width: int) -> int:
    """Return the number of counters per rank that sums of rows of `width` values need."""
    return -(-width // SUM_COLUMNS) * (MAX_ROWS // SUM_ROWS)


def num_pushed_words(size: int, width: int, itemsize: int) -> int:
    """Return the number of 64-bit words on each rank that other ranks write their partial sums to.
    It is 0 if ranks read the others' partial sums instead, because of the dtype or the width."""
    return size * PUSHED_NUMBERS if itemsize == 2 and width % 2 == 0 else 0


def num_gather_flags(share: int) -> int:
    """Return the number of counters per rank that gathers of `share` columns per rank need."""
    return -(-share // GATHER_COLUMNS) * GATHER_GROUPS


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's view of buffers that all ranks of a group share.

    rank, size: this rank, and the number of ranks.
    parts: [places, MAX_ROWS, N], this rank's buffers, which the other ranks read. A place is the
        index of a buffer.
    addresses: int64 [size], the address of each rank's `parts`.
    flags: int64 [size], the address of each rank's counters, int32 [F, size]. These count how often
        each other rank has announced that its data is written.
    epochs: int32 [F, size], how many announcements this rank has waited for. Sums wait for all
        ranks at once and use [F].
    pushed: int64 [size], the address of each rank's words, int64 [2, size, PUSHED_NUMBERS / 2],
        to which the other ranks write. None if ranks only read.
    pushes: int32 [F], how often ranks have written to `pushed`.
    """

    rank: int
    size: int
    parts: Tensor
    addresses: Tensor
    flags: Tensor
    epochs: Tensor
    pushed: Tensor | None
    pushes: Tensor

    def take(self, place: int, num_rows: int, width: int) -> Tensor | None:
        """Return the buffer `place` for this rank's data [num_rows, width], or None if that does
        not fit."""
        _, rows, most = self.parts.shape
        if num_rows > rows or width != most:
            return None
        return self.parts[place, :num_rows]


def reduce_add_norm(
    peers: Peers, place: int, residual: Tensor, norm_weight: Tensor, eps: float
) -> Normed:
    """Sum all ranks' partial sums [T, N] and return `add_norm` of the result.

    Each rank first writes its partial sum to `peers.take(place, T, N)`. CUDA only, at most 256
    rows. Every rank of the group must call this, with place 0 and 1 in turn. residual: [T, N], rows
    contiguous, the same on all ranks. norm_weight: [N].
    """
    from specdec_kernels.comm.peers_triton import reduce_add_norm_triton

    return reduce_add_norm_triton(peers, place, residual, norm_weight, eps)


def reduce_parts(peers: Peers, place: int, num_rows: int) -> Tensor:
    """Return the sum [T, N] of all ranks' partial sums, under the conditions of
    `reduce_add_norm`."""
    from specdec_kernels.comm.peers_triton import reduce_parts_triton

    return reduce_parts_triton(peers, place, num_rows)


def gather_columns(peers: Peers, num_rows: int) -> Tensor:
    """Return all ranks' columns side by side: [T, size * N]. CUDA only.

    Each rank first writes its columns [T, N] to `peers.take(0, num_rows, N)`. Every rank of the
    group must call this. The ranks must synchronise before they write new columns.
    """
    from specdec_kernels.comm.peers_triton import gather_columns_triton

    return gather_columns_triton(peers, num_rows)
