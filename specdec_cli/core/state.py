"""A batch as the device knows it: one slot a sequence, with all that a round reads and moves.

The host has the truth about sequences, at most one round late; it writes slots when sequences
come, go or grow, and never in between. Legend: B slots, MB block-table columns.
"""

from dataclasses import dataclass
from typing import Self

import torch

from specdec_cli.core.history import History
from specdec_cli.core.types import Sequence

_MASK = 0xFFFFFFFF


@dataclass(slots=True, eq=False)
class Slots:
    """The state of B slots; all on one device, and never reallocated, so graphs can hold it.

    tail: int64 [B, 2], the last two tokens. length: int64 [B], tokens a sequence has. limit:
    int64 [B], tokens at which it ends. index: int64 [B], prompt indices. active: bool [B], whether
    the slot still decodes. block_tables: int32 [B, MB]; 0, the trash block, where nothing is held.
    seed: int64, a scalar. row: int64 [B], the sequence's row of `history`, where there is one.
    """

    tail: torch.Tensor
    length: torch.Tensor
    limit: torch.Tensor
    index: torch.Tensor
    active: torch.Tensor
    block_tables: torch.Tensor
    seed: torch.Tensor
    row: torch.Tensor
    history: History | None = None

    @classmethod
    def empty(
        cls,
        batch_size: int,
        num_columns: int,
        device: torch.device,
        history: History | None = None,
    ) -> Self:
        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        return cls(
            tail=ints(batch_size, 2),
            length=ints(batch_size),
            limit=ints(batch_size),
            index=ints(batch_size),
            active=torch.zeros(batch_size, dtype=torch.bool, device=device),
            block_tables=torch.zeros(batch_size, num_columns, dtype=torch.int32, device=device),
            seed=ints(),
            row=ints(batch_size),
            history=history,
        )

    @property
    def device(self) -> torch.device:
        return self.tail.device

    def load(self, seqs: list[Sequence], seed: int) -> None:
        """Put `seqs` into the first slots; the others fall idle."""
        idle = self.tail.shape[0] - len(seqs)
        places = self.history.enter(seqs) if self.history is not None else [0] * len(seqs)
        rows = [
            [*[0, *s.tokens[-2:]][-2:], len(s.tokens), s.max_tokens, s.index & _MASK, 1, place]
            for s, place in zip(seqs, places, strict=True)
        ]
        state = _to(rows + [[0, 0, 1, 0, 0, 0, 0]] * idle, torch.int64, self.device)
        self.tail.copy_(state[:, :2])
        fields = (self.length, self.limit, self.index, self.active, self.row)
        for column, field in enumerate(fields, start=2):
            field.copy_(state[:, column])
        self.seed.fill_(seed)
        self.block_tables.zero_()
        self.grow([(b, 0, s.block_table) for b, s in enumerate(seqs)])

    def grow(self, added: list[tuple[int, int, list[int]]]) -> None:
        """Enter new blocks: (slot, first column, block ids)."""
        entries = [
            (slot, column + i, block)
            for slot, column, blocks in added
            for i, block in enumerate(blocks)
        ]
        if entries:
            slot, column, block = _to(entries, torch.int64, self.device).unbind(1)
            self.block_tables.index_put_((slot, column), block.to(torch.int32))

    def stop(self, slot: int) -> None:
        """Let a slot fall idle: its blocks may belong to another sequence from now on."""
        self.active[slot].fill_(False)


def _to(rows: object, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """To the device without waiting for it: from pinned memory, which the allocator keeps until
    the copy is done."""
    return torch.tensor(rows, dtype=dtype, pin_memory=device.type == "cuda").to(
        device, non_blocking=True
    )
