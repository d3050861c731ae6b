"""The interface between a round and a length policy. A policy never drops a token because of that
token's own draw."""

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
    """The pairs (proposed, accepted) of each sequence in the rounds that the host has read. The
    newest pair is last."""

    trials: deque[list[tuple[int, int]]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class LengthPolicy(Protocol):
    """A rule for the number of proposals. The defaults below always propose k tokens. is_fixed:
    whether rounds always propose as many tokens as allowed."""

    is_fixed: bool = False

    @property
    def stop(self) -> Stop | None:
        """The test that ends a sequence's drafting (see `Drafting`), or None. It runs in the
        graph."""
        return None

    @property
    def doubt(self) -> Doubt | None:
        """A test of the draft's own confidences that can end its proposals before a token, or None.
        It needs a draft with confidences (`Draft.has_confidence`), and runs in the graph."""
        return None

    def lengths(self, k: int) -> tuple[int, ...]:
        """Every K that rounds may have if the longest proposal is k, in ascending order. A CUDA
        graph is captured for each."""
        return (k,)

    def next_k(
        self, lengths: tuple[int, ...], last: LastRounds, costs: RoundCosts, slots: int
    ) -> int:
        """K of the next round over `slots` slots, one of `lengths`; the same on all ranks."""
        return lengths[-1]

    def caps(self, state: BatchState, caps: torch.Tensor) -> torch.Tensor:
        """The maximum tokens of each slot, int64 [B], at most `caps`. Runs in the graph."""
        return caps
