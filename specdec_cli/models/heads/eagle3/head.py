"""The forward pass of an EAGLE-3 head, with fused decoder layers (`models.fused_stack`).

The first layer reads 2 * H values per row: the embedding of the next token and the hidden state,
both normed. Later layers read only the hidden state, except in DeepSpec's heads, where they read
both.

An EAGLE-3 head runs over tokens as soon as they are accepted. A P-EAGLE head does not: the rows of
accepted tokens wait for the next round. That round runs a single pass, over these rows and the rows
of mask tokens after them.

Legend: T packed rows, B slots, W maximum number of waiting rows, H width of the head, F width of
the features.
"""

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
    """The network of an EAGLE-3 head. mask_hidden: [1, H], which the rows of mask tokens read
    instead of fused features; None for a head without mask tokens."""

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
            """Return the input of layer `index`. A layer with a hidden norm reads the embedding and
            the hidden state `x`, both normed. Other layers read only `x`."""
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


class WaitingHead(PagedHead):
    """A P-EAGLE head over a paged cache. It also stores the rows that wait for each sequence's next
    pass: `rows` [num_blocks, W, H], the fused features of its last accepted tokens, of which the
    first `counts` are valid, int64 [num_blocks], from 0 to W.

    A sequence's entry is at the index of the cache block that holds the key of its last row. The
    entry therefore stays with the sequence's blocks, like `PagedHead.carry`. After prefill, the
    last row of a prompt waits too. The head has already run over it, but its output, which gives
    the first proposal, was not kept.
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
        # Entries of the batch without a sequence write to block 0, which is never read.
        blocks = last_blocks(batch, self.cache.block_size)
        self.rows[:, 0].index_copy_(0, blocks, fused[last_rows(batch)])
        self.counts.index_fill_(0, blocks, 1)
        return self._run(batch, fused).hidden

    @torch.inference_mode()
    def keep(self, state: BatchState, features: torch.Tensor, last: torch.Tensor) -> None:
        """Store the rows of each slot's accepted tokens for the next pass, with fused features.

        features: [B, Q, F], the target's features, starting at position length - 1.
        last: int64 [B], the index of the last row to store for each slot. Rows 0 to `last` are
        stored; none if `last` is below 0.
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
        # Slots with nothing to store write to block 0, which is never read.
        blocks = self._block_at(state, position) * (state.active & (last >= 0))
        self.rows[:, :width].index_copy_(0, blocks, fused.view(count, width, -1))
        self.counts.index_copy_(0, blocks, last + 1)

    @torch.inference_mode()
    def waiting(self, state: BatchState, most: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the waiting rows of each slot, [B, most, H], and how many of them are valid, int64
        [B]. A sequence of fewer than two tokens has none."""
        position = state.length - 2
        blocks = self._block_at(state, position)
        # A slot without a sequence may read an entry left by an earlier run, so clamp its count.
        counts = self.counts[blocks].clamp(0, most).masked_fill(position < 0, 0)
        return self.rows[blocks, :most], counts
