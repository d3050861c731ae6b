"""The network of a draft head: the interface that `PagedHead` uses, and the common part of heads
that consist of decoder layers. Legend: T packed rows, H width of the head, F width of the features,
Vd number of token ids that the head can propose."""

from typing import Any

import torch
from specdec_kernels import ops
from torch import Tensor

from specdec_cli.core.batch import ForwardBatch
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.models.fused_stack import FusedStack, storages_of
from specdec_cli.models.heads.base import EMBEDDING, HEAD, HeadConfig, HeadSizes, HeadWeights
from specdec_cli.models.heads.layers import fused_layers, rotary_table
from specdec_cli.models.split_products import SplitProducts


class Head:
    """The network of a draft head, with its weights.

    ids: see `HeadWeights`.
    embedding: the head's own or the target's.
    norm, eps: the weight [H] and the epsilon of the final norm.
    head: the output matrix.
    feeds_norm: whether the next step reads hidden states after the final norm.
    """

    config: HeadSizes
    ids: Tensor | None = None
    embedding: Tensor
    norm: Tensor
    eps: float
    head: ops.Weight
    split: SplitProducts
    feeds_norm: bool = True

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.dtype

    @property
    def held(self) -> list[Any]:
        """All tensors that the head holds, for `storages_of`."""
        values = vars(self).values()
        return [x for value in values for x in (value if isinstance(value, list) else [value])]

    @property
    def storages(self) -> dict[int, int]:
        return storages_of(self.held)

    def fuse(self, features: Tensor) -> Tensor:
        """Compute the head's input [T, H] from the target's features [T, F]. This is done once for
        each accepted token. The rows of proposals, for which there are no features yet, read the
        result of `fed_back` instead."""
        raise NotImplementedError

    def __call__(
        self, token_ids: Tensor, hidden: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> ops.Normed:
        """Run one pass over T rows and write their keys and values to `cache`.

        token_ids: int64 [T], the tokens that the rows embed. The batch's own token ids are ignored.
        hidden: [T, H], the result of `fuse`, or of `fed_back` for the previous row; [T, 0] if the
        rows read only a token.
        """
        raise NotImplementedError

    def normed(self, hidden: Tensor) -> ops.Normed:
        """Recompute the result of `__call__` from its hidden states [T, H]."""
        return ops.Normed(hidden, ops.rms_norm(hidden, self.norm, self.eps), None, 0.0)

    def logits(self, x: ops.Normed) -> Tensor:
        """Return logits [T, Vd] over the head's own ids, for the token that each row predicts."""
        return self.split.logits(x, self.head)

    def fed_back(self, x: ops.Normed) -> Tensor:
        """Return the hidden states [T, H] that the next step reads instead of fused features."""
        if not self.feeds_norm:
            return x.hidden
        return x.scaled if x.squares is None else self.normed(x.hidden).scaled


class LayeredHead(Head):
    """A head with its own decoder layers, holding this rank's part of the weights.

    fc: the projection of the features.
    stack: the layers.
    max_len: the number of positions that passes may use, which may exceed the config's context
    length.
    parallel: the ranks that share the head. Each of them must construct it, because construction
    sets up memory that the ranks share.
    causal: see `ops.AttentionCall`.
    """

    def __init__(
        self,
        config: HeadConfig,
        weights: HeadWeights,
        max_len: int,
        parallel: TensorParallel,
        causal: bool = True,
    ) -> None:
        tensors = weights.tensors
        self.config, self.ids = config, weights.ids
        self.eps = float(config.body.rms_norm_eps)
        self.embedding, self.norm = tensors[EMBEDDING], tensors["norm.weight"]
        rows = slice(*parallel.share(config.draft_vocab_size))
        head = tensors[HEAD] if HEAD in tensors else self.embedding[rows]
        self.fc, self.head = ops.pack_weight(tensors["fc.weight"]), ops.pack_weight(head)
        where = self.dtype, self.embedding.device
        self.cos, self.sin = rotary_table(config.body, *where, max_len)
        sizes = config.hidden_size, config.draft_vocab_size
        self.split = SplitProducts.over(parallel, *sizes, self.dtype)
        body, _ = config.split(parallel)
        layers = fused_layers(body, config.body, config.windows, tensors, causal)
        self.stack = FusedStack(layers, self.split)

    @property
    def held(self) -> list[Any]:
        return [*super().held, *self.stack.held]

    def embedded(self, token_ids: Tensor, batch: ForwardBatch) -> tuple[ops.Normed, Tensor, Tensor]:
        """Return the tokens' embeddings, with the first layer's norm applied, and the cosines and
        sines for the batch's positions."""
        first = self.stack.layers[0]
        return ops.embed(
            *(token_ids, batch.positions, self.embedding, self.cos, self.sin),
            *(first.attention_norm, first.eps),
        )
