"""The arithmetic of a DFlash drafter, in the kernels of fused layers.

Keys and values of the context follow from the target's features: one projection, normed, is what
every layer's products read. Rows of a block pass the layers and see the context and each other.
Legend: T packed rows, H width of the drafter, F of the features, V ids of the target.
"""

from typing import Any

import torch
from specdec_kernels import ops
from torch import Tensor

from specdec_cli.core.batch import ForwardBatch
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.models.heads.base import HeadWeights
from specdec_cli.models.heads.dflash.config import DFlashConfig
from specdec_cli.models.heads.dflash.markov import MarkovHead
from specdec_cli.models.heads.net import LayeredHead


class DFlashHead(LayeredHead):
    """A drafter's passes. A block is one of them, so nothing is fed back."""

    config: DFlashConfig

    def __init__(
        self,
        config: DFlashConfig,
        weights: HeadWeights,
        max_len: int,
        parallel: TensorParallel = ALONE,
    ) -> None:
        super().__init__(config, weights, max_len, parallel, causal=False)
        tensors = weights.tensors
        self.hidden_norm = tensors["hidden_norm.weight"]
        is_plain = not config.markov_rank and not config.confidence_width
        self.markov = None if is_plain else MarkovHead(config, tensors)
        # What the layers make of the context: rows of their merged products. A CPU packs these, so
        # that they cannot be cut.
        self.key_values: list[tuple[ops.Weight, Tensor | None]] = []
        for names, layer in zip(config.key_values(), self.stack.layers, strict=True):
            parts, whole = [tensors[name] for name in names], layer.qkv
            rows = sum(map(len, parts))
            if isinstance(whole, Tensor) and whole.is_cuda:
                weight: ops.Weight = whole[-rows:]
            else:
                weight = ops.pack_weight(torch.cat(parts))
            bias = layer.qkv_bias
            self.key_values.append((weight, None if bias is None else bias[-rows:]))

    @property
    def held(self) -> list[Any]:
        markov = self.markov.held if self.markov is not None else []
        return [*super().held, *(weight for weight, _ in self.key_values), *markov]

    def fuse(self, features: Tensor) -> Tensor:
        """The context [T, H] from the target's features [T, F], once for all layers."""
        return ops.rms_norm(
            ops.linear(features.to(self.dtype), self.fc), self.hidden_norm, self.eps
        )

    def __call__(
        self, token_ids: Tensor, hidden: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> ops.Normed:
        """Write keys and values of T rows: of the context `hidden` [T, H], which is returned, or,
        for [T, 0], of blocks, which embed `token_ids`, int64 [T], and pass the layers."""
        if not hidden.shape[1]:
            return self.stack.run(self.embedded(token_ids, batch), batch, cache)
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]
        for layer, (weight, bias) in zip(self.stack.layers, self.key_values, strict=True):
            kv = ops.linear(hidden, weight, bias)
            ops.write_kv_turned(
                *(kv, cos, sin, cache.layers[layer.index], batch.slots, layer.key_norm, layer.eps)
            )
        return ops.Normed(hidden, hidden, None, 0.0)
