"""The policy of a fixed length: every round proposes as many tokens as the recipe says."""

import torch

from specdec_cli.core.drafting import Stop
from specdec_cli.core.state import BatchState
from specdec_cli.lengths.base import LastRounds
from specdec_cli.lengths.costs import RoundCosts
from specdec_cli.recipe import SpeculationSection


class FixedLength:
    """The same k in every round."""

    is_fixed = True
    stop: Stop | None = None

    def lengths(self, k: int) -> tuple[int, ...]:
        return (k,)

    def next_k(
        self, lengths: tuple[int, ...], last: LastRounds, costs: RoundCosts, slots: int
    ) -> int:
        return lengths[-1]

    def caps(self, state: BatchState, caps: torch.Tensor) -> torch.Tensor:
        return caps


def from_recipe(speculation: SpeculationSection) -> FixedLength:
    return FixedLength()
