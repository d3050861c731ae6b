"""The arithmetic of an EAGLE-3 head, in the kernels of fused layers.

The first layer reads the embedding of the token that follows beside the hidden state of each row,
both normed: 2 * H numbers. Further layers are plain, except in DeepSpec's heads. Legend: T packed
rows, H width of the head, F of the features.
"""

import torch
from specdec_kernels import ops
from torch import Tensor

from specdec_cli.core.batch import ForwardBatch
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.models.heads.base import HeadWeights
from specdec_cli.models.heads.eagle3.config import Eagle3Config
from specdec_cli.models.heads.net import LayeredHead


class Eagle3Head(LayeredHead):
    """A head's passes. mask_hidden: [1, H], what rows of masks read in place of fused features."""

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
            """The embedding and the stream `x`, both normed, as the input of a wide layer."""
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
