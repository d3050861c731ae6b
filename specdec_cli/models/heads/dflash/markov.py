"""The small heads of a DSpark drafter, which read the token before the one that they judge.

The Markov head adds to the logits of a row, the confidence head says how likely its token is to
stand. Legend: B rows, H width of the drafter, r rank, V ids of the target, Vd of the drafter.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from specdec_kernels import ops
from torch import Tensor

from specdec_cli.models.heads.dflash.config import (
    CONFIDENCE,
    MARKOV_EMBEDDING,
    MARKOV_JOINT,
    MARKOV_OUT,
    DFlashConfig,
)


class Judged(NamedTuple):
    """added: [B, Vd], to the logits; None without a Markov head. confidence: fp32 [B] from 0 to 1;
    None without a confidence head. memory: [B, r], for the next token; None where none is kept."""

    added: Tensor | None
    confidence: Tensor | None
    memory: Tensor | None


class MarkovHead:
    """The Markov and the confidence head of a drafter, or one of them, whole on every rank."""

    def __init__(self, config: DFlashConfig, tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.embedding = tensors.get(MARKOV_EMBEDDING)
        self.out, self.joint, self.confidence = (
            ops.pack_weight(tensors[name]) if name in tensors else None
            for name in (MARKOV_OUT, f"{MARKOV_JOINT}.weight", f"{CONFIDENCE}.weight")
        )
        self.joint_bias = tensors.get(f"{MARKOV_JOINT}.bias")
        self.confidence_bias = tensors.get(f"{CONFIDENCE}.bias")

    @property
    def held(self) -> list[Any]:
        own = [self.embedding, self.out, self.joint, self.confidence]
        return [*own, self.joint_bias, self.confidence_bias]

    def __call__(self, h: Tensor, before: Tensor, memory: Tensor | None) -> Judged:
        """Judge the token that each row of h [B, H], normed, decides.

        before: int64 [B], the token before it, the target's id. memory: from that token; None for a
        block's first.
        """
        e = None if self.embedding is None else self.embedding[before]
        confidence = None
        if self.confidence is not None:
            both = self.config.confidence_width > self.config.hidden_size
            x = torch.cat((h, e), dim=1) if both and e is not None else h
            told = ops.linear(x.contiguous(), self.confidence, self.confidence_bias)
            confidence = told[:, 0].float().sigmoid()
        if e is None or self.out is None:
            return Judged(None, confidence, None)
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
        return Judged(ops.linear(e, self.out), confidence, memory)
