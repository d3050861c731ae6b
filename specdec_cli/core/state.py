"""A batch on the device: a slot for each sequence, with all state that a round reads and updates.

The host's view is at most one round late. Legend: B slots, MB block-table columns.
"""

from dataclasses import dataclass, field
from typing import Self

import torch
from specdec_kernels import ops

from specdec_cli.core.types import Sequence

_FIELDS = 6  # int64 fields of each slot besides its tail


def slot_counts(batch_size: int) -> list[int]:
    """Return the batch sizes for which rounds are captured, each a quarter of the next. Few
    sequences are left at the end of a run, so small sizes pay off. More sizes would take long to
    compile."""
    counts = [batch_size]
    while counts[0] > 1:
        counts.insert(0, -(-counts[0] // 4))
    return counts


@dataclass(slots=True, eq=False)
class Texts:
    """The tokens of R sequences on the device, for proposers that look up tokens and for repetition
    penalties. Rounds append to them. The tensors are never reallocated, so CUDA graphs can use
    them.

    tokens: int32 [R, L]. Entries after a sequence's tokens are meaningless. seen: bool [R, V + 1],
    the ids that each text contains; the last column is meaningless. None while no run has a
    penalty.
    """

    tokens: torch.Tensor
    seen: torch.Tensor | None = None
    _rows: dict[Sequence, int] = field(default_factory=dict)

    @classmethod
    def empty(cls, num_rows: int, num_tokens: int, device: torch.device) -> Self:
        return cls(torch.zeros(num_rows, num_tokens, dtype=torch.int32, device=device))

    def mark(self, num_ids: int) -> None:
        """Start to record which ids each text contains, in `seen`. num_ids: the size of the
        vocabulary."""
        if self.seen is None:
            shape = len(self.tokens), num_ids + 1
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self.tokens.device)

    def enter(self, seqs: list[Sequence]) -> list[int]:
        """Give each of `seqs`, at most R sequences, a row, and return the rows. A new sequence
        takes the row of one that has left. Call it only while no round is in flight."""
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
        if self.seen is not None:
            self.seen[row] = False
            self.seen[row].index_fill_(0, self.tokens[row, : len(tokens)].long(), True)


class BatchState:
    """The state of B slots on one device. Its tensors are never reallocated, so CUDA graphs can use
    them.

    numbers: one tensor that holds all int64 fields. tail: int64 [B, W], the last W tokens of each
    sequence; shorter texts have zeros before them. length: int64 [B], the number of tokens of each
    sequence. limit: int64 [B], the number of tokens at which each sequence ends. index: int64 [B],
    prompt indices. active: bool [B], whether the slot still decodes. block_tables: int32 [B, MB];
    unused entries are 0, the trash block. seed: int64 scalar. row: int64 [B], each sequence's row
    in `texts`; 0 without `texts`. prompt: int64 [B], the number of tokens of each prompt. draft_kv:
    int64 [B], the number of tokens in the proposer's cache when the slots were loaded; it is not
    updated afterwards.
    """

    def __init__(
        self,
        batch_size: int,
        num_columns: int,
        device: torch.device,
        texts: Texts | None = None,
        tail: int = 2,
    ) -> None:
        # `load` writes these fields with one copy, since they are parts of one tensor.
        self.numbers = torch.zeros(tail + _FIELDS, batch_size, dtype=torch.int64, device=device)
        self.tail = self.numbers[:tail].view(batch_size, tail)
        held = self.numbers[tail:]
        self.length, self.limit, self.index, self.row, self.prompt, self.draft_kv = held
        self.active = torch.zeros(batch_size, dtype=torch.bool, device=device)
        self.block_tables = torch.zeros(batch_size, num_columns, dtype=torch.int32, device=device)
        self.seed = torch.zeros((), dtype=torch.int64, device=device)
        self.texts = texts

    @property
    def device(self) -> torch.device:
        return self.tail.device

    @property
    def num_slots(self) -> int:
        return len(self.length)

    def load(self, seqs: list[Sequence], seed: int) -> None:
        """Put `seqs` into the first slots and make the other slots idle."""
        idle = self.num_slots - len(seqs)
        rows = self.texts.enter(seqs) if self.texts is not None else [0] * len(seqs)
        none = [0] * self.tail.shape[1]
        tails = [[*none, *s.tokens[-len(none) :]][-len(none) :] for s in seqs] + [none] * idle
        flat = [token for tail in tails for token in tail]
        for held, empty in (
            ([len(s.tokens) for s in seqs], 1),
            ([s.max_tokens for s in seqs], 0),
            ([s.noise_key for s in seqs], 0),
            (rows, 0),
            ([s.num_prompt_tokens for s in seqs], 0),
            ([s.draft_kv for s in seqs], 0),
        ):
            flat += held + [empty] * idle
        _write(self.numbers.view(-1), flat)
        _write(self.active, [True] * len(seqs) + [False] * idle)
        self.seed.fill_(seed)
        self.block_tables.zero_()
        self.grow([(b, 0, s.block_table) for b, s in enumerate(seqs)])

    def append(self, slots: list[int], tokens: torch.Tensor, eos_ids: torch.Tensor) -> None:
        """Append a token to each sequence in `slots`; the token may end the sequence. tokens: int64
        [R], on the device."""
        at = torch.tensor(slots, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        at = at.to(self.device, non_blocking=True)
        placed = torch.zeros_like(self.length).index_copy_(0, at, tokens)
        others = self.active.index_fill(0, at, False)
        none = torch.zeros_like(placed)
        self.active.logical_xor_(others)
        ops.advance(
            *(placed[:, None], none, none, self.tail, self.length, self.limit, self.active),
            *(eos_ids, torch.empty(self.num_slots, 3, dtype=torch.int64, device=self.device)),
        )
        self.active.logical_or_(others)

    def grow(self, added: list[tuple[int, int, list[int]]]) -> None:
        """Add blocks to the block tables. added: (slot, first column, block ids) for each table
        that grew."""
        if self.device.type == "cpu":
            tables = self.block_tables.numpy()
            for place, first, blocks in added:
                tables[place, first : first + len(blocks)] = blocks
            return
        entries = [
            (slot, column + i, block)
            for slot, column, blocks in added
            for i, block in enumerate(blocks)
        ]
        if entries:
            on_host = torch.tensor(entries, dtype=torch.int64, pin_memory=True)
            slot, column, block = on_host.to(self.device, non_blocking=True).unbind(1)
            self.block_tables.index_put_((slot, column), block.to(torch.int32))

    def stop(self, slot: int) -> None:
        """Make a slot idle: its blocks may belong to another sequence from now on."""
        self.active[slot].fill_(False)


def _write(held: torch.Tensor, values: list[int] | list[bool]) -> None:
    """Write `values` from pinned memory into the one-dimensional `held`, without waiting."""
    if held.device.type == "cpu":
        held.numpy()[:] = values  # a copy by torch takes three times as long
    else:
        held.copy_(torch.tensor(values, dtype=held.dtype, pin_memory=True), non_blocking=True)
