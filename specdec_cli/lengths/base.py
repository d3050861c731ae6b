"""The interface between a round and a length policy. Whether a policy drops a token must not depend
on which token was drawn there; otherwise the output distribution would change."""

from collections import deque
from dataclasses import dataclass, field
from typing import Protocol

import torch

from specdec_cli.core.drafting import Doubt, Stop
from specdec_cli.core.state import BatchState
from specdec_cli.lengths.costs import RoundCosts

_REMEMBERED = 32  # the number of rounds whose results are kept


@dataclass(slots=True)
class LastRounds:
    """The results of the last rounds. trials: an item for each round that the host has read, newest
    last; the item has a pair (proposed, accepted) for each sequence."""

    trials: deque[list[tuple[int, int]]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class LengthPolicy(Protocol):
    """Decides how many tokens a round proposes. The defaults below always propose k tokens.
    is_fixed: whether every round proposes as many tokens as its limits allow."""

    is_fixed: bool = False

    @property
    def stop(self) -> Stop | None:
        """A test that ends a sequence's proposals after a drawn token (see `Drafting`), or None. It
        runs inside the CUDA graph."""
        return None

    @property
    def doubt(self) -> Doubt | None:
        """A test of the scores from a draft's confidence head. It ends a sequence's proposals
        before the token whose score fails it. None without such a test. It needs a draft with a
        confidence head (`Draft.has_confidence`), and runs inside the CUDA graph."""
        return None

    def lengths(self, k: int) -> tuple[int, ...]:
        """Return all values of K that rounds may use if the largest is k, in ascending order. A
        CUDA graph is captured for each."""
        return (k,)

    def next_k(
        self, lengths: tuple[int, ...], last: LastRounds, costs: RoundCosts, slots: int
    ) -> int:
        """Return K for the next round over `slots` slots: one of `lengths`, and the same on all
        ranks."""
        return lengths[-1]

    def caps(self, state: BatchState, caps: torch.Tensor) -> torch.Tensor:
        """Return how many tokens each slot may propose, int64 [B], at most `caps`. This runs inside
        the CUDA graph."""
        return caps
