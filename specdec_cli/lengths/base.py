"""What a round needs of a length policy.

A length may rest on what is known before a token is drawn, or on a drawn token that then stays
proposed. To drop a token because of its own draw would change the text.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from specdec_cli.core.drafting import Stop
from specdec_cli.core.state import BatchState
from specdec_cli.lengths.costs import RoundCosts

_REMEMBERED = 32  # rounds


@dataclass(slots=True)
class LastRounds:
    """Acceptance of the rounds that the host has read, newest last; the same on all ranks.

    trials: for each of them, one (proposed, accepted) of each sequence that took part.
    """

    trials: deque[list[tuple[int, int]]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class LengthPolicy(Protocol):
    """is_fixed: whether every round proposes as much as it may, so that predictions hold."""

    is_fixed: bool

    @property
    def stop(self) -> Stop | None:
        """Ends the drafting of a sequence, see `Drafting`; inside the graph."""
        ...

    def lengths(self, k: int) -> tuple[int, ...]:
        """Every K that rounds may have whose longest proposal is k, rising: each is captured."""
        ...

    def next_k(
        self, lengths: tuple[int, ...], last: LastRounds, costs: RoundCosts, slots: int
    ) -> int:
        """K of the next round of so many slots, one of `lengths`; the same on all ranks."""
        ...

    def caps(self, state: BatchState, caps: torch.Tensor) -> torch.Tensor:
        """The most tokens of each slot, int64 [B], `caps` or fewer; inside the graph."""
        ...
