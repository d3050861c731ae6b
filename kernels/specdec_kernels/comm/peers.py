"""Memory that all GPUs of a group can read, and sums and gathers through it."""

from dataclasses import dataclass

from torch import Tensor

from specdec_kernels.linear.reference import Normed

MAX_ROWS = 256  # maximum rows in this memory at once

# The tile of one program of a sum. It has its own flags. Each thread reads 8 16-bit values from
# each rank.
SUM_ROWS, SUM_COLUMNS = 4, 256
# Up to this many 16-bit values, each rank writes its part to the others, with a count next to each
# pair. That takes one trip between GPUs. Reading the others' parts takes two trips with half the
# bytes.
PUSHED_NUMBERS = 8 * 8192
# From this many values on, more than two ranks divide a sum: each sums a share of the rows and
# reads the other shares.
SHARED_OUT_NUMBERS = 40 * 8192
# Tiles of logits. A program takes every GATHER_GROUPS-th tile along the rows.
GATHER_ROWS, GATHER_COLUMNS, GATHER_GROUPS = 4, 1024, 8


def num_sum_flags(width: int) -> int:
    """The number of counters for each other rank, for sums of rows of `width` values."""
    return -(-width // SUM_COLUMNS) * (MAX_ROWS // SUM_ROWS)


def num_pushed_words(size: int, width: int, itemsize: int) -> int:
    """The number of 64-bit words on each rank that other ranks write; 0 if they write none."""
    return size * PUSHED_NUMBERS if itemsize == 2 and width % 2 == 0 else 0


def num_gather_flags(share: int) -> int:
    """The number of counters for each other rank, for gathers of shares of `share` columns."""
    return -(-share // GATHER_COLUMNS) * GATHER_GROUPS


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's view of buffers that all ranks of a group share.

    rank, size: this rank and the number of ranks. parts: [places, MAX_ROWS, N], this rank's own,
    which the others read. addresses: int64 [size], addresses of the ranks' parts. flags: int64
    [size], addresses of the ranks' counters int32 [F, size], which count the announcements of the
    others. epochs: int32 [F, size], how many announcements have been awaited; sums, which wait for
    all ranks at once, use [F]. pushed: int64 [size], addresses of the ranks' words int64 [2, size,
    PUSHED_NUMBERS / 2], which the others write; None if no rank has any. pushes: int32 [F], pushes
    so far.
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
        """Memory for this rank's part [num_rows, width], or None if it does not fit."""
        _, rows, most = self.parts.shape
        if num_rows > rows or width != most:
            return None
        return self.parts[place, :num_rows]


def reduce_add_norm(
    peers: Peers, place: int, residual: Tensor, norm_weight: Tensor, eps: float
) -> Normed:
    """`add_norm` of the sum of all ranks' parts. Each rank has its part in `peers.take(place, T,
    N)`.

    CUDA only, at most 256 rows. Every rank of the group calls it, with place 0 and 1 in turn.
    residual: [T, N], rows contiguous, the same on all ranks. norm_weight: [N].
    """
    from specdec_kernels.comm.peers_triton import reduce_add_norm_triton

    return reduce_add_norm_triton(peers, place, residual, norm_weight, eps)


def reduce_parts(peers: Peers, place: int, num_rows: int) -> Tensor:
    """The sum [T, N] of all ranks' parts, under the conditions of `reduce_add_norm`."""
    from specdec_kernels.comm.peers_triton import reduce_parts_triton

    return reduce_parts_triton(peers, place, num_rows)


def gather_columns(peers: Peers, num_rows: int) -> Tensor:
    """All ranks' parts in `peers.take(0, num_rows, N)`, side by side: [T, size * N]. CUDA only.

    Every rank of the group calls it, and synchronises before it writes a new part.
    """
    from specdec_kernels.comm.peers_triton import gather_columns_triton

    return gather_columns_triton(peers, num_rows)
