"""The forward pass of an EAGLE-3 head, in the kernels of fused layers.

The first layer reads 2 * H values per row: the embedding of the next token and the hidden state,
both normed. Further layers are plain, except in DeepSpec's heads. A P-EAGLE head does not run over
accepted tokens at once. Their rows wait for the pass of the next round, which runs over them and
the rows of mask tokens after them. Legend: T packed rows, B slots, W maximum number of waiting
rows, H width of the head, F width of the features.
"""

from typing import NamedTuple

import torch
from specdec_kernels import ops
from torch import Tensor

from specdec_cli.core.batch import ForwardBatch
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.packed import last_blocks, last_rows
from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.core.state import BatchState
from specdec_cli.models.heads.base import HeadWeights
from specdec_cli.models.heads.eagle3.config import Eagle3Config, PEagleConfig
from specdec_cli.models.heads.net import LayeredHead
from specdec_cli.models.heads.paged import PagedHead


class Eagle3Head(LayeredHead):
    """The network of an EAGLE-3 head. mask_hidden: [1, H], read by rows of mask tokens instead of
    fused features; None if the head has no masks."""

    config: Eagle3Config

    def __init__(
        self,
        config: Eagle3Config,
        weights: HeadWeights,
        max_len: int,
        parallel: TensorParallel = ALONE,
    ) -> None:
        super().__init__(config, weights, max_len, parallel)
        tensors, self.feeds_norm = weights.tensors, config.feeds_norm
        self.input_norm = tensors.get("input_norm.weight")
        count = config.num_aux if config.fc_norm else 0
        self.fc_norms = [tensors[f"fc_norm.{i}.weight"] for i in range(count)]
        norms = [f"layers.{index}.hidden_norm.weight" for index in range(len(config.windows))]
        self.hidden_norms = [tensors.get(name) for name in norms]
        masked = tensors.get("mask_hidden")
        self.mask_hidden = None if masked is None else self.fuse(masked.view(1, -1))

    def fuse(self, features: Tensor) -> Tensor:
        features = features.to(self.dtype)
        if self.input_norm is not None:
            features = ops.rms_norm(features, self.input_norm, self.eps)
        if self.fc_norms:
            parts = features.chunk(len(self.fc_norms), dim=1)
            normed = [
                ops.rms_norm(part.contiguous(), weight, self.eps)
                for part, weight in zip(parts, self.fc_norms, strict=True)
            ]
            features = torch.cat(normed, dim=1)
        return ops.linear(features, self.fc)

    def __call__(
        self, token_ids: Tensor, hidden: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> ops.Normed:
        embeds, cos, sin = self.embedded(token_ids, batch)

        def beside(index: int, x: ops.Normed) -> ops.Normed:
            """Return the input of layer `index`: for a wide layer the embedding and the stream `x`,
            both normed, and `x` alone for other layers."""
            layer, norm = self.stack.layers[index], self.hidden_norms[index]
            if norm is None:
                return x
            own = embeds.scaled
            if index:
                own = ops.rms_norm(embeds.hidden, layer.attention_norm, layer.eps)
            normed = ops.rms_norm(x.hidden, norm, layer.eps)
            is_residual = self.config.norm_before_residual and not index
            both = torch.cat((own, normed), dim=1)
            return ops.Normed(normed if is_residual else x.hidden, both, None, layer.eps)

        start = embeds._replace(hidden=hidden), cos, sin
        return self.stack.run(start, batch, cache, beside)


class Waiting(NamedTuple):
    """The rows of each slot that wait for the next pass. rows: [B, W, H], fused features of the
    slot's last accepted tokens; the first `counts` of them are valid. counts: int64 [B], from 0 to
    W."""

    rows: torch.Tensor
    counts: torch.Tensor


class WaitingHead(PagedHead):
    """A P-EAGLE head over a paged cache. It keeps `rows` [num_blocks, W, H] and `counts`, int64
    [num_blocks], as in `Waiting`. A sequence's entry has the index of the cache block that holds
    the key of its last row, so it moves with the sequence, as `PagedHead.carry` does. The last row
    of a prompt waits too, because its output is still to be read."""

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
        # Rows without a sequence write to block 0, which is never read.
        blocks = last_blocks(batch, self.cache.block_size)
        self.rows[:, 0].index_copy_(0, blocks, fused[last_rows(batch)])
        self.counts.index_fill_(0, blocks, 1)
        return self._run(batch, fused).hidden

    @torch.inference_mode()
    def keep(self, state: BatchState, features: torch.Tensor, last: torch.Tensor) -> None:
        """Store rows of each slot for the next pass. features: [B, Q, F], for the rows from
        position length - 1 on. last: int64 [B], the index of a slot's last row to store; no row is
        stored if it is below 0.
        """
        count, width = features.shape[:2]
        rows = features.flatten(0, 1)
        if self.device.type == "cpu":  # fuse only the rows that are stored
            is_true = (torch.arange(width) <= last[:, None]) & state.active[:, None]
            places = is_true.flatten().nonzero()[:, 0]
            fused = torch.zeros(len(rows), self.rows.shape[2], dtype=self.head.dtype)
            fused[places] = self.head.fuse(rows[places])
        else:
            fused = self.head.fuse(rows)
        position = state.length - 1 + last.clamp(min=0)
        # Values that are never read go to block 0.
        blocks = self._block_at(state, position) * (state.active & (last >= 0))
        self.rows[:, :width].index_copy_(0, blocks, fused.view(count, width, -1))
        self.counts.index_copy_(0, blocks, last + 1)

    @torch.inference_mode()
    def waiting(self, state: BatchState, most: int) -> Waiting:
        """Return the waiting rows of each slot, at most `most`. There are none before a text's
        second token."""
        position = state.length - 2
        blocks = self._block_at(state, position)
        # A slot without a sequence may have an entry from another run.
        counts = self.counts[blocks].clamp(0, most).masked_fill(position < 0, 0)
        return Waiting(self.rows[blocks, :most], counts)
