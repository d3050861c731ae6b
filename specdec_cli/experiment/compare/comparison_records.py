"""The samples of a comparison and the points that follow from them.

Everything is computed from the run folder. Knows no ranks and no terminal.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from specdec_cli.experiment import points
from specdec_cli.experiment.compare.pairs import ComparisonSettings, Pair, Skip
from specdec_cli.experiment.folders.records import (
    Key,
    PairFacts,
    Point,
    Sample,
    elsewhere,
    not_measured,
    read_records,
)
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.folders.samples import Samples, speedup, without_errors
from specdec_cli.experiment.points import Failure
from specdec_cli.experiment.statistics import stats
from specdec_cli.text import digest

_OF_REPEATS = (
    *("seconds", "decode_seconds", "round_share", "stage_ms", "ttft_ms", "tpot_ms"),
    *("ttft_parts_ms", "distinct_experts"),
)


@dataclass(slots=True)
class ComparisonRecords:
    """The records of a comparison.

    samples: by pair and point, then by prompt. facts: of each pair whose models were loaded.
    failures: of pairs and batch sizes, in this run of the command. points: as last written.
    """

    settings: ComparisonSettings
    skips: Mapping[Pair, Skip]
    samples: dict[tuple[Pair, Key], dict[int, Sample]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    facts: dict[Pair, PairFacts] = field(default_factory=dict)
    failures: dict[tuple[Pair, int], Failure] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)

    def load(self, folder: RunFolder) -> None:
        """Read a folder. Of two records of one prompt the last counts."""
        self.samples.clear()
        further = partial(_problem, settings=self.settings)
        for sample in read_records(folder.path / "samples.jsonl", Sample, further):
            self.samples[Pair.of(sample), Key.of(sample)][sample.index] = sample
        facts = read_records(folder.path / "pairs.jsonl", PairFacts)
        self.facts = {Pair.of(fact): fact for fact in facts}
        written = read_records(folder.path / "points.jsonl", Point)
        self.points = list({_place(p): p for p in written}.values())

    @property
    def counts(self) -> Counter[tuple[Pair, str]]:
        """The number of records by pair and file."""
        found = Counter((pair, "pairs.jsonl") for pair in self.facts)
        for (pair, _), samples in self.samples.items():
            found[pair, "samples.jsonl"] += len(samples)
        return found

    def open_sizes(self, pair: Pair) -> list[int]:
        """The batch sizes at which a pair is not fully measured."""
        return [b for b in self.settings.batch_sizes if not self.is_complete(pair, b)]

    def is_open(self, pairs: Iterable[Pair]) -> bool:
        """Whether one of the pairs is not fully measured."""
        return any(map(self.open_sizes, pairs))

    def is_complete(self, pair: Pair, batch_size: int) -> bool:
        needed = self.settings.num_prompts(batch_size)
        return all(len(self.of(pair, batch_size, k)) >= needed for k in (0, self.settings.k))

    def of(self, pair: Pair, batch_size: int, k: int) -> Samples:
        return self.samples.get((pair, Key(self.settings.draft, batch_size, k)), {})

    def by_key(self, pair: Pair) -> dict[Key, Samples]:
        """The samples of one pair, by point."""
        return {key: found for (of, key), found in self.samples.items() if of == pair}

    def update_points(self, folder: RunFolder) -> list[Point]:
        """Compute all points anew and write those that changed; returns these."""
        earlier = {_place(point): point for point in self.points}
        self.points = self._points()
        changed = [p for p in self.points if earlier.get(_place(p)) != p]
        for point in changed:
            folder.append("points.jsonl", point)
        return changed

    def _points(self) -> list[Point]:
        """Points of pairs that ran, failed or were skipped, and of plain decoding beside them."""
        found = []
        for target_tp in self.settings.target_tps:
            pairs = [p for p in self.settings.pairs if p.target_tp == target_tp]
            for batch_size in self.settings.batch_sizes:
                if (plain := self._plain(target_tp, batch_size)) is not None:
                    found.append(plain)
                for pair in pairs:
                    if (point := self._point(pair, batch_size)) is not None:
                        found.append(point)
        return found

    def _point(self, pair: Pair, batch_size: int) -> Point | None:
        failure = self._failure(pair, batch_size)
        if failure is None and not self.is_complete(pair, batch_size):
            return None
        own = self.of(pair, batch_size, self.settings.k)
        point = point_of(
            self.settings, pair, batch_size, own, self.of(pair, batch_size, 0), failure
        )
        update = self._blocks([pair])
        own = without_errors(own)
        equal = Pair(pair.target_tp, pair.target_tp)
        if point.is_ok and self.is_complete(equal, batch_size):
            others = without_errors(self.of(equal, batch_size, self.settings.k))
            if (faster := speedup(own, others)) is not None:
                is_equal, name = pair == equal, "speedup_vs_equal_tp"
                update[name] = 1.0 if is_equal else faster.value
                update[f"{name}_ci"] = (
                    [1.0, 1.0] if is_equal else stats.interval(faster, self.settings.seed)
                )
        return point.model_copy(update=update)

    def _plain(self, target_tp: int, batch_size: int) -> Point | None:
        """The point of k = 0 at a target TP: the ranks of every pair are further repeats of it."""
        # A pair that cannot run because its degrees do not divide is no failure of plain decoding.
        pairs = [p for p in self.settings.pairs if p.target_tp == target_tp and p.divides]
        complete = [p for p in pairs if self.is_complete(p, batch_size)]
        failures = [f for p in pairs if (f := self._failure(p, batch_size)) is not None]
        if not complete and (not failures or len(failures) < len(pairs)):
            return None
        merged = merge_repeats([self.of(p, batch_size, 0) for p in complete])
        failure = None if complete else failures[0]
        point = point_of(
            self.settings, Pair(target_tp, 0), batch_size, merged, merged, failure, k=0
        )
        return point.model_copy(update=self._blocks(complete))

    def _failure(self, pair: Pair, batch_size: int) -> Failure | None:
        if (skip := self.skips.get(pair)) is not None:
            return Failure("skipped", skip.reason)
        return self.failures.get((pair, batch_size))

    def _blocks(self, pairs: Iterable[Pair]) -> dict[str, Any]:
        """The smallest cache among the pairs."""
        known = [self.facts[pair] for pair in pairs if pair in self.facts]
        least = min(known, key=lambda fact: fact.num_blocks, default=None)
        return {name: getattr(least, name, None) for name in ("num_blocks", "blocks_per_rank")}


def _problem(sample: Sample, settings: ComparisonSettings) -> str | None:
    """The reason that a sample belongs to no point of the comparison, or None."""
    if (pair := Pair.of(sample)) not in settings.pairs:
        return f"its degrees are {pair}"
    known = {"draft": [settings.draft], "k": (0, settings.k), "batch_size": settings.batch_sizes}
    told = elsewhere(sample, known)
    return told or not_measured(sample, settings.prompts["count"], settings.repeats)


def point_of(
    settings: ComparisonSettings,
    pair: Pair,
    batch_size: int,
    own: Samples,
    plain: Samples,
    failure: Failure | None,
    k: int | None = None,
) -> Point:
    """A point without its comparison to other pairs.

    own, plain: samples of the point and of k = 0, by prompt. k: the comparison's unless given.
    """
    k = settings.k if k is None else k
    key = Key(settings.draft, batch_size, k)
    found = points.measured(key, own, without_errors(plain), failure, settings.seed)
    metrics = found["metrics"]
    return Point(
        target_tp=pair.target_tp,
        draft_tp=pair.draft_tp if k else None,
        k=k,
        batch_size=batch_size,
        **found,
        broadcast_ms=metrics.broadcast_ms if metrics else None,
        num_blocks=None,
        blocks_per_rank=None,
        speedup_vs_equal_tp=None,
        speedup_vs_equal_tp_ci=None,
        tokens_sha256=digest([[i, s.token_ids] for i, s in sorted(own.items())])
        if metrics
        else None,
    )


def merge_repeats(worlds: Sequence[Samples]) -> dict[int, Sample]:
    """The samples of one point from several worlds, merged as repeats.

    A prompt counts as run if it ran in any of them.
    """
    merged: dict[int, Sample] = {}
    for samples in worlds:
        could_run = without_errors(samples)
        for index, sample in samples.items():
            known = merged.get(index)
            if known is None or (not known.could_run and index in could_run):
                merged[index] = sample
            elif index in could_run:
                update = {
                    name: _joined(getattr(known, name), getattr(sample, name))
                    for name in _OF_REPEATS
                }
                update["peak_memory_bytes"] = max(known.peak_memory_bytes, sample.peak_memory_bytes)
                merged[index] = known.model_copy(update=update)
    return merged


def _joined(ours: Any, theirs: Any) -> Any:
    """The numbers of our repeats, then of theirs, by stage or part; None where one did not count
    them."""
    if ours is None or theirs is None:
        return None
    if isinstance(ours, dict):
        return {name: spent + theirs.get(name, []) for name, spent in ours.items()}
    return ours + theirs


def _place(point: Point) -> tuple[Any, ...]:
    return (point.target_tp, point.draft_tp, point.batch_size, point.k)
