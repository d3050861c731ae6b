"""The settings and the records of a sweep, in memory and in its folder. Does not import torch."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from specdec_cli.core.figures import Rate, Record
from specdec_cli.experiment.folders.conclusions import CheckResult
from specdec_cli.experiment.folders.record_lines import read_records
from specdec_cli.experiment.folders.records import (
    CurvePart,
    Key,
    Pair,
    PairFacts,
    Point,
    Sample,
    Stretch,
)
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.folders.samples import without_errors
from specdec_cli.experiment.folders.settings_file import RunSettings
from specdec_cli.experiment.forecasts import ReplayText
from specdec_cli.experiment.load.arrivals import Offered


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings(RunSettings):
    """The settings of a sweep. Shards can be merged if their settings differ only in `shard` and in
    the names of drafts.

    drafts: the names of the drafts to compare, or of methods that need no draft; None for a run
        without a proposer.
    shard: the index of this shard and the number of shards; None for a whole sweep.
    """

    kind, mark = "sweep of sweep-k", "ks"
    drafts: tuple[str | None, ...]
    ks: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    predict_only: bool
    shard: tuple[int, int] | None

    @property
    def shares_baseline(self) -> bool:
        """True if several arms share one point at k = 0."""
        return len(self.drafts) > 1

    @property
    def offered(self) -> Offered | None:
        """The rates at which requests arrive, the arrival process and the latency objectives. None
        if all requests of a batch wait from the start."""
        found = self.recipe.get("load")
        return Offered.of(found, self.seed) if found is not None else None

    @property
    def levels(self) -> list[tuple[int, Rate | None]]:
        """All pairs of batch size and request rate; the rate is None if all requests of a batch
        wait from the start. Points are compared only within one pair."""
        rates = self.offered.rates if self.offered is not None else (None,)
        return [(size, rate) for rate in rates for size in self.batch_sizes]

    def num_samples(self, rate: Rate | None, prompts: int) -> int:
        """Return how many samples a complete point has: one for each of `prompts` prompts or, if
        requests arrive at a rate, one for each measured request."""
        offered = self.offered
        if offered is None or rate is None:
            return prompts
        return offered.num_measured(prompts, self.repeats, rate)

    @property
    def measured_ks(self) -> tuple[int, ...]:
        return (0, max(self.ks)) if self.predict_only and max(self.ks) else self.ks

    def keys(self, batch_size: int, ks: Sequence[int], rate: Rate | None = None) -> list[Key]:
        """Return the keys of points, draft by draft; only once a k = 0 point that drafts share."""
        found = (Key(d, batch_size, k, request_rate=rate) for d in self.drafts for k in ks)
        return list(dict.fromkeys(found))

    @property
    def measured_keys(self) -> list[Key]:
        """The keys of all points that are measured, not predicted."""
        return [key for b, rate in self.levels for key in self.keys(b, self.measured_ks, rate)]

    def misfit(self, record: Record) -> str | None:
        drafts: tuple[str | None, ...] = self.drafts
        if getattr(record, "k", None) == 0:
            drafts = (None,) if self.shares_baseline else (None, *drafts)
        rates = {rate for _, rate in self.levels}
        return self.misfit_in(
            record, draft=drafts, k=self.ks, batch_size=self.batch_sizes, request_rate=rates
        )

    @classmethod
    def of_dict(cls, found: Mapping[str, Any]) -> "SweepSettings":
        """Make the settings from the result of `as_dict`."""
        values: dict[str, Any] = {
            n: tuple(v) if isinstance(v, list) else v for n, v in found.items()
        }
        return cls(**values)


class Settings(Protocol):
    def misfit(self, record: Record) -> str | None:
        """Return the reason why a record does not belong to any point of the run; None if it
        does."""


@dataclass(slots=True)
class SweepClock:
    """Durations of the parts of a sweep, in seconds.

    rounds: the time spent in rounds and prefill passes of measured runs.
    measuring: the whole time spent measuring, including recording and writing.
    processor: this process's CPU time while measuring.
    """

    rounds: float = 0.0
    measuring: float = 0.0
    processor: float = 0.0

    @contextmanager
    def measures(self, sign: int = 1) -> Iterator[None]:
        """Add the duration of the `with` block to `measuring` and `processor`, unless it raises.
        With sign -1 the duration is subtracted, to exclude other work inside an outer block."""
        began, processor = time.perf_counter(), time.process_time()
        yield
        self.measuring += sign * (time.perf_counter() - began)
        self.processor += sign * (time.process_time() - processor)

    def as_dict(self) -> dict[str, Any]:
        outside = 1 - self.rounds / self.measuring if self.measuring else None
        return asdict(self) | {"share_outside_rounds": outside}


@dataclass(slots=True)
class SweepRecords:
    """The records of a sweep or a comparison, in memory and in its folder.

    samples: the samples of each point, by `Sample.place`. The samples of a point at a request rate
        are complete only if `stretches` has the point's time windows.
    texts: the data for predictions, by draft and prompt index.
    costs: the parts of each point's time curve, by number.
    stretches: the time windows in which each point at a request rate was measured, by shard.
    points: the last computed version of each point.
    facts: in comparisons, what is known about each pair of tensor-parallel degrees at which models
        were loaded.
    earlier_clock, earlier_where: the clock and the environment from the summary of the last process
        that measured anything. They are kept here, because the first new record deletes that
        summary.
    earlier_check: the losslessness check in that summary, if any.
    """

    folder: RunFolder | None = None
    samples: dict[Key, dict[int, Sample]] = field(default_factory=lambda: defaultdict(dict))
    texts: dict[str | None, dict[int, ReplayText]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    costs: dict[Key, dict[int, CurvePart]] = field(default_factory=lambda: defaultdict(dict))
    stretches: dict[Key, dict[int, Stretch]] = field(default_factory=lambda: defaultdict(dict))
    points: dict[Key, Point] = field(default_factory=dict)
    facts: dict[Pair, PairFacts] = field(default_factory=dict)
    earlier_clock: SweepClock = field(default_factory=SweepClock)
    earlier_where: dict[str, Any] | None = None
    earlier_check: CheckResult | None = None

    def load(self, folder: Path, settings: Settings) -> None:
        """Read the records of a folder."""
        for kind in _FILES:
            for record in read_kept(folder, kind, settings):
                self.enter(record)
        self.drop_parts()

    def drop_parts(self) -> None:
        """Drop the samples of points at a request rate whose measurement was interrupted. At these
        points, the number of samples differs from the number of requests in the time windows."""
        for key in [key for key in self.samples if key.request_rate is not None]:
            whole = sum(one.num_requests for one in self.stretches[key].values())
            if len(self.samples[key]) != whole:
                del self.samples[key], self.stretches[key]

    def drop_failed(self) -> None:
        """Drop the samples of prompts that failed, so that they run again. At request rates,
        failures count as results and are kept."""
        for key, of in self.samples.items():
            if key.request_rate is None:
                self.samples[key] = without_errors(of)

    def add(self, *records: Record) -> None:
        """Add new records of the same kind. All are written at once, since syncing the file for
        each one would delay the next round."""
        if self.folder is not None and records:
            self.folder.append(_FILES[type(records[0])], *records)
        for record in records:
            self.enter(record)

    def add_point(self, point: Point) -> bool:
        """Add a point if it changed, and return whether it did. The file keeps the old version; the
        new one is appended as another line."""
        has_changed = self.points.get(Key.of(point)) != point
        if has_changed:
            self.add(point)
        return has_changed

    def enter(self, record: Record) -> None:
        """Store a record in memory, where it replaces an earlier one with the same key."""
        match record:
            case Sample():
                self.samples[Key.of(record)][record.place] = record
            case ReplayText():
                self.texts[record.draft][record.index] = record
            case Stretch():
                self.stretches[Key.of(record)][record.shard] = record
            case CurvePart():
                self.costs[Key.of(record)][record.part] = record
            case Point():
                self.points[Key.of(record)] = record
            case PairFacts():
                self.facts[Pair.of(record)] = record


_FILES: dict[type[Record], str] = {
    Sample: "samples.jsonl",
    ReplayText: "replay.jsonl",
    Stretch: "load.jsonl",
    CurvePart: "curve.jsonl",
    Point: "points.jsonl",
    PairFacts: "pairs.jsonl",
}
R = TypeVar("R", bound=Record)


def read_kept(folder: Path, kind: type[R], settings: Settings) -> list[R]:
    """Read the records of one kind from a run's folder. Raises `SetupError` for a record that does
    not belong to any point of the run."""
    return read_records(folder / _FILES[kind], kind, settings.misfit)
