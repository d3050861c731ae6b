"""The memory of a group of ranks, on one device."""

import torch
from specdec_kernels.comm.peers import (
    MAX_ROWS,
    PUSHED_NUMBERS,
    SUM_COLUMNS,
    SUM_ROWS,
    Peers,
    num_sum_flags,
)
from torch import Tensor

WORDS = PUSHED_NUMBERS // 2


class Group:
    """The memory of all ranks of a group, on one device. Words that nobody has sent are -1.

    are_shared: whether forks share the memory that ranks share. It must be on a CPU then.
    """

    def __init__(
        self,
        size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        are_shared: bool = False,
    ) -> None:
        self.parts = torch.full((size, 2, MAX_ROWS, width), float("nan"), dtype=dtype)
        self.parts = self.parts.to(device)
        self.inboxes = torch.full((size, 2, size, WORDS), -1, device=device)
        tiles = num_sum_flags(width)
        # Each tile has had a number of sums of its own, and the next number wraps around for some.
        self.counts = torch.arange(tiles, dtype=torch.int32, device=device) * 7 + 2**31 - 20
        flags = torch.zeros(size, tiles, size, dtype=torch.int32, device=device)
        self.flags = flags
        if are_shared:  # before addresses are taken, since this moves the memory
            for memory in (self.parts, self.inboxes, self.flags):
                memory.share_memory_()
        self.ranks = [
            Peers(
                rank,
                size,
                self.parts[rank],
                torch.tensor([p.data_ptr() for p in self.parts], device=device),
                torch.tensor([f.data_ptr() for f in flags], device=device),
                flags[rank].clone(),
                torch.tensor([i.data_ptr() for i in self.inboxes], device=device),
                self.counts.clone(),
            )
            for rank in range(size)
        ]

    def words(self, part: Tensor) -> Tensor:
        """The words [T, N / 2] of a part [T, N] for the next sum."""
        rows, width = part.shape
        blocks = -(-width // SUM_COLUMNS)
        row, word = torch.arange(rows)[:, None], torch.arange(width // 2)[None, :]
        tile = row // SUM_ROWS * blocks + 2 * word // SUM_COLUMNS
        count = (self.counts + 1)[tile.to(part.device)].long()
        return (part.view(torch.int32).long() & 0xFFFFFFFF) | count << 32
