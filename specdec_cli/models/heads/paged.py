"""A head bound to a paged cache: features and token ids in, hidden states out.

Keys and values of row t are stored at position t, in the same blocks as the target's. Legend: B
slots, Q rows per slot, H width of the head, F width of the features.
"""

import sys

import torch
from specdec_kernels import ops

from specdec_cli.core.batch import (
    ForwardBatch,
    LiveRows,
    Rectangle,
    Span,
    live_batch,
    make_batch,
    packed_ids,
    padded_batch,
)
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.packed import last_blocks, last_rows
from specdec_cli.core.state import BatchState
from specdec_cli.models.heads.net import Head
from specdec_cli.models.prompt_passes import PromptGraphs, PromptPasses, Results


class PagedHead:
    """Runs passes through `head`, keeping keys and values in `cache`.

    carry: [num_blocks, H], the output of each sequence's last complete row; empty unless the head's
    config sets `carries`. A row is complete if the sequence contains the token that the row embeds.
    A sequence's entry is at the index of the cache block that holds the key of that row. The entry
    therefore follows the sequence through slots, graphs and preemption. This costs one vector per
    block.
    captured_width: the number of tokens in the largest prefill pass that is captured as a graph; 0
    if none is captured.
    """

    def __init__(self, head: Head, cache: KVCache, captured_width: int = sys.maxsize) -> None:
        self.head = head
        self._behind = max(0, head.config.shift - 1)
        self._captured_width = captured_width
        self.use(cache)

    @property
    def device(self) -> torch.device:
        return self.cache.device

    @property
    def storages(self) -> dict[int, int]:
        return self.head.storages

    def use(self, cache: KVCache) -> None:
        """Keep keys and values in `cache` from now on. Graphs captured over another cache become
        invalid."""
        self.cache = cache
        self._prompts: PromptPasses | None = None
        config = self.head.config
        shape = (cache.num_blocks * config.carries, config.output_size)
        self.carry = torch.zeros(shape, dtype=self.head.dtype, device=cache.device)

    def capture_prompts(self, graphs: PromptGraphs) -> None:
        """From now on, let `prefill` run its passes as CUDA graphs, which `graphs` captures."""
        if self._captured_width:
            sizes = self.cache.block_size, self._captured_width
            self._prompts = graphs.of(self.prompt_pass, *sizes)

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero the cache and the carried hidden states."""
        self.cache.clear()
        self.carry.zero_()

    @torch.inference_mode()
    def forward(self, spans: list[Span], features: torch.Tensor) -> torch.Tensor:
        """Run the head over `spans` and write keys and values to the cache. The row of token t
        embeds token t + shift, where `shift` is set in the head's config. The sequence must already
        contain that token.

        features: [T, F], the target's features of the tokens in `spans`. Returns hidden states
        [T, H].
        """
        batch = make_batch(spans, [0] * len(spans), self.cache.block_size, self.device)
        embedded = packed_ids(spans, self.head.config.shift)
        assert len(embedded) == len(batch.token_ids), "the tokens that rows embed must be known"
        batch.token_ids = embedded.to(self.device)
        return self._written(batch, features)

    @torch.inference_mode()
    def prefill(self, spans: list[Span], features: torch.Tensor) -> None:
        """Run the head over `spans`, as `forward` does, without returning hidden states."""
        if self._prompts is None or not self._prompts.fits(spans):
            self.forward(spans, features)
        else:
            self._prompts(spans, given=features, shift=self.head.config.shift)

    def prompt_pass(
        self, batch: ForwardBatch, kind: None, features: torch.Tensor | None
    ) -> Results:
        """Run one prefill pass. `PromptPasses` calls this method as its `Body`. The batch's token
        ids are those that the rows embed, so they are already shifted."""
        assert features is not None
        self._written(batch, features)
        return Results()

    def _written(self, batch: ForwardBatch, features: torch.Tensor) -> torch.Tensor:
        """Run a pass over known tokens and return its hidden states [T, H]. If the head carries
        outputs, store the last one of each sequence in `carry`."""
        hidden = self._run(batch, self.head.fuse(features)).hidden
        if self.head.config.carries:
            # Entries of the batch without a sequence write to block 0, which is never read.
            blocks = last_blocks(batch, self.cache.block_size)
            self.carry.index_copy_(0, blocks, hidden[last_rows(batch)])
        return hidden

    @torch.inference_mode()
    def forward_slots(
        self, what: Rectangle, state: BatchState, inputs: torch.Tensor, *, fused: bool
    ) -> ops.Normed:
        """Run a padded pass over all slots.

        what: describes the rows of each slot; its `token_ids` are the tokens that the rows embed.
        inputs: features [B, Q, F], or, if `fused`, the head's input [B, Q, H]. Keys and values of
        padding go to block 0. Returns B * Q rows; those of padding are meaningless.
        """
        batch, live = self._batch(what, state)
        rows = inputs.flatten(0, 1)
        if live is not None:
            if not len(live.tokens):  # rounds may start after all sequences have ended
                return self.head.normed(rows.new_zeros(len(rows), self.head.config.output_size))
            rows = rows[live.tokens]
        x = self._run(batch, rows if fused else self.head.fuse(rows))
        return x if live is None else _scattered(x, live.tokens, what.token_ids.numel())

    @torch.inference_mode()
    def carry_on(self, state: BatchState, hidden: torch.Tensor, place: torch.Tensor) -> None:
        """Store the output of each slot's last complete row in `carry`.

        hidden: [B, Q, H], the outputs of Q consecutive rows of each slot. The first row is at
        position length - shift.
        place: int64 [B], the index of the row to store for each slot; if it is below 0, nothing is
        stored.
        """
        at = place.clamp(min=0)
        rows = hidden.gather(1, at[:, None, None].expand(-1, 1, hidden.shape[2]))[:, 0]
        position = state.length - 1 - self._behind + at
        is_kept = state.active & (place >= 0) & (position >= 0)
        # Slots with nothing to store write to block 0, which is never read.
        self.carry.index_copy_(0, self._block_at(state, position) * is_kept, rows)

    @torch.inference_mode()
    def carried(self, state: BatchState) -> ops.Normed:
        """Return the output of each slot's last complete row, [B, H]; zeros if the slot has none
        yet."""
        position = state.length - 2 - self._behind
        rows = self.carry[self._block_at(state, position)]
        return self.head.normed(rows.masked_fill((position < 0)[:, None], 0.0))

    def _block_at(self, state: BatchState, position: torch.Tensor) -> torch.Tensor:
        column = (position // self.cache.block_size).clamp(0, state.block_tables.shape[1] - 1)
        return state.block_tables.gather(1, column[:, None])[:, 0].long()

    def _batch(self, what: Rectangle, state: BatchState) -> tuple[ForwardBatch, LiveRows | None]:
        """Build the batch for a pass over all slots. On a CPU, it contains only the live rows, and
        the second result has their indices. Otherwise, it contains all rows, and the second result
        is None."""
        size, vocab = self.cache.block_size, self.head.config.vocab_size
        if self.device.type == "cpu":
            return live_batch(what, state, size, vocab)
        return padded_batch(what, state, size, vocab), None

    def _run(self, batch: ForwardBatch, hidden: torch.Tensor) -> ops.Normed:
        return self.head(batch.token_ids, hidden, batch, self.cache)


def _scattered(x: ops.Normed, places: torch.Tensor, count: int) -> ops.Normed:
    """Return `count` rows: those of `x` at the indices `places`, and zeros elsewhere."""
    if len(places) == count:
        return x
    assert x.squares is None, "norms are complete on a CPU"
    hidden, scaled = (
        rows.new_zeros(count, rows.shape[1]).index_copy_(0, places, rows)
        for rows in (x.hidden, x.scaled)
    )
    return ops.Normed(hidden, scaled, None, x.eps)
