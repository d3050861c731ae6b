"""Memory of a group of GPUs that each of them can read."""

from dataclasses import dataclass

from torch import Tensor

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
