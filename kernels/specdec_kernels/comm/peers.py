"""Memory of a group of GPUs that each of them can read."""

from dataclasses import dataclass

from torch import Tensor

from specdec_kernels.linear.reference import Normed

MAX_ROWS = 256  # that go through this memory at once

# Tiles of a sum: a program's, with flags of its own. 8 numbers of 16 bits a thread and rank.
SUM_ROWS, SUM_COLUMNS = 4, 256
# Tiles of logits. Programs take every GATHER_GROUPS-th of them along the rows.
GATHER_ROWS, GATHER_COLUMNS, GATHER_GROUPS = 4, 1024, 8


def num_sum_flags(width: int) -> int:
    """Counters, for each other rank, that sums over ranks of rows of `width` need."""
    return -(-width // SUM_COLUMNS) * (MAX_ROWS // SUM_ROWS)


def num_gather_flags(share: int) -> int:
    """Counters, for each other rank, that putting shares of `share` columns together needs."""
    return -(-share // GATHER_COLUMNS) * GATHER_GROUPS


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's view of buffers that all ranks of a group have in common.

    rank, size: of the group. parts: [places, MAX_ROWS, N] of this rank's own, read by the others.
    addresses: int64 [size], of each rank's parts. flags: int64 [size], addresses of each rank's
    int32 [F, size] counters of what the others have announced to it. epochs: int32 [F, size], how
    often they have been waited for; sums, which wait for all at once, use [F].
    """

    rank: int
    size: int
    parts: Tensor
    addresses: Tensor
    flags: Tensor
    epochs: Tensor

    def take(self, place: int, num_rows: int, width: int) -> Tensor | None:
        """Where this rank is to write its part [num_rows, width], or None if it has no room."""
        _, rows, most = self.parts.shape
        if num_rows > rows or width != most:
            return None
        return self.parts[place, :num_rows]


def reduce_add_norm(
    peers: Peers, place: int, residual: Tensor, norm_weight: Tensor, eps: float
) -> Normed:
    """`add_norm` of the sum of all ranks' parts, which they have written to their own memory.

    CUDA only, at most 256 rows. Every rank of the group calls it, and with place 0 and 1 in turn.

    Args:
        peers: The group's memory; `peers.take(place, T, N)` is where this rank's part is.
        place: 0 or 1.
        residual: [T, N], rows contiguous, the same on all ranks.
        norm_weight: [N].
    """
    from specdec_kernels.comm.peers_triton import reduce_add_norm_triton

    return reduce_add_norm_triton(peers, place, residual, norm_weight, eps)


def reduce_parts(peers: Peers, place: int, num_rows: int) -> Tensor:
    """The sum [T, N] of all ranks' parts alone; otherwise as `reduce_add_norm`."""
    from specdec_kernels.comm.peers_triton import reduce_parts_triton

    return reduce_parts_triton(peers, place, num_rows)


def gather_columns(peers: Peers, num_rows: int) -> Tensor:
    """What all ranks have written to `peers.take(0, num_rows, N)`, side by side: [T, size * N].

    CUDA only. Every rank of the group calls it, and has to take part in `reduce_add_norm` or
    another meeting of the group before it writes there again.
    """
    from specdec_kernels.comm.peers_triton import gather_columns_triton

    return gather_columns_triton(peers, num_rows)
