"""The arithmetic of an EAGLE-3 head, in the kernels of fused layers.

The first layer reads the embedding of the token that follows beside the hidden state of each row,
both normed: 2 * H numbers. Further layers are plain, except in DeepSpec's heads. Knows no caches'
layout and no rounds. Legend: T packed rows, H width of the head, F of the features, Vd ids that it
can propose, V ids of the target.
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
from specdec_cli.models.heads.eagle3.config import Eagle3Config
from specdec_cli.models.heads.layers import fused_layers, rotary_table
from specdec_cli.models.split_products import SplitProducts


class Eagle3Head:
    """A head's passes, over this rank's part of its weights, and a table of rotary embeddings.

    max_len: positions that passes may use, whatever the config's own context length. parallel: the
    ranks that share it; all of them have to make it together.
    """

    def __init__(
        self,
        config: Eagle3Config,
        weights: HeadWeights,
        max_len: int,
        parallel: TensorParallel = ALONE,
    ) -> None:
        tensors, dtype = weights.tensors, weights.tensors["norm.weight"].dtype
        self.config = config
        self.max_len = max_len
        self.ids = weights.ids
        self.embedding = tensors[EMBEDDING]  # in the order of the target's, if it lends it
        self.norm = tensors["norm.weight"]
        self.fc = ops.pack_weight(tensors["fc.weight"])
        self.input_norm = tensors.get("input_norm.weight")
        count = config.num_aux if config.fc_norm else 0
        self.fc_norms = [tensors[f"fc_norm.{i}.weight"] for i in range(count)]
        rows = slice(*parallel.share(config.draft_vocab_size))
        self.head = ops.pack_weight(tensors[EMBEDDING][rows] if config.ties_head else tensors[HEAD])
        self.cos, self.sin = rotary_table(config.body, dtype, self.embedding.device, max_len)
        norms = [f"layers.{index}.hidden_norm.weight" for index in range(len(config.windows))]
        self.hidden_norms = [tensors.get(name) for name in norms]
        split = SplitProducts.over(parallel, config.hidden_size, config.draft_vocab_size, dtype)
        # What rows of masks read in place of fused features, [1, H].
        masked = tensors.get("mask_hidden")
        self.mask_hidden = None if masked is None else self.fuse(masked.view(1, -1))
        body, _ = config.split(parallel)
        self.stack = FusedStack(fused_layers(body, config.body, config.windows, tensors), split)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    @property
    def storages(self) -> dict[int, int]:
        """Bytes of each block of memory that is held, by its address or another number."""
        held: list[Any] = [self.embedding, self.norm, self.fc, self.input_norm, self.head, self.ids]
        held += [self.mask_hidden, self.cos, self.sin, *self.fc_norms, *self.hidden_norms]
        return storages_of([*held, *self.stack.held])

    def fuse(self, features: Tensor) -> Tensor:
        """Hidden states [T, H] from the target's features [T, F]."""
        eps, features = self.config.body.rms_norm_eps, features.to(self.dtype)
        if self.input_norm is not None:
            features = ops.rms_norm(features, self.input_norm, eps)
        if self.fc_norms:
            parts = features.chunk(len(self.fc_norms), dim=1)
            normed = [
                ops.rms_norm(part.contiguous(), weight, eps)
                for part, weight in zip(parts, self.fc_norms, strict=True)
            ]
            features = torch.cat(normed, dim=1)
        return ops.linear(features, self.fc)

    def __call__(
        self, token_ids: Tensor, hidden: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> ops.Normed:
        """One pass over T rows, whose keys and values are written to `cache`.

        token_ids: int64 [T], the token that follows each row's position, in place of the batch's.
        hidden: [T, H], from `fuse`, or from `fed_back` of the row before.
        """
        first = self.stack.layers[0]
        embeds, cos, sin = ops.embed(
            *(token_ids, batch.positions, self.embedding, self.cos, self.sin),
            *(first.attention_norm, first.eps),
        )

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

    def normed(self, hidden: Tensor) -> ops.Normed:
        """The result of `__call__`, made again from its hidden states [T, H]."""
        return ops.Normed(
            hidden, ops.rms_norm(hidden, self.norm, self.config.body.rms_norm_eps), None, 0.0
        )

    def logits(self, x: ops.Normed) -> Tensor:
        """Logits [T, Vd] of the head's own ids, for the token after the one that each row read."""
        return self.stack.split.logits(x, self.head)

    def fed_back(self, x: ops.Normed) -> Tensor:
        """Hidden states [T, H] that the next step reads in place of fused features."""
        if not self.config.feeds_norm:
            return x.hidden
        return x.scaled if x.squares is None else self.normed(x.hidden).scaled
