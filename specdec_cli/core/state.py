"""A batch on the device: a slot for each sequence, with all state that a round reads and updates.

The host reads results with a delay of at most one round. Legend: B slots, MB block-table columns.
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import Self

import torch
from specdec_kernels import ops

from specdec_cli.core.types import Sequence

_FIELDS = 6  # number of int64 fields per slot, not counting `tail`


def slot_counts(batch_size: int) -> list[int]:
    """Return the batch sizes for which rounds are captured, each a quarter of the next.

    Small sizes are included because few sequences are left at the end of a run, and a round over a
    small batch is faster. Sizes in between are left out because each one takes time to compile.
    """
    counts = [batch_size]
    while counts[0] > 1:
        counts.insert(0, -(-counts[0] // 4))
    return counts


@dataclass(slots=True, eq=False)
class Texts:
    """The tokens of R sequences on the device, for proposers that look up tokens and for repetition
    penalties. Rounds append to them. The tensors are never reallocated, so CUDA graphs can use
    them.

    tokens: int32 [R, L], one sequence per row. Entries after a sequence's tokens are meaningless.
    seen: bool [R, V + 1]; True for each token id that the row's sequence contains. The last column
        is a dummy that ids to be ignored are written to. None until a run has a repetition penalty.
    """

    tokens: torch.Tensor
    seen: torch.Tensor | None = None
    _rows: dict[Sequence, int] = field(default_factory=dict)

    @classmethod
    def empty(cls, num_rows: int, num_tokens: int, device: torch.device) -> Self:
        return cls(torch.zeros(num_rows, num_tokens, dtype=torch.int32, device=device))

    def mark(self, num_ids: int) -> None:
        """Allocate `seen`, unless it exists, so that the token ids of each sequence are recorded
        from now on. num_ids: the size of the vocabulary."""
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

    numbers: the tensor that `tail` and the other int64 [B] fields are views of.
    tail: int64 [B, W], the last W tokens of each sequence, padded with zeros on the left.
    length: int64 [B], the number of tokens of each sequence.
    limit: int64 [B], the number of tokens at which each sequence ends.
    index: int64 [B], the lowest 32 bits of each prompt's index, the key of its random numbers.
    row: int64 [B], the row of each sequence in `texts`; 0 without `texts`.
    prompt: int64 [B], the number of tokens of each prompt.
    draft_kv: int64 [B], the number of tokens that the proposer's cache held when the slots were
        loaded. Rounds do not update it.
    active: bool [B]; True while the slot's sequence is still decoding.
    block_tables: int32 [B, MB]. Unused entries are 0, the block that takes writes of padding.
    seed: int64 scalar, the run's seed.
    """

    def __init__(
        self,
        batch_size: int,
        num_columns: int,
        device: torch.device,
        texts: Texts | None = None,
        tail: int = 2,
    ) -> None:
        # `tail` and the int64 [B] fields are views of one tensor, so that `load` can write all of
        # them with one copy.
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
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the state, and those of `texts`."""
        texts = [] if self.texts is None else [self.texts.tokens, self.texts.seen]
        found = [self.numbers, self.active, self.block_tables, self.seed, *texts]
        return [one for one in found if one is not None]

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
        of_slots = [
            (len(s.tokens), s.max_tokens, s.noise_key, row, s.num_prompt_tokens, s.draft_kv)
            for s, row in zip(seqs, rows, strict=True)
        ] + [(1, 0, 0, 0, 0, 0)] * idle
        flat += chain.from_iterable(zip(*of_slots, strict=True))
        _write(self.numbers.view(-1), flat)
        _write(self.active, [True] * len(seqs) + [False] * idle)
        self.seed.fill_(seed)
        self.block_tables.zero_()
        self.grow([(b, 0, s.block_table) for b, s in enumerate(seqs)])

    def append(self, slots: list[int], tokens: torch.Tensor, eos_ids: torch.Tensor) -> None:
        """Append one token to the sequence in each of `slots`. A slot becomes inactive if the token
        is in `eos_ids` or is the last one allowed. tokens: int64 [R] on the device, for R slots."""
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
        """Deactivate a slot, so that later rounds do not write to its blocks, which may be given to
        another sequence."""
        self.active[slot].fill_(False)


def _write(held: torch.Tensor, values: list[int] | list[bool]) -> None:
    """Copy `values` into the one-dimensional tensor `held`. On a GPU, copy from pinned memory and
    do not wait for the copy."""
    if held.device.type == "cpu":
        held.numpy()[:] = values  # a copy by torch takes three times as long
    else:
        held.copy_(torch.tensor(values, dtype=held.dtype, pin_memory=True), non_blocking=True)
