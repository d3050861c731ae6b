"""Inputs of forward passes over the packed tokens of several sequences. The inputs are at fixed
addresses, so that CUDA graphs can read them.

A pass feeds the tokens of its sequences, then padding. Padding belongs to no sequence, its keys and
values go to the trash block, and its outputs are meaningless. The host writes the inputs into one
of two buffers in host memory. A pass begins by copying them to the device, and ends by sending the
tokens that it decided to the host. Legend: T maximum number of tokens, B maximum number of
sequences, MB columns of the block tables, W tokens of a pass, including padding.
"""

from struct import pack_into
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from specdec_kernels import ops

from specdec_cli.core.batch import ForwardBatch, Span

Tokens: TypeAlias = npt.NDArray[np.int64]


class PackedInputs:
    """The inputs of passes over up to T tokens of up to B sequences.

    The host writes the inputs with `fill` and launches the pass, which runs `fetch` first and
    `tell` last. After launching it, the host calls `passed`.

    token_ids, positions: int64 [T].
    query_start: int32 [B + 1], the row of each sequence's first token.
    context_lens: int32 [B], 0 where there is no sequence.
    index: int64 [B], the key of each sequence's random numbers.
    seed: int64 scalar.
    block_tables: int32 [B, MB]; entries past a sequence's blocks are meaningless.
    """

    def __init__(
        self,
        num_tokens: int,
        num_sequences: int,
        num_columns: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.num_tokens, self.num_sequences = num_tokens, num_sequences
        self.block_size = block_size
        self.device = device
        sizes = num_tokens, num_sequences, num_columns
        lengths = _lengths(*sizes)
        words = sum(lengths)
        self._words = torch.zeros(words, dtype=torch.int32, device=device)
        on_device = _parts(self._words, sizes)
        self.token_ids, self.positions, self.query_start, self.context_lens = on_device[:4]
        self.index, self.seed, self.block_tables = on_device[4:]

        def on_host(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")

        # Two buffers of each kind, because the host may fill one for the next pass before the
        # previous pass has read the other.
        self._staged = on_host(2, words)
        self._told = on_host(2, num_sequences, dtype=torch.int64)
        self._pieces = [piece.numpy().data.cast("B") for piece in self._staged]
        self._offsets = [4 * sum(lengths[:part]) for part in range(len(lengths))]
        self._tokens: list[Tokens] = [piece.numpy() for piece in self._told]
        # The device counts the passes that have ended and tells the host. The host counts the
        # passes that it has launched.
        self._passes = torch.zeros(1, dtype=torch.int32, device=device)
        self._ended = on_host(1)
        self._num_ended = self._ended.numpy().data
        self._num_launched = 0
        self._row_bytes = 4 * num_columns  # the size of one row of the block tables
        self._positions = np.arange(num_columns * block_size).data.cast("B")
        self._no_rows = torch.zeros(0, dtype=torch.int64, device=device)

    def fill(self, spans: list[Span], width: int, shift: int = 0, seed: int = 0) -> None:
        """Write the inputs of the next pass into the next buffer.

        If the pass before the last one has not ended, wait for it, since it reads the same buffer.

        spans: the tokens to feed, at most `width` in all.
        width: the number of tokens of the pass, including padding.
        shift: take each token id, but not its position, from this many tokens later in the
        sequence.
        seed: the seed of the random numbers.
        """
        if self._num_ended[0] < self._num_launched - 1:
            torch.cuda.synchronize(self.device)
        # `struct` converts a list three times as fast as NumPy. It also runs less code, and after
        # waiting for a pass, the CPU has to load that code into its caches again.
        held = self._pieces[self._num_launched % 2]
        of_ids, of_positions, of_starts, of_contexts, of_index, of_seed, of_tables = self._offsets
        at, ends, contexts, keys = 0, [0], [], []
        for row, (seq, start, stop) in enumerate(spans):
            end = at + stop - start
            place, past = of_ids + 8 * at, of_ids + 8 * end
            held[place:past] = seq.packed(start + shift, stop + shift)
            place, past = of_positions + 8 * at, of_positions + 8 * end
            held[place:past] = self._positions[8 * start : 8 * stop]
            blocks = seq.block_table[: -(-stop // self.block_size)]
            pack_into(f"{len(blocks)}i", held, of_tables + self._row_bytes * row, *blocks)
            ends.append(end)
            contexts.append(stop)
            keys.append(seq.noise_key)
            at = end
        assert at <= width <= self.num_tokens
        if at < width:
            padding = bytes(8 * (width - at))
            for part in (of_ids, of_positions):
                held[part + 8 * at : part + 8 * width] = padding
        rows, empty = self.num_sequences, self.num_sequences - len(spans)
        pack_into(f"{rows + 1}i", held, of_starts, *ends, *[at] * empty)
        pack_into(f"{rows}i", held, of_contexts, *contexts, *[0] * empty)
        pack_into(f"{len(spans)}q", held, of_index, *keys)
        pack_into("q", held, of_seed, seed)

    def fetch(self) -> None:
        """Copy the inputs that `fill` wrote to the device. This runs on the device, as the first
        step of a pass."""
        ops.fetch_staged(self._words, self._staged, self._passes)

    def tell(self, tokens: torch.Tensor | None) -> None:
        """Send the tokens that a pass decided to the host, and report that the pass has ended.

        This runs on the device, as the last step of a pass. tokens: int64 [M]; None if the pass
        decided none.
        """
        ops.tell_tokens(self._passes, tokens, self._told, self._ended)

    @property
    def told(self) -> Tokens:
        """The host buffer, int64 [B], for the tokens of the pass whose inputs were written last.
        The tokens are in it once that pass has ended, and the second pass after it overwrites
        them."""
        return self._tokens[self._num_launched % 2]

    def passed(self) -> None:
        """Record that the pass whose inputs were written last has been launched."""
        self._num_launched += 1

    def batch(self, width: int, num_logits: int) -> ForwardBatch:
        """Return the batch for a pass over the first `width` tokens. It computes logits for the
        last token of each of the first `num_logits` sequences."""
        positions = self.positions[:width]
        tables = self.block_tables
        batch = ForwardBatch(
            token_ids=self.token_ids[:width],
            positions=positions,
            slots=ops.slot_mapping(tables, self.query_start, positions, self.block_size),
            query_start=self.query_start,
            context_lens=self.context_lens,
            block_tables=tables,
            max_query_len=width,
            logit_rows=self._no_rows,
            plan=None,
        )
        if num_logits:
            batch.logit_rows = last_rows(batch)[:num_logits]
        return batch


def last_rows(batch: ForwardBatch) -> torch.Tensor:
    """Return the row of each sequence's last token, int64 [B]; an arbitrary row where there is no
    sequence."""
    return (batch.query_start[1:] - 1).clamp_(min=0).long()


def last_blocks(batch: ForwardBatch, block_size: int) -> torch.Tensor:
    """Return the block of each sequence's last token, int64 [B]; the trash block where there is no
    sequence."""
    column = (batch.context_lens - 1).clamp_(min=0) // block_size
    blocks = batch.block_tables.gather(1, column.long()[:, None])[:, 0]
    return (blocks * (batch.context_lens > 0)).long()


def _lengths(num_tokens: int, num_sequences: int, num_columns: int) -> list[int]:
    """Return the size of each tensor that `_parts` returns, in 32-bit words, including padding.

    Each tensor starts at a multiple of 16 bytes, because Triton would recompile kernels for
    unaligned addresses. The sum is a multiple of 16 words, so that Triton can copy with wide loads.
    """
    words = 2 * num_tokens, 2 * num_tokens, num_sequences + 1, num_sequences, 2 * num_sequences, 2
    lengths = [-(-count // 4) * 4 for count in words]
    tables = num_sequences * num_columns
    return [*lengths, tables + -(sum(lengths) + tables) % 16]


def _parts(words: torch.Tensor, sizes: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
    """Split the words into views: token ids, positions, query starts, context lengths, keys of
    random numbers, the seed, and block tables. sizes: the numbers of tokens, sequences and table
    columns."""
    num_tokens, num_sequences, num_columns = sizes
    parts = words.split(_lengths(*sizes))
    ids, positions, index, seed = (parts[i].view(torch.int64) for i in (0, 1, 4, 5))
    return (
        *(ids[:num_tokens], positions[:num_tokens]),
        *(parts[2][: num_sequences + 1], parts[3][:num_sequences]),
        *(index[:num_sequences], seed[0]),
        parts[6][: num_sequences * num_columns].view(num_sequences, num_columns),
    )
