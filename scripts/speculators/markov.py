"""DSpark's small heads, which read the token before the one that a row decides.

The Markov head adds to the logits: its embedding of that token is appended to the row, and its
matrix to the target's head. The confidence head learns the share of accepted drafts. Legend: R rows
of proposals, H width, r rank, V ids.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from scripts.speculators.kinds.base import Link
from scripts.speculators.layer import Shape

SMALL_HEADS = ("markov_head", "confidence_head")  # as their tensors' names begin


@dataclass(frozen=True)
class Heads:
    """Both heads, which a backbone holds under published names."""

    rank: int

    def add_to(self, backbone: nn.Module, shape: Shape) -> None:
        """Add the heads' weights. At first the Markov head adds nothing to logits."""
        before, out = nn.Embedding(shape.vocab, self.rank), nn.Linear(self.rank, shape.vocab, False)
        nn.init.zeros_(out.weight)
        heads = nn.ModuleDict({"markov_w1": before, "markov_w2": out})
        backbone.add_module("markov_head", heads)
        proj = nn.Linear(shape.hidden + self.rank, 1)
        backbone.add_module("confidence_head", nn.ModuleDict({"proj": proj}))

    def judged(self, backbone: Any, link: Link, ids: Tensor) -> Link:
        """The link with both heads' parts. ids: int64 [B * N], the batch's tokens."""
        markov = backbone.markov_head
        # The target predicts a token in the row of the token before it.
        before = markov["markov_w1"](ids[link.goal]).to(link.hidden.dtype)
        hidden = torch.cat((link.hidden, before), 1)
        # No gradient goes to the drafter: it must not become easier to judge.
        sure = backbone.confidence_head["proj"](hidden.detach())[:, 0]
        columns = markov["markov_w2"].weight
        return replace(link, hidden=hidden, columns=columns, confidence=sure)

    def settings(self) -> dict[str, Any]:
        """The keys of SpecForge's form of config."""
        return {
            "projector_type": "dspark",
            "markov_rank": self.rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
