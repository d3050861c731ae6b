"""The forward pass of a DFlash drafter, run with the kernels of fused layers.

The keys and values of the context come from the target's features: these are projected and
normalised once, and every layer projects the result to its own keys and values. The rows of a block
pass through the layers and attend to the context and to each other. A DSpark drafter also has two
small heads, which read the previous token. The Markov head adds to the logits of a token, and the
confidence head estimates the chance that the token is accepted. Legend: T packed rows, B blocks, H
width of the drafter, F width of the features, r width of the Markov head's embedding, Vd number of
ids that the drafter can propose.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from specdec_kernels import ops
from torch import Tensor

from specdec_cli.core.batch import ForwardBatch
from specdec_cli.core.kv_cache import KVCache
from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.models.heads.base import HeadWeights
from specdec_cli.models.heads.dflash.config import (
    CONFIDENCE,
    MARKOV_EMBEDDING,
    MARKOV_OUT,
    MARKOV_TYPES,
    DFlashConfig,
)
from specdec_cli.models.heads.net import LayeredHead


class Judged(NamedTuple):
    """The output of the Markov and confidence heads for one token of each block.

    logits: [B, Vd], with the Markov head's term, if there is such a head.
    confidence: fp32 [B], from 0 to 1; None without a confidence head, or if it was not asked for.
    memory: [B, r], the state that an rnn Markov head needs for the next token; None for other types
    of Markov head.
    """

    logits: Tensor
    confidence: Tensor | None
    memory: Tensor | None


class MarkovHead:
    """The Markov head of a drafter, its confidence head, or both. They are not split over ranks."""

    def __init__(self, config: DFlashConfig, tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.embedding = tensors.get(MARKOV_EMBEDDING)
        joint, _ = MARKOV_TYPES[config.markov_type] or (None, None)
        self.out, self.joint, self.confidence = (
            ops.pack_weight(tensors[name]) if name in tensors else None
            for name in (MARKOV_OUT, f"{joint}.weight", f"{CONFIDENCE}.weight")
        )
        self.joint_bias = tensors.get(f"{joint}.bias")
        self.confidence_bias = tensors.get(f"{CONFIDENCE}.bias")

    @property
    def held(self) -> list[Any]:
        own = [self.embedding, self.out, self.joint, self.confidence]
        return [*own, self.joint_bias, self.confidence_bias]

    def __call__(
        self,
        h: Tensor,
        logits: Tensor,
        before: Tensor,
        memory: Tensor | None,
        *,
        needs_confidence: bool,
    ) -> Judged:
        """Compute the heads' output for one token of each block.

        h: [B, H], the normed hidden states that predict the tokens.
        logits: [B, Vd], the drafter's logits for the tokens.
        before: int64 [B], the previous tokens, as ids of the target, or -1 after a draw that
            failed.
        memory: `Judged.memory` of the previous tokens; None for the first token of a block.
        needs_confidence: whether to compute confidences. On a GPU this takes as long as drawing
            tokens.
        """
        e = None if self.embedding is None else self.embedding[before]
        confidence = None
        if needs_confidence and self.confidence is not None:
            both = self.config.confidence_width > self.config.hidden_size
            x = torch.cat((h, e), dim=1) if both and e is not None else h
            told = ops.linear(x.contiguous(), self.confidence, self.confidence_bias)
            confidence = told[:, 0].float().sigmoid()
        if e is None or self.out is None:
            return Judged(logits, confidence, None)
        if self.joint is not None and self.config.markov_type == "gated":
            gate = ops.linear(torch.cat((h, e), dim=1), self.joint, self.joint_bias)
            e = gate.sigmoid() * e
        elif self.joint is not None:
            memory = torch.zeros_like(e) if memory is None else memory
            joint = ops.linear(torch.cat((memory, e, h), dim=1), self.joint, self.joint_bias)
            keep, new, out = joint.chunk(3, dim=1)
            keep = keep.sigmoid()
            memory = keep * memory + (1 - keep) * new.tanh()
            e = out.tanh()
        return Judged(ops.linear_add(e, self.out, logits), confidence, memory)


class DFlashHead(LayeredHead):
    """The network of a block drafter. One pass drafts a whole block, so no outputs are fed back."""

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
        # The last rows of each layer's merged QKV weight project the context to keys and values.
        # On a CPU the merged weight is packed and has no rows to slice, so the projection is packed
        # again from the separate weights.
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
        """Compute the context [T, H] from the target's features [T, F]. All layers read it."""
        return ops.rms_norm(
            ops.linear(features.to(self.dtype), self.fc), self.hidden_norm, self.eps
        )

    def __call__(
        self, token_ids: Tensor, hidden: Tensor, batch: ForwardBatch, cache: KVCache
    ) -> ops.Normed:
        """Run one of two kinds of pass, chosen by the width of `hidden`. Both write keys and
        values.

        If `hidden` is [T, H], the rows are context: write their keys and values in each layer, and
        return `hidden` unchanged. If it is [T, 0], the rows belong to blocks: embed `token_ids`,
        int64 [T], and run the rows through the layers.
        """
        if not hidden.shape[1]:
            return self.stack.run(self.embedded(token_ids, batch), batch, cache)
        cos, sin = self.cos[batch.positions], self.sin[batch.positions]
        for layer, (weight, bias) in zip(self.stack.layers, self.key_values, strict=True):
            kv = ops.linear(hidden, weight, bias)
            ops.write_kv_turned(
                *(kv, cos, sin, cache.layers[layer.index], batch.slots, layer.key_norm, layer.eps)
            )
        return ops.Normed(hidden, hidden, None, 0.0)
