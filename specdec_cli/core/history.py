"""What sequences hold, on the device, for a proposer that looks tokens up there."""

from dataclasses import dataclass, field
from typing import Self

import torch

from specdec_cli.core.types import Sequence


@dataclass(slots=True, eq=False)
class History:
    """A row of tokens for each sequence; rounds append to it, so that the host writes it once.

    tokens: int32 [R, L], never reallocated, so graphs can hold it. What lies behind a sequence's
    own tokens has no meaning.
    """

    tokens: torch.Tensor
    _rows: dict[Sequence, int] = field(default_factory=dict)

    @classmethod
    def empty(cls, num_rows: int, num_tokens: int, device: torch.device) -> Self:
        return cls(torch.zeros(num_rows, num_tokens, dtype=torch.int32, device=device))

    def enter(self, seqs: list[Sequence]) -> list[int]:
        """The row of each of `seqs`, at most R.

        Those that were not in the call before are written; their rows were of sequences that are
        not in this one. No round may be in flight.
        """
        kept = {s: self._rows[s] for s in seqs if s in self._rows}
        free = iter(set(range(len(self.tokens))) - set(kept.values()))
        for seq in seqs:
            if seq not in kept:
                kept[seq] = next(free)
                self._write(kept[seq], seq.tokens)
        self._rows = kept
        return [kept[s] for s in seqs]

    def _write(self, row: int, tokens: list[int]) -> None:
        pinned = torch.tensor(tokens, dtype=torch.int32, pin_memory=self.tokens.is_cuda)
        self.tokens[row, : len(tokens)].copy_(pinned, non_blocking=True)
