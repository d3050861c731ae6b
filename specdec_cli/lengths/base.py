"""The interface between a round and a length policy.

A policy may drop proposed tokens, but its decision to drop a token must not depend on that token
itself. Otherwise the output distribution would change.
"""

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
    """The results of the last rounds.

    trials: one list for each round whose results the host has read, newest last. The list has a
        pair for each sequence: how many tokens were proposed, and how many of them were accepted.
    """

    trials: deque[list[tuple[int, int]]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))


class LengthPolicy(Protocol):
    """Decides how many tokens a round proposes. The defaults below always propose k tokens.

    is_fixed: whether the policy is known to leave K and caps as they are, so that every round
        proposes as many tokens as the limits of its sequences allow.
    """

    is_fixed: bool = False

    @property
    def stop(self) -> Stop | None:
        """A function that decides, given a drawn token and its logits, whether to end the
        sequence's proposals after this token (see `Drafting`); None to never do so. It runs inside
        the CUDA graph."""
        return None

    @property
    def doubt(self) -> Doubt | None:
        """A function that decides, given the confidence head's score for a token, whether to end
        the sequence's proposals before this token; None to never do so. It needs a draft with a
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
        """Return the maximum number of tokens that each slot may propose: int64 [B], each at most
        the slot's value in `caps`. This runs inside the CUDA graph."""
        return caps

    def check(self) -> None:
        """Raise `UsageError` if decisions since the last call were invalid. Runs on the host, after
        each run; only a plugin's policy has anything to check."""
        return
