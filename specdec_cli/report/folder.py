"""Reads a run folder of sweep-k or compare-tp, whole or cut short by a crash.

Knows the contract's names and believes nothing: what is no number where one belongs counts as not
there, and what could not be read is said in `notes`. Knows nothing of how it is shown.
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specdec_cli.errors import UsageError

_MAX_FILE_BYTES = 1024**3

_KEYS = ("draft", "k", "batch_size", "target_tp", "draft_tp")


@dataclass(frozen=True, slots=True)
class Point:
    """One measured setting. `record` is its line of points.jsonl."""

    record: Mapping[str, Any]

    @property
    def draft(self) -> str | None:
        return self._text("draft")

    @property
    def k(self) -> int | None:
        return self._whole("k")

    @property
    def batch_size(self) -> int | None:
        return self._whole("batch_size")

    @property
    def target_tp(self) -> int | None:
        return self._whole("target_tp")

    @property
    def draft_tp(self) -> int | None:
        return self._whole("draft_tp")

    @property
    def status(self) -> str:
        return self._text("status") or "ok"

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"

    @property
    def is_predicted(self) -> bool:
        """Whether this was predicted and not measured, on purpose."""
        return self.status == "skipped" and self.number("predicted_speedup") is not None

    @property
    def is_baseline(self) -> bool:
        """Whether this is plain decoding."""
        return self.k == 0

    @property
    def reason(self) -> str:
        return self._text("reason") or ""

    def number(self, name: str, inner: str | None = None) -> float | None:
        """A figure of the point or its metrics; `inner` names a part of it, such as p50."""
        value = self._value(name)
        if inner is not None:
            value = value.get(inner) if isinstance(value, Mapping) else None
        return finite(value)

    def interval(self, name: str) -> tuple[float, float] | None:
        """A confidence interval [lo, hi]."""
        value = self._value(name)
        if not isinstance(value, list) or len(value) != 2:
            return None
        low, high = map(finite, value)
        return None if low is None or high is None else (low, high)

    def numbers(self, name: str) -> list[float | None]:
        """A list of figures, such as a rate by position."""
        value = self._value(name)
        return [finite(item) for item in value] if isinstance(value, list) else []

    def categories(self) -> dict[str, Mapping[str, Any]]:
        """Figures by category of prompt."""
        value = self.record.get("per_category")
        if not isinstance(value, Mapping):
            return {}
        return {str(name): row for name, row in value.items() if isinstance(row, Mapping)}

    def _value(self, name: str) -> Any:
        metrics = self.record.get("metrics")
        if name not in self.record and isinstance(metrics, Mapping):
            return metrics.get(name)
        return self.record.get(name)

    def _text(self, name: str) -> str | None:
        value = self.record.get(name)
        return None if value is None else str(value)

    def _whole(self, name: str) -> int | None:
        value = self._value(name)
        return value if type(value) is int else None


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """What a run folder holds.

    kind: "sweep-k" or "compare-tp". samples: finished prompts by point and category, as (drafts,
    accepted tokens, prompts). is_partial: there is no summary, so the run did not come to its end.
    """

    path: Path
    kind: str
    points: tuple[Point, ...]
    summary: Mapping[str, Any] | None
    recipe: Mapping[str, Any]
    recipe_text: str
    environment: Mapping[str, Any]
    samples: Mapping[tuple[str | None, int, int], Mapping[str, tuple[int, int, int]]]
    notes: tuple[str, ...]

    @property
    def is_partial(self) -> bool:
        return self.summary is None

    def setting(self, section: str, key: str) -> Any:
        """A key of the recipe, or None."""
        values = self.recipe.get(section)
        return values.get(key) if isinstance(values, Mapping) else None


def finite(value: object) -> float | None:
    """The number, unless it is none, or not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return number if math.isfinite(number) else None


def read_folder(path: Path) -> ReportedRun:
    """The run in a folder. Raises `UsageError` when it holds none that a report is about."""
    if not path.is_dir():
        what = "is a file" if path.exists() else "no such folder"
        raise UsageError(f"{path}: {what}", "name a run folder (what -o was given)")
    notes: list[str] = []
    summary = _document(path / "summary.json", notes)
    schema = str((summary or {}).get("schema", ""))
    if "generate" in schema or "profile" in schema:
        raise UsageError(
            f"{path}: holds the results of {schema.removeprefix('specdec.').partition('/')[0]}",
            "a report is about a run of sweep-k or compare-tp",
        )
    has_points = (path / "points.jsonl").exists()
    if summary is None and not has_points:
        _refuse_unfinished(path)
        raise UsageError(
            f"{path}: neither points.jsonl nor summary.json in it",
            "name a run folder of sweep-k or compare-tp",
        )
    records = list(_lines(path / "points.jsonl", notes))
    listed = (summary or {}).get("points")
    if isinstance(listed, list) and listed:
        records = [record for record in listed if isinstance(record, dict)]
    points = _latest(records)
    is_comparison = "compare-tp" in schema or any("target_tp" in p.record for p in points)
    text, recipe = _recipe(path / "recipe.yaml", notes)
    if not recipe and isinstance((summary or {}).get("recipe"), dict):
        recipe = (summary or {})["recipe"]
    environment = _document(path / "environment.json", notes)
    return ReportedRun(
        path=path,
        kind="compare-tp" if is_comparison else "sweep-k",
        points=points,
        summary=summary,
        recipe=recipe,
        recipe_text=text,
        environment=environment or {},
        samples=_count(path / "samples.jsonl", notes),
        notes=tuple(notes),
    )


def _refuse_unfinished(path: Path) -> None:
    """Raise `UsageError` where a run was begun and no point of it was finished."""
    begun = _document(path / "settings.json", [])
    if begun is None:
        return
    settings = begun.get("settings")
    is_sweep = isinstance(settings, Mapping) and "ks" in settings
    has_samples = next(_lines(path / "samples.jsonl", []), None) is not None
    hint = "go on with the command that began it, and --resume"
    if is_sweep and has_samples:
        hint = f"`specdec merge {path} -o NEW` makes points of the samples there are; or {hint}"
    raise UsageError(f"{path}: no point of this run is finished yet", hint)


def _latest(records: list[dict[str, Any]]) -> tuple[Point, ...]:
    """A point for each setting, the last record of it: a resumed run tries failed ones again."""
    found = {tuple(str(r.get(key)) for key in _KEYS): Point(r) for r in records}

    def order(point: Point) -> tuple[Any, ...]:
        places = (point.target_tp, point.batch_size, point.draft_tp, point.k)
        return (point.draft or "", *(-1 if place is None else place for place in places))

    return tuple(sorted(found.values(), key=order))


def _read(path: Path, notes: list[str]) -> str | None:
    try:
        if not path.exists():
            return None
        if path.stat().st_size > _MAX_FILE_BYTES:
            notes.append(f"{path.name} is too large and was left out")
            return None
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
        return None


def _document(path: Path, notes: list[str]) -> dict[str, Any] | None:
    text = _read(path, notes)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        notes.append(f"{path.name} is damaged and was left out")
        return None
    return found


def _lines(path: Path, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The records of a .jsonl file; of a crashed run the last line may be torn."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.strip():
                    continue
                try:
                    record = json.loads(raw.decode("utf-8", "replace"))
                except (ValueError, RecursionError):
                    record = None
                if isinstance(record, dict):
                    yield record
                    continue
                is_torn = not raw.endswith(b"\n")
                what = "is torn, as a crash leaves it" if is_torn else "is no record"
                notes.append(f"{path.name}, line {number} {what}: left out")
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")


def _recipe(path: Path, notes: list[str]) -> tuple[str, Mapping[str, Any]]:
    text = _read(path, notes)
    if text is None:
        return "", {}
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        notes.append(f"{path.name} is damaged")
        return text, {}
    return text, found


def _count(
    path: Path, notes: list[str]
) -> dict[tuple[str | None, int, int], dict[str, tuple[int, int, int]]]:
    """Drafts, accepted tokens and prompts of samples.jsonl, by (draft, k, batch size), category."""
    found: dict[tuple[str | None, int, int], dict[str, tuple[int, int, int]]] = {}
    for record in _lines(path, notes):
        draft, k, batch = (record.get(key) for key in ("draft", "k", "batch_size"))
        accepted = record.get("accepted_per_round")
        if type(k) is not int or type(batch) is not int or not isinstance(accepted, list):
            continue
        if not all(type(count) is int for count in accepted):
            continue
        point = found.setdefault((None if draft is None else str(draft), k, batch), {})
        category = str(record.get("category") or "(none)")
        drafts, tokens, prompts = point.get(category, (0, 0, 0))
        point[category] = (drafts + len(accepted), tokens + sum(accepted), prompts + 1)
    return found
