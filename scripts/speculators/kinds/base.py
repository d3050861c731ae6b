"""A kind of speculator as training sees it: a module, its chained links, and a folder.

A kind is a file beside this one, with a function `make`. Legend: B rows, N tokens a row, H width.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from scripts.speculators.target import Reading, Target


@dataclass(frozen=True)
class Options:
    """The command line's settings of all kinds; each kind reads its own."""

    links: int = 6
    layers: tuple[int, ...] = ()
    inner: int | None = None
    depth: int = 2
    vocabulary: int | None = None
    is_blank: bool = False


class Kind(Protocol):
    """A speculator in training.

    shift: rows between a link's row and the target's row with the same goal. feature_layers: the
    target's hidden states that it reads. fade: a link's weight by that of the link before.
    """

    name: str
    module: torch.nn.Module
    shift: int
    feature_layers: tuple[int, ...]
    num_links: int
    fade: float

    def links(self, reading: Reading) -> list[Tensor]:
        """[B * N, H] of each chained step, ready for the target's head."""
        ...

    def prepare(self, reading: Reading) -> None:
        """Learn scales from a first batch."""
        ...

    def state(self) -> dict[str, Any]:
        """Everything a checkpoint needs besides the module's parameters."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...

    def save(self, target: Target, often: Tensor, folder: Path) -> None:
        """Write the speculator as the engine reads it, in bf16."""
        ...
