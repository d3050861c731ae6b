"""The settings of a comparison: a sweep whose points have a pair of tensor-parallel degrees.

Imports nothing heavy.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from specdec_cli.core.figures import Record
from specdec_cli.experiment.folders.records import Key, Pair, Sample
from specdec_cli.experiment.folders.run_settings import RunSettings


@dataclass(frozen=True, slots=True)
class Skip:
    """The reason a pair is not run. expected: no machine could run it, so no result is missing."""

    reason: str
    expected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSettings(RunSettings):
    """batches: most batches of prompts at each batch size; None takes all."""

    draft: str
    k: int
    target_tps: tuple[int, ...]
    draft_tps: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    batches: int | None

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

    def key(self, pair: Pair, batch_size: int, k: int) -> Key:
        """The samples of a pair's ranks at a k."""
        return Key(self.draft, batch_size, k, pair.target_tp, pair.draft_tp)

    def keys(self, pair: Pair, batch_size: int) -> list[Key]:
        """The samples of k = 0, then those of the comparison's k."""
        return [self.key(pair, batch_size, k) for k in (0, self.k)]

    def misfit(self, record: Record) -> str | None:
        if not isinstance(record, Sample):
            return None
        if (pair := Pair.of(record)) not in self.pairs:
            return f"its degrees are {pair}"
        return self.misfit_in(
            record, draft=[self.draft], k=(0, self.k), batch_size=self.batch_sizes
        )
