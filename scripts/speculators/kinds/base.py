"""The interface between training and a kind of speculator: a module, its proposals, and a folder. A
kind is a file beside this one, with a function `make` and the names of the `OPTIONS` that it reads.
Legend: B rows, N tokens a row, H width, R rows of proposals, V ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.speculators.corpus import Rows
from scripts.speculators.target import Reading, Target


@dataclass(frozen=True)
class Options:
    """Settings of the command line for some kinds. layers: empty for the usual ones. mask: the id
    of masks. start: a stored speculator to begin with, if any."""

    links: int = 6
    layers: Sequence[int] = ()
    inner: int | None = None
    depth: int = 2
    vocabulary: int | None = None
    blank: bool = False
    start: str | None = None
    block: int = 8
    anchors: int = 32
    mask: int = 0
    rank: int = 32


@dataclass(frozen=True)
class Link:
    """Rows that propose tokens, with the target's rows that judge them.

    hidden: [R, H], ready for the target's head. place: that of the proposal, 0 for the first; a
    number, or int64 [R]. weight: fp32 [R], weights in the loss; 0 for rows without meaning. goal:
    int64 [R], the row of the flattened batch that predicts the same token; None if rows are those
    of the batch. columns: [V, r], trained columns of the head beside the target's H; then hidden is
    [R, H + r]. confidence: [R], logits of the share of accepted drafts.
    """

    hidden: Tensor
    place: int | Tensor
    weight: Tensor
    goal: Tensor | None = None
    columns: Tensor | None = None
    confidence: Tensor | None = None

    def head(self, head: Tensor, ids: Tensor | None = None) -> Tensor:
        """The rows of `ids`, or all rows, of the target's head [V, H] with the columns beside
        it."""
        parts = [head] if self.columns is None else [head, self.columns.to(head.dtype)]
        return torch.cat([part if ids is None else part[ids] for part in parts], 1)


def following(rows: Rows) -> Tensor:
    """fp32 [B, N]: the weight of the token after each one, 0 at the end of a text."""
    found = torch.zeros_like(rows.weight)
    found[:, :-1] = rows.weight[:, 1:] * (rows.segment[:, 1:] == rows.segment[:, :-1])
    return found


def chained(outs: list[Tensor], rows: Rows, shift: int) -> list[Link]:
    """The links of chained steps. A row of a step's output [B * N, H] predicts the token `shift`
    rows after the token that the target's row predicts. The first i rows of each text have no
    meaning in step i."""
    weight, position = following(rows).flatten(), rows.position.flatten()
    return [
        Link(out.roll(shift, 0), i, weight * (position >= i + shift)) for i, out in enumerate(outs)
    ]


class Kind:
    """A speculator in training.

    num_links: the number of proposals of a round. feature_layers: the target's hidden states that
    it reads. fade: a proposal's weight in the loss relative to the proposal before. kept: the
    attributes that a checkpoint needs besides the module's parameters.
    """

    name: str
    module: torch.nn.Module
    feature_layers: tuple[int, ...] = ()
    num_links: int
    fade: float
    kept: tuple[str, ...] = ()

    def links(self, reading: Reading, generator: torch.Generator) -> list[Link]:
        """The proposals for a batch. generator: for kinds that draw anchors."""
        raise NotImplementedError

    def prepare(self, reading: Reading) -> None:
        """Learn the scales of features from a first batch."""

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.kept}

    def restore(self, state: dict[str, Any]) -> None:
        for name in self.kept:
            setattr(self, name, state[name])

    def save(self, target: Target, ranked: Tensor, folder: Path) -> None:
        """Write the speculator as the engine reads it, in bf16. ranked: all ids, the most frequent
        ones first."""
        raise NotImplementedError
