"""The interface between a round and a length policy, which never drops a token for its own draw."""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from specdec_cli.core.drafting import Doubt, Stop
from specdec_cli.core.state import BatchState
from specdec_cli.lengths.costs import RoundCosts

_REMEMBERED = 32  # rounds


@dataclass(slots=True)
class LastRounds:
    """(proposed, accepted) of each sequence in the rounds that the host has read, newest last."""

    trials: deque[list[tuple[int, int]]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class LengthPolicy(Protocol):
    """is_fixed: whether rounds propose as much as they may. The values below propose k tokens
    always."""

    is_fixed: bool = False

    @property
    def stop(self) -> Stop | None:
        """Test that ends a sequence's drafting (see `Drafting`), or None. Runs in the graph."""
        return None

    @property
    def doubt(self) -> Doubt | None:
        """Test of a draft's own confidences that ends its proposals before a token, or None. Needs
        a draft that has some (`Draft.has_confidence`). Runs in the graph."""
        return None

    def lengths(self, k: int) -> tuple[int, ...]:
        """Every K that rounds may have if the longest proposal is k, rising. Each is captured."""
        return (k,)

    def next_k(
        self, lengths: tuple[int, ...], last: LastRounds, costs: RoundCosts, slots: int
    ) -> int:
        """K of the next round over `slots` slots, one of `lengths`; the same on all ranks."""
        return lengths[-1]

    def caps(self, state: BatchState, caps: torch.Tensor) -> torch.Tensor:
        """The most tokens of each slot, int64 [B], `caps` or fewer. Runs in the graph."""
        return caps
