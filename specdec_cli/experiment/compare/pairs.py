"""The nouns of a comparison: pairs of degrees, and what its figures depend on.

Imports nothing heavy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from specdec_cli.experiment.records import PairFacts, Point, Sample
from specdec_cli.experiment.run_settings import RunSettings


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """The ranks of a target, and how many of them hold its draft."""

    target_tp: int
    draft_tp: int

    @property
    def divides(self) -> bool:
        """Whether the draft's degree divides the target's."""
        return self.target_tp % self.draft_tp == 0

    @classmethod
    def of(cls, record: Point | Sample | PairFacts) -> "Pair":
        """The pair of a record that has one; a draft TP of 0 stands for k = 0."""
        return cls(record.target_tp or 0, record.draft_tp or 0)

    def __str__(self) -> str:
        return f"target TP {self.target_tp}, draft TP {self.draft_tp}"


@dataclass(frozen=True, slots=True)
class Skip:
    """Why a pair is not run. expected: no machine could, so nothing is missing from the result."""

    reason: str
    expected: bool


@dataclass(frozen=True, slots=True)
class ComparisonSettings(RunSettings):
    """What the samples of a comparison depend on; one that is resumed has to have the same.

    batches: at each batch size, at most so
    many batches of prompts; None takes all. prompts: how many, and a digest of their tokens.
    """

    draft: str
    k: int
    target_tps: tuple[int, ...]
    draft_tps: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    batches: int | None
    prompts: dict[str, Any]
    device: str
    dtype: str

    @property
    def pairs(self) -> list[Pair]:
        return [Pair(t, d) for t, d in product(self.target_tps, self.draft_tps)]

    @property
    def in_order(self) -> Iterator[Pair]:
        """Pairs as they are run: equal degrees first, with which the others are compared."""
        for target_tp in self.target_tps:
            own = [pair for pair in self.pairs if pair.target_tp == target_tp]
            yield from sorted(own, key=lambda p: (p.draft_tp != target_tp, p.draft_tp))

    def num_prompts(self, batch_size: int) -> int:
        """Prompts that are decoded at a batch size: the first ones."""
        count = int(self.prompts["count"])
        return count if self.batches is None else min(count, self.batches * batch_size)
