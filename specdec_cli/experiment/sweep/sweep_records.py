"""The records of a sweep, in memory and in its folder."""

import logging
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from specdec_cli.core.figures import Record
from specdec_cli.experiment.folders.records import (
    CurvePart,
    Key,
    Pair,
    PairFacts,
    Point,
    Sample,
    read_records,
)
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.predict import ReplayText

_log = logging.getLogger("specdec")


class Settings(Protocol):
    def misfit(self, record: Record) -> str | None:
        """The reason that a record is of no point of the run, or None."""


@dataclass(slots=True)
class SweepClock:
    """The time that a sweep took, in seconds.

    rounds: in rounds and prefill passes of measured runs. measuring: the whole measured part,
    including recording and writing. processor: CPU time of this process over that part.
    """

    rounds: float = 0.0
    measuring: float = 0.0
    processor: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        outside = 1 - self.rounds / self.measuring if self.measuring else None
        return asdict(self) | {"share_outside_rounds": outside}


@dataclass(slots=True)
class SweepRecords:
    """The records of a sweep or a comparison, in memory and in its folder.

    texts: by draft and prompt. costs: the time curves. facts: of the pairs of a comparison whose
    models were loaded. earlier_clock, earlier_where: from the
    summary of the last earlier process that measured anything; the summary itself is removed with
    the first new record.
    """

    folder: RunFolder | None = None
    samples: dict[Key, dict[int, Sample]] = field(default_factory=lambda: defaultdict(dict))
    texts: dict[str | None, dict[int, ReplayText]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    costs: dict[Key, dict[int, CurvePart]] = field(default_factory=lambda: defaultdict(dict))
    points: dict[Key, Point] = field(default_factory=dict)
    facts: dict[Pair, PairFacts] = field(default_factory=dict)
    earlier_clock: SweepClock = field(default_factory=SweepClock)
    earlier_where: dict[str, Any] | None = None

    def without_folder(self) -> "SweepRecords":
        """The same records, for a rank that writes nothing."""
        return replace(self, folder=None)

    def load(self, folder: Path, settings: Settings) -> None:
        """Read a folder. Of two records of one thing the last counts."""
        for kind in _FILES:
            for record in read_kept(folder, kind, settings):
                self._enter(record)

    def add(self, *records: Record) -> None:
        """Add new records of one kind in one write: a sync for each would delay the next round."""
        if self.folder is not None and records:
            self.folder.append(_FILES[type(records[0])], *records)
        for record in records:
            self._enter(record)

    def add_point(self, point: Point) -> bool:
        """Add a point if it changed, and tell. A retried point has a second line."""
        has_changed = self.points.get(Key.of(point)) != point
        if has_changed:
            self.add(point)
        return has_changed

    def _enter(self, record: Record) -> None:
        match record:
            case Sample():
                self.samples[Key.of(record)][record.index] = record
            case ReplayText():
                self.texts[record.draft][record.index] = record
            case CurvePart():
                self.costs[Key.of(record)][record.part] = record
            case Point():
                self.points[Key.of(record)] = record
            case PairFacts():
                self.facts[Pair.of(record)] = record


_FILES: dict[type[Record], str] = {
    Sample: "samples.jsonl",
    ReplayText: "replay.jsonl",
    CurvePart: "curve.jsonl",
    Point: "points.jsonl",
    PairFacts: "pairs.jsonl",
}
R = TypeVar("R", bound=Record)


def read_kept(folder: Path, kind: type[R], settings: Settings) -> list[R]:
    """The records of one kind in a run's folder.

    Raises `SetupError` for a damaged record, or one of no point of the run.
    """
    return read_records(folder / _FILES[kind], kind, settings.misfit)
