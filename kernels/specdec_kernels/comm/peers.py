"""Sums and gathers over the GPUs of a group, through memory that all of them can read."""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from specdec_kernels.experts.reference import Experts
from specdec_kernels.linear.reference import Normed
from specdec_kernels.linear.stored import Stored

MAX_ROWS = 256  # maximum rows that a shared buffer holds

# The size of the tile that one program sums. Ranks synchronise per tile, so each tile has its own
# flags. Each thread loads 8 16-bit values (16 bytes) from each rank.
SUM_ROWS, SUM_COLUMNS = 4, 256
# For sums of up to this many 16-bit values, each rank writes its partial sums into the memory of
# the other ranks. Each 64-bit word holds two values and a call number, which tells the reader that
# they have arrived, so a sum takes one trip over NVLink. For larger sums, ranks announce their
# partial sums and then read each other's, which takes two trips but moves half as many bytes. A
# matmul kernel writes the words itself where it can, and then the sum need not wait for its end.
PUSHED_NUMBERS = 8 * 8192
# For sums of at least this many values, groups of more than two ranks divide the work: each rank
# sums only its share of the rows, and then reads the other ranks' results.
SHARED_OUT_NUMBERS = 40 * 8192
# The size of the tiles in which logits are gathered. GATHER_GROUPS programs share the tiles of a
# column block: each copies every GATHER_GROUPS-th tile along the rows.
GATHER_ROWS, GATHER_COLUMNS, GATHER_GROUPS = 4, 1024, 8


def num_sum_flags(width: int) -> int:
    """Return how many counters each rank needs to sum rows of `width` values: one per tile."""
    return -(-width // SUM_COLUMNS) * (MAX_ROWS // SUM_ROWS)


def num_pushed_words(size: int, width: int, itemsize: int) -> int:
    """Return the size in 64-bit words of each rank's memory for partial sums from other ranks.

    Return 0 if the dtype does not have 16 bits or the width is odd. In these cases values cannot be
    packed in pairs, so ranks always read the others' partial sums instead.
    """
    return size * PUSHED_NUMBERS if itemsize == 2 and width % 2 == 0 else 0


def num_gather_flags(share: int) -> int:
    """Return how many counters each rank needs to gather `share` columns from every rank."""
    return -(-share // GATHER_COLUMNS) * GATHER_GROUPS


class Inbox(NamedTuple):
    """The words of all receive buffers to which a matmul kernel sends one rank's partial sums.

    pushed, pushes: as in `Peers`.
    first: the index of this rank's first word for the sum, in each rank's receive buffers.
    """

    pushed: Tensor
    pushes: Tensor
    first: int


class Part(NamedTuple):
    """The memory for one rank's partial sum [T, N].

    into: this rank's buffer.
    inbox: the words to which the kernel sends the partial sum instead, if it can; None to store it.
    """

    into: Tensor
    inbox: Inbox | None


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's view of buffers that all ranks of a group share.

    rank: the index of this rank.
    size: the number of ranks.
    parts: [buffers, MAX_ROWS, N], this rank's buffers, which the other ranks read. Functions take
        the index of a buffer as the argument `place`.
    addresses: int64 [size], the address of each rank's `parts`.
    flags: int64 [size], the address of each rank's counters, int32 [F, size], for F tiles. Rank r
        adds one to counter r of a tile on another rank to announce that it has written its data.
    epochs: int32 [F, size], for each of this rank's counters, how many announcements this rank has
        already waited for. Sums wait for all ranks at once, so they need only one value per tile
        and use the first F values of the flattened tensor.
    pushed: int64 [size], the address of each rank's receive buffers, int64 [2, size,
        PUSHED_NUMBERS / 2], to which all ranks write partial sums of few rows. None if ranks always
        read each other's `parts` instead.
    pushes: int32 [F], for each tile, how many sums have used `pushed`. Every word in `pushed`
        carries the number of the sum to which it belongs.
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
        """Return the rows of buffer `place` to which this rank writes its data, [num_rows, width].

        Return None if the buffer has fewer rows or a different width.
        """
        _, rows, most = self.parts.shape
        if num_rows > rows or width != most:
            return None
        return self.parts[place, :num_rows]

    def inbox(self, place: int, num_rows: int) -> Inbox | None:
        """Return the words to which matmul kernels send this rank's partial sums of `num_rows`
        rows, for buffer `place`. Return None if ranks read each other's `parts` instead."""
        if self.pushed is None or num_rows * self.parts.shape[2] > PUSHED_NUMBERS:
            return None
        first = (place * self.size + self.rank) * (PUSHED_NUMBERS // 2)
        return Inbox(self.pushed, self.pushes, first)

    def part(self, place: int, num_rows: int) -> Part:
        """Return the memory for this rank's partial sum of `num_rows` rows, at most MAX_ROWS."""
        return Part(self.parts[place, :num_rows], self.inbox(place, num_rows))


def linear_reduce_add_norm(
    peers: Peers,
    place: int,
    x: Tensor,
    weight: Tensor | Stored,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
) -> Normed:
    """Compute `linear_add_norm` for a matmul whose input features are split over the ranks. CUDA
    only. Every rank of the group must call this.

    place: the index of the buffer. Successive calls of functions that sum must alternate between 0
        and 1, because other ranks may still read the buffer of the previous call.
    x: [T, K], the input features of this rank.
    weight: [N, K], their columns.
    bias: [N], added to the sum; given on at most one rank.
    residual: [T, N] with T at most 256, rows contiguous, the same on all ranks.
    norm_weight, eps: of the norm that follows the sum; norm_weight is [N].
    """
    from specdec_kernels.comm.split_sums_triton import linear_reduce_add_norm_triton

    end = residual, norm_weight, eps
    return linear_reduce_add_norm_triton(peers, place, x, weight, bias, *end)


def linear_reduce(
    peers: Peers, place: int, x: Tensor, weight: Tensor | Stored, bias: Tensor | None
) -> Tensor:
    """Compute `linear_reduce_add_norm` without residual and norm. Return the sum [T, N]."""
    from specdec_kernels.comm.split_sums_triton import linear_reduce_triton

    return linear_reduce_triton(peers, place, x, weight, bias)


def mixture_reduce_add_norm(
    peers: Peers,
    place: int,
    x: Normed,
    experts: Experts,
    start: Tensor | None,
    norm_weight: Tensor,
    eps: float,
) -> Normed:
    """Compute `mixture_add_norm` for experts whose inner features are split over the ranks. CUDA
    only. Every rank of the group must call this.

    place, norm_weight: as for `linear_reduce_add_norm`.
    start: [T, N], this rank's part of another summand; None without one.
    """
    from specdec_kernels.comm.split_sums_triton import mixture_reduce_add_norm_triton

    end = norm_weight, eps
    return mixture_reduce_add_norm_triton(peers, place, x, experts, start, *end)


def reduce_add_norm(
    peers: Peers, place: int, residual: Tensor, norm_weight: Tensor, eps: float
) -> Normed:
    """Sum all ranks' partial sums [T, N] and return `add_norm` of the result. CUDA only.

    Each rank first writes its partial sum to `peers.take(place, T, N)`. Then every rank of the
    group must call this. The arguments are those of `linear_reduce_add_norm`.
    """
    from specdec_kernels.comm.peers_triton import reduce_add_norm_triton

    return reduce_add_norm_triton(peers, place, residual, norm_weight, eps)


def gather_columns(peers: Peers, num_rows: int) -> Tensor:
    """Return all ranks' columns side by side: [T, size * N]. CUDA only.

    Each rank first writes its columns [T, N] to `peers.take(0, num_rows, N)`. Then every rank of
    the group must call this. The ranks must synchronise before they write new columns, because
    other ranks may still read the old ones.
    """
    from specdec_kernels.comm.peers_triton import gather_columns_triton

    return gather_columns_triton(peers, num_rows)
