"""The inputs of padded passes over packed tokens, at addresses that stay, so that graphs hold them.

A pass has a width: its tokens are packed at the front, and padding follows. Padding belongs to no
sequence, its keys go to the trash block, and its outputs mean nothing. The host writes everything
into one of two pieces of pinned memory, which one copy brings. Knows nothing of models.
Legend: T most tokens, B most sequences, MB block-table columns, W a pass's width.
"""

import numpy as np
import torch
from specdec_kernels import ops

from specdec_cli.core.batch import ForwardBatch, Span


class _OnHost:
    """Pinned memory for a pass's words, as its parts. copied: when the last copy of it ended."""

    def __init__(
        self, num_words: int, num_tokens: int, num_sequences: int, device: torch.device
    ) -> None:
        is_cuda = device.type == "cuda"
        self.words = torch.zeros(num_words, dtype=torch.int32, pin_memory=is_cuda)
        self.parts = [part.numpy() for part in _parts(self.words, num_tokens, num_sequences)]
        self.copied: torch.cuda.Event | None = None


class PackedInputs:
    """Inputs of passes over up to T tokens of up to B sequences.

    token_ids, positions: int64 [T]. query_start: int32 [B + 1]. context_lens: int32 [B], 0 for
    rows without a sequence. index: int64 [B], what keys the random numbers of each sequence. seed:
    int64 scalar. block_tables: int32 [B, MB]; entries past a sequence's blocks mean nothing.
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
        words = sum(_lengths(num_tokens, num_sequences)) + num_sequences * num_columns
        self._sent = torch.zeros(words, dtype=torch.int32, device=device)
        on_device = _parts(self._sent, num_tokens, num_sequences)
        self.token_ids, self.positions, self.query_start, self.context_lens = on_device[:4]
        self.index, self.seed, self.block_tables = on_device[4:]
        # Two, since the copy of the pass before may wait until the device comes to it.
        self._on_host = [_OnHost(words, num_tokens, num_sequences, device) for _ in range(2)]
        self._no_rows = torch.zeros(0, dtype=torch.int64, device=device)

    def fill(self, spans: list[Span], width: int, shift: int = 0, seed: int = 0) -> None:
        """Enter `spans`, at most `width` tokens, without waiting for the device.

        shift: feed the tokens that many places further on, at the spans' own positions.
        """
        self._on_host.reverse()
        held = self._on_host[0]
        if held.copied is not None:  # else the copy of an earlier pass may still be reading
            held.copied.synchronize()
        tokens, positions, starts, contexts, index, of_run, tables = held.parts
        of_run[...] = seed
        at = 0
        for row, span in enumerate(spans):
            end = at + span.length
            tokens[at:end] = span.seq.tokens[span.start + shift : span.stop + shift]
            positions[at:end] = np.arange(span.start, span.stop)
            contexts[row] = span.stop
            index[row] = span.seq.noise_key
            blocks = span.seq.block_table[: -(-span.stop // self.block_size)]
            tables[row, : len(blocks)] = blocks
            starts[row + 1] = at = end
        assert at <= width <= self.num_tokens and len(spans) <= self.num_sequences
        tokens[at:width] = positions[at:width] = 0
        starts[len(spans) + 1 :] = at
        contexts[len(spans) :] = 0
        # The rows of tables are the last of what is sent, and those without a sequence stay.
        used = len(self._sent) - tables[len(spans) :].size
        self._sent[:used].copy_(held.words[:used], non_blocking=True)
        if self._sent.is_cuda:
            held.copied = held.copied or torch.cuda.Event()
            held.copied.record()

    def batch(self, width: int, num_logits: int) -> ForwardBatch:
        """The pass over the first `width` tokens. It reads nothing on the host.

        num_logits: the number of sequences, from the first one on, whose last tokens need logits.
        """
        positions = self.positions[:width]
        tables = self.block_tables
        limit = tables.shape[1] * self.block_size
        batch = ForwardBatch(
            token_ids=self.token_ids[:width],
            positions=positions,
            slots=ops.slot_mapping(
                tables, self.query_start, positions, None, self.block_size, limit
            ),
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
    """The row of each sequence's last token, int64 [B]; any row where there is no sequence."""
    return (batch.query_start[1:] - 1).clamp_(min=0).long()


def last_blocks(batch: ForwardBatch, block_size: int) -> torch.Tensor:
    """The block of each sequence's last token, int64 [B]; the trash block where none is."""
    column = (batch.context_lens - 1).clamp_(min=0) // block_size
    blocks = batch.block_tables.gather(1, column.long()[:, None])[:, 0]
    return (blocks * (batch.context_lens > 0)).long()


def _lengths(num_tokens: int, num_sequences: int) -> list[int]:
    """Words of the token ids, the positions, where queries start, the contexts, the prompts'
    indices, and the seed.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel again for an address that it
    knows less of.
    """
    words = 2 * num_tokens, 2 * num_tokens, num_sequences + 1, num_sequences, 2 * num_sequences, 2
    return [-(-count // 4) * 4 for count in words]


def _parts(words: torch.Tensor, num_tokens: int, num_sequences: int) -> tuple[torch.Tensor, ...]:
    """Views of the words: token ids, positions, where queries start, contexts, the prompts'
    indices, the seed, and the tables."""
    lengths = _lengths(num_tokens, num_sequences)
    *parts, tables = words.split([*lengths, len(words) - sum(lengths)])
    ids, positions, index, seed = (parts[i].view(torch.int64) for i in (0, 1, 4, 5))
    return (
        *(ids[:num_tokens], positions[:num_tokens]),
        *(parts[2][: num_sequences + 1], parts[3][:num_sequences]),
        *(index[:num_sequences], seed[0], tables.view(num_sequences, -1)),
    )
