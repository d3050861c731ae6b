"""Memory of a group of GPUs that each of them can read."""

from dataclasses import dataclass

from torch import Tensor

MAX_ROWS = 64  # of a sum over ranks that goes through this memory
COLUMNS = 256  # of a sum, that one program adds up and has a flag for


def num_flags(width: int) -> int:
    """Counters that each rank needs for parts of `width` columns."""
    return -(-width // COLUMNS)


@dataclass(frozen=True, slots=True)
class Peers:
    """One rank's view of buffers that all ranks of a group have in common.

    rank, size: of the group. parts: [2, T, N] of this rank's own, read by the others; of which
    passes use the first for what attention adds to the residual stream and the second for the MLP.
    addresses: int64 [size], of each rank's parts. flags: int64 [size], addresses of each rank's
    int32 [F, size] counters of what the others have announced to it. epochs: int32 [F], how many
    times this rank has.
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
