"""Reads a run folder of sweep-k or compare-tp, even if a crash cut the run short.

Damaged records and files are left out, and a line in `notes` reports each of them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from specdec_cli.core.figures import Record
from specdec_cli.errors import UsageError
from specdec_cli.experiment.disk import refuse_special_files
from specdec_cli.experiment.folders.conclusions import Summary, refuse_other_version
from specdec_cli.experiment.folders.record_lines import R, described, json_of, parsed
from specdec_cli.experiment.folders.records import Point, Sample
from specdec_cli.experiment.points import is_impossible

_LABEL_LENGTH = 32


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """A run as read from its folder.

    is_comparison: whether the run is from compare-tp; otherwise it is from sweep-k.
    points: the latest record of each point. Missing speed-ups are computed where possible.
    labels: a short name for each draft; the key None is for points without a draft.
    is_partial: whether the run has no readable summary.json; `summary` is then empty.
    has_samples: whether any prompt was finished.
    notes: a line about each damaged record or file.
    """

    path: Path
    is_comparison: bool
    points: tuple[Point, ...]
    labels: Mapping[str | None, str]
    summary: Summary
    is_partial: bool
    recipe: Mapping[str, Any]
    recipe_text: str
    environment: Mapping[str, Any]
    has_samples: bool
    notes: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The command that made the run."""
        return "compare-tp" if self.is_comparison else "sweep-k"

    def method_of(self, draft: str | None) -> Any:
        """Return the speculation method that was used with a draft. In a sweep of several drafts,
        each draft may have its own method. Otherwise, the method is the recipe's
        `speculation.method`."""
        return self.summary.method_of(draft) or self.setting("speculation", "method")

    @property
    def drafts(self) -> list[str]:
        """The names of the drafts, and of other proposers, that were measured. The points of a
        comparison name none, so its draft is taken from the recipe."""
        named = sorted({p.draft for p in self.points if p.draft is not None})
        own = self.setting("draft", "model")
        return named or ([] if own is None else [str(own)])

    def setting(self, section: str, key: str) -> Any:
        """Return the value of `key` in a section of the recipe, or None if it is not set."""
        values = self.recipe.get(section)
        return values.get(key) if isinstance(values, Mapping) else None


def read_folder(path: Path) -> ReportedRun:
    """Read the run in a folder.

    Raises `UsageError` if the folder has no run that a report can show, and `SetupError` for files
    that cannot be read safely.
    """
    if not os.path.isdir(path):  # also False if the name is too long
        what = "is a file" if os.path.exists(path) else "no such folder"
        raise UsageError(f"{path}: {what}", "name a run folder, the one that -o named")
    refuse_special_files(path)
    notes: list[str] = []
    document = _document(path / "summary.json", notes) or {}
    schema = str(document.get("schema", ""))
    if "generate" in schema or "profile" in schema:
        raise UsageError(
            f"{path} holds the results of {schema.removeprefix('specdec.').partition('/')[0]}",
            "reports are made from runs of sweep-k and compare-tp",
        )
    settings = _document(path / "settings.json", [])
    if settings is None and not document:
        if not (path / "points.jsonl").exists():
            raise UsageError(
                f"{path} has neither points.jsonl nor summary.json",
                "name a run folder of sweep-k or compare-tp",
            )
        raise UsageError(
            f"{path}: both settings.json and summary.json are missing or damaged",
            "restore one of them from a copy, or run again with another folder for -o",
        )
    if settings is not None:
        refuse_other_version(path / "settings.json", settings)
    else:
        refuse_other_version(path / "summary.json", document)
    records = list(intact_records(path / "points.jsonl", Point, notes))
    is_comparison = "compare-tp" in schema or any(p.target_tp is not None for p in records)
    summary = _intact(document, notes)
    if not (points := _latest(summary.points or records)):
        raise _nothing_measured(path, settings, notes)
    recipe = _document(path / "recipe.yaml", notes, _yaml_of)
    return ReportedRun(
        path=path,
        is_comparison=is_comparison,
        points=points,
        labels=_labels(points),
        summary=summary,
        is_partial=not document,
        recipe=recipe or summary.recipe,
        recipe_text=_read(path / "recipe.yaml", []) or "",
        environment=_document(path / "environment.json", notes) or {},
        has_samples=bool(list(intact_records(path / "samples.jsonl", Sample, notes))),
        notes=tuple(notes),
    )


def _intact(found: dict[str, Any], notes: list[str]) -> Summary:
    """Make a summary from the contents of summary.json. Delete damaged entries and fields from
    `found` until the rest is valid, and add a note for each."""
    while True:
        try:
            return Summary.model_validate(found)
        except ValidationError as problem:
            errors = problem.errors(include_url=False)
        for key in {str(error["loc"][0]) for error in errors}:
            own = [error for error in errors if error["loc"][0] == key]
            entries = {at: e for e in own for at in e["loc"][1:2] if isinstance(at, int)}
            for place, error in sorted(entries.items(), reverse=True):
                told = described(error | {"loc": error["loc"][2:]})
                notes.append(
                    f"summary.json, {key[:-1]} {place + 1} is not a record ({told}): left out"
                )
                del found[key][place]
            if not entries:
                notes.append(f"summary.json, {key} is damaged: left out")
                del found[key]


def _nothing_measured(
    path: Path, settings: Mapping[str, Any] | None, notes: Sequence[str]
) -> UsageError:
    """Make the error for a run without a point. notes: a line about each damaged record or file."""
    told = notes[0] if notes else "no point of this run is finished yet"
    is_sweep = settings is not None and "ks" in (settings.get("settings") or ())
    has_samples = next(intact_records(path / "samples.jsonl", Record, []), None) is not None
    hint = f"go on with --resume -o {path}"
    if is_sweep and has_samples:
        hint = f"`specdec merge {path} -o NEW` computes points from its samples; or {hint}"
    return UsageError(f"{path} has no measured point: {told}", hint)


def _latest(records: list[Point]) -> tuple[Point, ...]:
    """Return the last record of each point, sorted by setting, with its speed-up. A point may have
    several records, because a resumed run retries failed points."""

    def place(p: Point) -> tuple[Any, ...]:
        rate, size = p.level
        return (rate, p.draft or "", p.target_tp or 0, size, p.draft_tp or 0, p.k)

    last = {place(point): point for point in records}
    found = [last[at] for at in sorted(last)]
    return tuple(_with_speedup(point, found) for point in found)


def _with_speedup(point: Point, points: Sequence[Point]) -> Point:
    """Return the point with its speed-up.

    If the run ended before it recorded the speed-up, the ratio of the decoding speeds is used, or
    None without a baseline. Points under load and points without metrics are returned unchanged.
    """
    is_known = point.speedup is not None or point.impossible_speedup is not None
    if is_known or point.load is not None or point.metrics is None:
        return point
    base = baseline_of(points, point)
    plain = base.number("decode_tokens_per_second") if base is not None else None
    found = point.metrics.decode_tokens_per_second / plain if plain else None
    most = point.metrics.tokens_per_round
    if found is not None and most is not None and is_impossible(found, most):
        return point.model_copy(update={"impossible_speedup": found})
    return point.model_copy(update={"speedup": 1.0 if point.is_baseline else found})


def baseline_of(points: Sequence[Point], point: Point) -> Point | None:
    """Find the baseline of a point: plain decoding with the same target TP, at the same batch size
    or request rate. One recorded with the same draft is preferred. Return None if there is none."""
    place = (point.level, point.target_tp)
    same = [p for p in points if p.is_ok and p.is_baseline and (p.level, p.target_tp) == place]
    return next(iter([p for p in same if p.draft == point.draft] or same), None)


def _labels(points: Sequence[Point]) -> dict[str | None, str]:
    """Choose a short name for each draft: the last part of its path if that is unique, otherwise
    the whole path. Only the end of a long name is kept, but enough of it to be unique."""
    names = sorted({p.draft for p in points if p.draft is not None})
    labels: dict[str | None, str] = {None: "no draft"}
    for name in names:
        short = name.rstrip("/").rpartition("/")[2] or name
        text = short if len(_ending(short, names)) == 1 else name
        kept = _LABEL_LENGTH - 1
        while kept < len(text) and len(_ending(text[-kept:], names)) > 1:
            kept += 1
        labels[name] = text if len(text) <= kept + 1 else f"…{text[-kept:]}"
    return labels


def _ending(end: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if name.rstrip("/").endswith(end.rstrip("/"))]


def _read(path: Path, notes: list[str]) -> str | None:
    try:
        if not path.exists():
            return None
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
        return None


def _document(
    path: Path, notes: list[str], load: Callable[[str], Any] = json_of
) -> dict[str, Any] | None:
    if (text := _read(path, notes)) is None:
        return None
    found = load(text)
    if not isinstance(found, dict):
        notes.append(f"{path.name} is damaged and was left out")
        return None
    return found


def intact_records(path: Path, kind: type[R], notes: list[str]) -> Iterator[R]:
    """Yield the intact records of a .jsonl file. Add a note for every other line, such as a last
    line that a crash left incomplete."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return
    except OSError as error:
        notes.append(f"{path.name} cannot be read: {error.strerror}")
        return
    for number, line in enumerate(lines[:-1], start=1):
        record = parsed(line, kind) if line.strip() else None
        if isinstance(record, str):
            told = f" ({record})" if record else ""
            notes.append(f"{path.name}, line {number} is not a record{told}: left out")
        elif record is not None:
            yield record
    if lines[-1].strip():
        notes.append(
            f"{path.name}, line {len(lines)} is incomplete, probably after a crash: left out"
        )


def _yaml_of(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return None
