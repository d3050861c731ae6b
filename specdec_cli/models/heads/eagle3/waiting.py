"""A P-EAGLE head over a paged cache, whose true rows wait for the pass of the next round.

One pass takes them and the rows of masks behind them. Legend: B slots, W rows that may wait, F
numbers of the features, H width of the head.
"""

from typing import NamedTuple

import torch

from specdec_cli.core.batch import ForwardBatch
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.packed import last_blocks, last_rows
from specdec_cli.core.state import BatchState
from specdec_cli.models.heads.eagle3.config import PEagleConfig
from specdec_cli.models.heads.paged import PagedHead


class Waiting(NamedTuple):
    """rows: [B, W, H], fused features of each slot's last true rows, the first `counts` of them;
    the others mean nothing. counts: int64 [B], 0..W."""

    rows: torch.Tensor
    counts: torch.Tensor


class WaitingHead(PagedHead):
    """rows: [num_blocks, W, H], and counts: int64 [num_blocks], as `Waiting` has them, in the entry
    of the block that holds the last row's key. So they follow a sequence as `PagedHead.carry` does.
    The last row of a prompt waits too, since its output is still to be read.
    """

    def use(self, cache: KVCache) -> None:
        super().use(cache)
        config = self.head.config
        assert isinstance(config, PEagleConfig)
        shape = cache.num_blocks, config.most_drafted + 1, config.hidden_size
        self.rows = torch.zeros(shape, dtype=self.head.dtype, device=cache.device)
        self.counts = torch.zeros(cache.num_blocks, dtype=torch.int64, device=cache.device)

    @torch.inference_mode()
    def clear(self) -> None:
        super().clear()
        self.rows.zero_()

    def _written(self, batch: ForwardBatch, features: torch.Tensor) -> torch.Tensor:
        fused = self.head.fuse(features)
        # Block 0 takes what nobody reads, that of rows without a sequence.
        blocks = last_blocks(batch, self.cache.block_size)
        self.rows[:, 0].index_copy_(0, blocks, fused[last_rows(batch)])
        self.counts.index_fill_(0, blocks, 1)
        return self._run(batch, fused).hidden

    @torch.inference_mode()
    def keep(self, state: BatchState, features: torch.Tensor, last: torch.Tensor) -> None:
        """Let the rows up to `last` of each slot, int64 [B], wait for the next pass; none below 0.

        features: [B, Q, F], from the row of position length - 1 on.
        """
        count, width = features.shape[:2]
        rows = features.flatten(0, 1)
        if self.device.type == "cpu":  # true rows alone
            is_true = (torch.arange(width) <= last[:, None]) & state.active[:, None]
            places = is_true.flatten().nonzero()[:, 0]
            fused = torch.zeros(len(rows), self.rows.shape[2], dtype=self.head.dtype)
            fused[places] = self.head.fuse(rows[places])
        else:
            fused = self.head.fuse(rows)
        position = state.length - 1 + last.clamp(min=0)
        # Block 0 takes what nobody reads.
        blocks = self._block_at(state, position) * (state.active & (last >= 0))
        self.rows[:, :width].index_copy_(0, blocks, fused.view(count, width, -1))
        self.counts.index_copy_(0, blocks, last + 1)

    @torch.inference_mode()
    def waiting(self, state: BatchState, most: int) -> Waiting:
        """The rows of each slot that wait, up to `most`: none before a text's second token."""
        position = state.length - 2
        blocks = self._block_at(state, position)
        # A slot without a sequence may have the entry of another run.
        counts = self.counts[blocks].clamp(0, most).masked_fill(position < 0, 0)
        return Waiting(self.rows[blocks, :most], counts)
