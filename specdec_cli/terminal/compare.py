"""A comparison on the terminal: progress as lines or a live table, then the results.

Computes only running means; `comparison_records` and `verdict` compute the results.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic

from rich.console import Group
from rich.table import Table
from rich.text import Text

from specdec_cli.core.figures import stages_in
from specdec_cli.experiment.compare.comparison_records import ComparisonRecords
from specdec_cli.experiment.compare.verdict import summary_lines
from specdec_cli.experiment.folders.records import (
    Pair,
    PairFacts,
    Point,
    R,
    Sample,
    parsed,
)
from specdec_cli.experiment.measure import Watcher
from specdec_cli.experiment.points import Failure
from specdec_cli.experiment.statistics.promise import tokens_line
from specdec_cli.report import point_cells as cell
from specdec_cli.report.point_cells import Cell
from specdec_cli.terminal import render

_SETTING = ("target TP", "draft TP", "batch")
_SPEEDS = (cell.SPEED, cell.SPEEDUP, cell.EQUAL, replace(cell.LENGTH, interval=None))


class ComparisonLines(Watcher):
    """Prints failed points on stderr; rank 0 prints the others itself."""

    def failed(self, pair: Pair, batch_size: int, failure: Failure) -> None:
        render.say(f"{pair}, batch size {batch_size}: {failure.status}: {failure.reason}")


class ComparisonTable(Watcher):
    """A live table and a progress bar on a terminal, from the records in the run folder."""

    def __init__(self, folder: Path, records: ComparisonRecords, total: int) -> None:
        self._settings = records.settings
        self._rows: dict[tuple[Pair, int], dict[int, render.Sums]] = {}
        self._failures: dict[tuple[Pair, int], Failure] = {}
        self._samples = _Tail(folder / "samples.jsonl", Sample)
        self._loaded = _Tail(folder / "pairs.jsonl", PairFacts)
        self._done: set[tuple[Pair, int, int, int]] = set()
        self._pair: Pair | None = None
        self._progress = render.progress_bar()
        self._task = self._progress.add_task("getting ready", total=total)
        self._live = render.live_view(self._render, 4)

    def begin(self, pair: Pair) -> None:
        self._pair = pair
        self._progress.update(self._task, description=f"{pair}: starting and loading")
        self._live.start()

    def failed(self, pair: Pair, batch_size: int, failure: Failure) -> None:
        self._rows.setdefault((pair, batch_size), {})
        self._failures[pair, batch_size] = failure

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> Group:
        for fact in self._loaded.read():
            if (pair := Pair.of(fact)) == self._pair:
                self._progress.update(self._task, description=f"{pair}: measuring")
        for sample in self._samples.read():
            self._add(sample)
        self._progress.update(self._task, completed=len(self._done))
        table = render.plain_table(*_SETTING, "prompts", "tokens/s", "x k = 0")
        for (pair, batch_size), by_k in list(self._rows.items()):  # a copy: another thread draws
            cells = [str(pair.target_tp), str(pair.draft_tp), str(batch_size)]
            if (failure := self._failures.get((pair, batch_size))) is not None:
                table.add_row(*cells, "", failure.status, "")
                continue
            own, plain = (by_k.get(k, render.Sums()) for k in (self._settings.k, 0))
            gain = f"{own.speed / plain.speed:.2f}" if plain.speed and own.speed else ""
            table.add_row(*cells, str(own.prompts), f"{own.speed:.1f}" if own.speed else "", gain)
        return Group(table, self._progress)

    def _add(self, sample: Sample) -> None:
        pair, batch_size, k = Pair.of(sample), sample.batch_size, sample.k
        place = (pair, batch_size, k, sample.index)
        if place in self._done:
            return
        self._done.add(place)
        self._rows.setdefault((pair, batch_size), {}).setdefault(k, render.Sums()).add(sample)


class _Tail(Generic[R]):
    """Reads the records that were added to a .jsonl file since the last call."""

    def __init__(self, path: Path, kind: type[R]) -> None:
        self._path = path
        self._kind = kind
        self._offset = 0

    def read(self) -> list[R]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole = file.read().rpartition(b"\n")[0]
        except OSError:
            return []
        if whole:
            self._offset += len(whole) + 1
        found = (parsed(line, self._kind) for line in whole.split(b"\n"))
        return [record for record in found if not isinstance(record, str)]


def watcher(folder: Path, records: ComparisonRecords, total: int, *, quiet: bool) -> Watcher:
    """The progress display for this stderr."""
    if quiet:
        return Watcher()
    return ComparisonTable(folder, records, total) if sys.stderr.isatty() else ComparisonLines()


def point_line(point: Point) -> str:
    """A point in one line for logs."""
    of = f"draft TP {point.draft_tp}" if point.k else "k = 0"
    name = f"target TP {point.target_tp}, {of}, batch size {point.batch_size}"
    metrics = point.metrics
    if metrics is None:
        return f"{name}: {point.status}: {point.reason or ''}"
    line = f"{name}: {metrics.decode_tokens_per_second:.1f} tokens/s"
    if point.k and point.speedup is not None:
        line += f", {point.speedup:.2f}x k = 0"
    stages = ", ".join(f"{stage} {metrics.stage_ms(stage):.2f}" for stage in stages_in([metrics]))
    return f"{line}, round {metrics.round_ms:.2f} ms ({stages})"


def print_results(document: Mapping[str, Any]) -> None:
    """Print the tables of points and the conclusions on stdout."""
    out = render.console_of_results()
    points: list[Point] = document["points"]
    for table in results_tables(points, out.width):
        out.width = max(out.width, render.table_width(table).maximum)
        out.print(table, soft_wrap=False)
        out.print()
    if lines := _without_results(points):
        for line in lines:
            render.say(line, out)
        out.print()
    for told in (*summary_lines(dict(document)), tokens_line(document["tokens"])):
        if told is not None:
            render.say(told, out)


def results_tables(points: Sequence[Point], width: int) -> list[Table]:
    """Tables with a row for each point, k = 0 of each target TP first.

    The times of rounds get a table of their own if one table would be wider than `width`.
    """
    shown = [point for point in points if point.status != "skipped"]
    timed = [point for point in shown if point.metrics is not None]
    times = [cell.TIMES[part] for part in (*stages_in(p.metrics for p in timed), "round")]
    whole = _table(shown, (*_SPEEDS, *times, cell.BLOCKS))
    if render.table_width(whole).maximum <= width:
        return [whole]
    speeds = _table(shown, (*_SPEEDS, cell.BLOCKS), is_narrow=True)
    return [speeds, *([_table(timed, times, is_narrow=True)] if timed else [])]


def _table(points: Sequence[Point], cells: Sequence[Cell], *, is_narrow: bool = False) -> Table:
    columns = cell.columns_of((cell.TARGET_TP, cell.DRAFT_TP, cell.BATCH, *cells), points)
    for place, point in enumerate(points):
        if not point.k:
            columns["draft TP"][place] = "none"
        if point.metrics is None and "tokens/s" in columns:
            columns["tokens/s"][place] = point.status
        if is_narrow and "blocks" in columns and len(set(point.blocks_per_rank or ())) > 1:
            columns["blocks"][place] = columns["blocks"][place].replace(" ", "\n")
    said = [
        "\n".join(heading.split(" ", 1)) if is_narrow and "=" not in heading else heading
        for heading in columns
    ]
    table = render.plain_table(*said, no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    return table


def _without_results(points: Sequence[Point]) -> list[str]:
    """Lines for points without results, since reasons do not fit into a column."""
    skipped = (f"{_pair_of(p)}: skipped: {p.reason}" for p in points if p.status == "skipped")
    failed = (point_line(p) for p in points if p.status in ("failed", "oom"))
    return [*dict.fromkeys(skipped), *failed]


def _pair_of(point: Point) -> str:
    of = f", draft TP {point.draft_tp}" if point.draft_tp is not None else " alone"
    return f"target TP {point.target_tp}{of}"
