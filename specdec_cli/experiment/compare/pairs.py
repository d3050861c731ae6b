"""The nouns of a comparison: pairs of tensor-parallel degrees, and its settings.

Imports nothing heavy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from specdec_cli.experiment.folders.records import PairFacts, Point, Sample
from specdec_cli.experiment.folders.run_settings import RunSettings


@dataclass(frozen=True, slots=True, order=True)
class Pair:
    """The number of target ranks, and how many of them also hold the draft."""

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
    """The reason a pair is not run. expected: no machine could run it, so no result is missing."""

    reason: str
    expected: bool


@dataclass(frozen=True, slots=True)
class ComparisonSettings(RunSettings):
    """The settings that samples depend on; a resumed comparison must have the same.

    batches: most batches of prompts at each batch size; None takes all. prompts: how many, and a
    digest of their tokens.
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
        """Pairs in running order: equal degrees first, since others are compared with them."""
        for target_tp in self.target_tps:
            own = [pair for pair in self.pairs if pair.target_tp == target_tp]
            yield from sorted(own, key=lambda p: (p.draft_tp != target_tp, p.draft_tp))

    def num_prompts(self, batch_size: int) -> int:
        """The number of prompts, from the first on, that are decoded at a batch size."""
        count = int(self.prompts["count"])
        return count if self.batches is None else min(count, self.batches * batch_size)
