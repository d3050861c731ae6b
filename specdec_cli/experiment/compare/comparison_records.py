"""The settings and records of a comparison. A comparison is stored like a sweep, but its points
also have a target TP and a draft TP.

The points of measured pairs are computed only from records in the run folder.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from specdec_cli.core.figures import Record
from specdec_cli.experiment import points
from specdec_cli.experiment.folders.records import Key, Pair, Point, Sample
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.folders.samples import Samples, without_errors
from specdec_cli.experiment.folders.settings_file import RunSettings
from specdec_cli.experiment.points import Failure, is_impossible, most_speedup
from specdec_cli.experiment.statistics import stats
from specdec_cli.experiment.statistics.stats import speedup
from specdec_cli.experiment.sweep.sweep_records import SweepRecords
from specdec_cli.text import digest


@dataclass(frozen=True, slots=True)
class Skip:
    """The reason why a pair is not run.

    expected: True if no machine could run the pair; then its absence does not count as a failure.
    """

    reason: str
    expected: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSettings(RunSettings):
    """The settings of a comparison.

    batches: at each batch size, decode at most this many batches of prompts; None for all prompts.
    """

    kind, mark = "comparison of compare-tp", "target_tps"
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
        """The pairs in running order. At each target TP the pair with equal degrees comes first,
        since the other pairs are compared with it."""
        for target_tp in self.target_tps:
            own = [pair for pair in self.pairs if pair.target_tp == target_tp]
            yield from sorted(own, key=lambda p: (p.draft_tp != target_tp, p.draft_tp))

    def num_prompts(self, batch_size: int) -> int:
        """Return how many prompts to decode at a batch size. They are the first ones of the prompt
        set."""
        count = int(self.prompts["count"])
        return count if self.batches is None else min(count, self.batches * batch_size)

    def key(self, pair: Pair, batch_size: int, k: int) -> Key:
        """Return the key of a pair's samples at a batch size and proposal length `k`."""
        return Key(self.draft, batch_size, k, pair.target_tp, pair.draft_tp)

    def keys(self, pair: Pair, batch_size: int) -> list[Key]:
        """Return the two keys of a pair's samples: at k = 0, and at the comparison's k."""
        return [self.key(pair, batch_size, k) for k in (0, self.k)]

    def misfit(self, record: Record) -> str | None:
        if not isinstance(record, Sample):
            return None
        if (pair := Pair.of(record)) not in self.pairs:
            return f"its degrees are {pair}"
        drafts = [self.draft] if record.k else [self.draft, None]
        return self.misfit_in(record, draft=drafts, k=(0, self.k), batch_size=self.batch_sizes)


_OF_REPEATS = (
    *("seconds", "decode_seconds", "round_share", "stage_ms", "ttft_ms", "tpot_ms"),
    *("ttft_parts_ms", "distinct_experts"),
)


@dataclass(slots=True)
class ComparisonRecords:
    """The records of a comparison, and the reasons why some pairs have none.

    skips: the pairs that are not run, each with the reason. Earlier samples of them still count.
    kept: the records of the run folder.
    failures: the failures since this command started, by pair and batch size. They are not stored,
        so a resumed run tries again.
    points: the result of the last `update_points` or `load`.
    """

    settings: ComparisonSettings
    skips: Mapping[Pair, Skip]
    kept: SweepRecords = field(default_factory=SweepRecords)
    failures: dict[tuple[Pair, int], Failure] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)

    def load(self, folder: RunFolder) -> None:
        """Replace these records with those of a folder."""
        self.kept = SweepRecords(folder)
        self.kept.load(folder.path, self.settings)
        self.points = list(self.kept.points.values())

    def reopen(self, folder: RunFolder, to_run: Iterable[Pair]) -> bool:
        """Load a folder to continue its run. Drop the samples of pairs in `to_run` at batch sizes
        where no prompt could run, so that they run again. Return whether any pair in `to_run` is
        not fully measured."""
        self.load(folder)
        samples = self.kept.samples
        for pair, batch_size in product(to_run, self.settings.batch_sizes):
            keys = self.settings.keys(pair, batch_size)
            if not all(without_errors(samples.get(key, {})) for key in keys):
                for key in keys:
                    samples.pop(key, None)
        return self.is_open(to_run)

    @property
    def counts(self) -> Counter[tuple[Pair, str]]:
        """The number of records by pair and file."""
        found = Counter((pair, "pairs.jsonl") for pair in self.kept.facts)
        for key, samples in self.kept.samples.items():
            found[Pair.of(key), "samples.jsonl"] += len(samples)
        return found

    def open_sizes(self, pair: Pair) -> list[int]:
        """Return the batch sizes at which a pair is not fully measured."""
        return [b for b in self.settings.batch_sizes if not self.is_complete(pair, b)]

    def is_open(self, pairs: Iterable[Pair]) -> bool:
        """True if one of the pairs is not fully measured."""
        return any(map(self.open_sizes, pairs))

    def is_complete(self, pair: Pair, batch_size: int) -> bool:
        needed = self.settings.num_prompts(batch_size)
        return all(len(self.of(pair, batch_size, k)) >= needed for k in (0, self.settings.k))

    def of(self, pair: Pair, batch_size: int, k: int) -> Samples:
        return self.kept.samples.get(self.settings.key(pair, batch_size, k), {})

    def update_points(self) -> list[Point]:
        """Recompute all points. Record and return those that changed."""
        self.points = self._points()
        return [point for point in self.points if self.kept.add_point(point)]

    def _points(self) -> list[Point]:
        """Compute the points of all pairs, and of plain decoding at each target TP. Leave out
        points that are still to be measured: each point in the result was measured, failed or was
        skipped."""
        found: list[Point | None] = []
        for target_tp in self.settings.target_tps:
            pairs = [p for p in self.settings.pairs if p.target_tp == target_tp]
            for batch_size in self.settings.batch_sizes:
                found.append(self._plain(target_tp, batch_size))
                found += [self._point(pair, batch_size) for pair in pairs]
        return [point for point in found if point is not None]

    def _point(self, pair: Pair, batch_size: int) -> Point | None:
        failure = self._failure(pair, batch_size)
        if failure is None and not self.is_complete(pair, batch_size):
            return None
        plain, key = self.settings.keys(pair, batch_size)
        own, baseline = (self.kept.samples.get(one, {}) for one in (key, plain))
        point = point_of(key, own, baseline, failure, self.settings.seed)
        update = self._blocks([pair])
        equal = Pair(pair.target_tp, pair.target_tp)
        is_valid = point.is_ok and point.impossible_speedup is None
        if is_valid and self.is_complete(equal, batch_size):
            others = without_errors(self.of(equal, batch_size, key.k))
            theirs = speedup(others, without_errors(self.of(equal, batch_size, 0)))
            faster = speedup(without_errors(own), others)
            is_valid = theirs is not None and not is_impossible(theirs.value, most_speedup(others))
            if faster is not None and is_valid:
                is_equal, name = pair == equal, "speedup_vs_equal_tp"
                update[name] = 1.0 if is_equal else faster.value
                update[f"{name}_ci"] = (
                    [1.0, 1.0] if is_equal else stats.interval(faster, self.settings.seed)
                )
        return point.model_copy(update=update)

    def _plain(self, target_tp: int, batch_size: int) -> Point | None:
        """Compute the point at k = 0 for a target TP, or return None if it is not measured yet.
        Plain decoding does not use the draft, so the measurements of all pairs with this target TP
        count as repeats of one point."""
        # A pair with an illegal draft TP does not count as a failure of plain decoding.
        pairs = [p for p in self.settings.pairs if p.target_tp == target_tp and p.divides]
        complete = [p for p in pairs if self.is_complete(p, batch_size)]
        failures = [f for p in pairs if (f := self._failure(p, batch_size)) is not None]
        if not complete and (not failures or len(failures) < len(pairs)):
            return None
        merged = merge_repeats([self.of(p, batch_size, 0) for p in complete])
        failure = None if complete else failures[0]
        key = Key(None, batch_size, 0, target_tp)
        point = point_of(key, merged, merged, failure, self.settings.seed)
        return point.model_copy(update=self._blocks(complete))

    def _failure(self, pair: Pair, batch_size: int) -> Failure | None:
        # A pair that was measured stays so, even if this machine shows fewer GPUs now.
        skip = self.skips.get(pair)
        if skip is not None and not self.is_complete(pair, batch_size):
            return Failure("skipped", skip.reason)
        return self.failures.get((pair, batch_size))

    def _blocks(self, pairs: Iterable[Pair]) -> dict[str, Any]:
        """Return the block counts of the pair with the smallest cache. Each count is None if no
        pair has recorded its block counts."""
        known = [self.kept.facts[pair] for pair in pairs if pair in self.kept.facts]
        least = min(known, key=lambda fact: fact.num_blocks, default=None)
        return {name: getattr(least, name, None) for name in ("num_blocks", "blocks_per_rank")}


def point_of(key: Key, own: Samples, plain: Samples, failure: Failure | None, seed: int) -> Point:
    """Compute a point, without comparing it to other pairs. own, plain: the samples at `key` and at
    k = 0."""
    found = points.measured(key, own, without_errors(plain), failure, seed)
    metrics = found["metrics"]
    texts = [[i, s.token_ids] for i, s in sorted(own.items())]
    return Point(
        target_tp=key.target_tp,
        draft_tp=key.draft_tp if key.k else None,
        k=key.k,
        batch_size=key.batch_size,
        **found,
        broadcast_ms=metrics.broadcast_ms if metrics else None,
        num_blocks=None,
        blocks_per_rank=None,
        speedup_vs_equal_tp=None,
        speedup_vs_equal_tp_ci=None,
        tokens_sha256=digest(texts) if metrics else None,
    )


def merge_repeats(worlds: Sequence[Samples]) -> dict[int, Sample]:
    """Merge the samples of one point that several sets of ranks measured, as if they were repeats
    of one run.

    worlds: the samples of each set of ranks. A prompt counts as run if any set of ranks ran it.
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
    """Return the values of `ours` followed by those of `theirs`. Each is a list with one value per
    repeat, or a dict of such lists, which are joined key by key. Return None if either is None."""
    if ours is None or theirs is None:
        return None
    if isinstance(ours, dict):
        return {name: spent + theirs.get(name, []) for name, spent in ours.items()}
    return ours + theirs
