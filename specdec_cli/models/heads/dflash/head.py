"""The arithmetic of a DFlash drafter, in the kernels of fused layers.

Keys and values of the context follow from the target's features alone: one projection of these,
normed, is what every layer's products read. The rows of a block pass the layers and see the context
and each other. Legend: T packed rows, H width of the drafter, F of the features, V ids of the
target, Vd ids that it can propose.
"""

from typing import Any

import torch
from specdec_kernels import ops
from torch import Tensor

from specdec_cli.core.batch import ForwardBatch
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.models.fused_stack import FusedStack, storages_of
from specdec_cli.models.heads.base import EMBEDDING, HEAD, HeadWeights
from specdec_cli.models.heads.dflash.config import DFlashConfig
from specdec_cli.models.heads.dflash.markov import MarkovHead
from specdec_cli.models.heads.layers import fused_layers, rotary_table
from specdec_cli.models.split_products import SplitProducts


class DFlashHead:
    """A drafter's passes, over this rank's part of its weights, and a table of rotary embeddings.

    max_len: positions that passes may use. parallel: the ranks that share it; all of them have to
    make it together.
    """

    def __init__(
        self,
        config: DFlashConfig,
        weights: HeadWeights,
        max_len: int,
        parallel: TensorParallel = ALONE,
    ) -> None:
        tensors, dtype = weights.tensors, weights.tensors["norm.weight"].dtype
        self.config, self.max_len, self.ids = config, max_len, weights.ids
        self.eps = float(config.body.rms_norm_eps)
        self.embedding = tensors[EMBEDDING]  # in the order of the target's, if it lends it
        self.norm, self.hidden_norm = tensors["norm.weight"], tensors["hidden_norm.weight"]
        self.fc, self.head = (ops.pack_weight(tensors[name]) for name in ("fc.weight", HEAD))
        self.cos, self.sin = rotary_table(config.body, dtype, self.embedding.device, max_len)
        split = SplitProducts.over(parallel, config.hidden_size, config.draft_vocab_size, dtype)
        body, _ = config.split(parallel)
        layers = fused_layers(body, config.body, config.windows, tensors, causal=False)
        self.stack = FusedStack(layers, split)
        is_plain = not config.markov_rank and not config.confidence_width
        self.markov = None if is_plain else MarkovHead(config, tensors)
        # What the layers make of the context: rows of their merged products. A CPU packs these, so
        # that they cannot be cut.
        self.key_values: list[tuple[ops.Weight, Tensor | None]] = []
        for names, layer in zip(config.key_values(), layers, strict=True):
            parts, whole = [tensors[name] for name in names], layer.qkv
            rows = sum(map(len, parts))
            if isinstance(whole, Tensor) and whole.is_cuda:
                weight: ops.Weight = whole[-rows:]
            else:
                weight = ops.pack_weight(torch.cat(parts))
            bias = layer.qkv_bias
            self.key_values.append((weight, None if bias is None else bias[-rows:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    @property
    def storages(self) -> dict[int, int]:
        """Bytes of each block of memory that is held, by its address or another number."""
        held: list[Any] = [
            self.embedding,
            self.norm,
            self.hidden_norm,
            self.fc,
            self.head,
            self.ids,
        ]
        held += [self.cos, self.sin, *(weight for weight, _ in self.key_values)]
        held += self.markov.held if self.markov is not None else []
        return storages_of([*held, *self.stack.held])

    def fuse(self, features: Tensor) -> Tensor:
        """The context [T, H] from the target's features [T, F], once for all layers."""
        return ops.rms_norm(
            ops.linear(features.to(self.dtype), self.fc), self.hidden_norm, self.eps
        )

    def __call__(
        self, token_ids: Tensor, hidden: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> ops.Normed:
        """Write keys and values of T rows to `cache`.

        hidden: [T, H], the context, which is returned; [T, 0] for the rows of blocks, which embed
        `token_ids`, int64 [T], and pass the layers.
        """
        if not hidden.shape[1]:
            first = self.stack.layers[0]
            start = ops.embed(
                *(token_ids, batch.positions, self.embedding, self.cos, self.sin),
                *(first.attention_norm, first.eps),
            )
            return self.stack.run(start, batch, cache)
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]
        for layer, (weight, bias) in zip(self.stack.layers, self.key_values, strict=True):
            kv = ops.linear(hidden, weight, bias)
            ops.write_kv_turned(
                *(kv, cos, sin, cache.layers[layer.index], batch.slots, layer.key_norm, layer.eps)
            )
        return ops.Normed(hidden, hidden, None, 0.0)

    def normed(self, hidden: Tensor) -> ops.Normed:
        """The result of a block's pass, made again from its hidden states [T, H]."""
        return ops.Normed(hidden, ops.rms_norm(hidden, self.norm, self.eps), None, 0.0)

    def logits(self, x: ops.Normed) -> Tensor:
        """Logits [T, Vd] of the head's own ids, for the token that each row decides."""
        return self.stack.split.logits(x, self.head)

    def fed_back(self, x: ops.Normed) -> Tensor:
        raise AssertionError("a block is one pass")
