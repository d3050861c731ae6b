"""Shows the results of a comparison on the terminal."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table
from rich.text import Text

from specdec_cli.core.figures import stages_in
from specdec_cli.experiment.compare.verdict import summary_lines
from specdec_cli.experiment.folders.records import Point
from specdec_cli.experiment.statistics.promise import tokens_line
from specdec_cli.report import cells as cell
from specdec_cli.report.cells import Cell
from specdec_cli.terminal import render
from specdec_cli.terminal.watching import point_line
from specdec_cli.text import say

_DRAFT_TP = replace(cell.DRAFT_TP, of=lambda p: p.draft_tp if p.k else "none")
_SPEED = replace(cell.SPEED, of=lambda p: cell.SPEED.of(p) if p.metrics else p.status)
_SPEEDS = (_SPEED, cell.SPEEDUP, cell.EQUAL, replace(cell.LENGTH, interval=None))


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
            say(line, sys.stdout)
        out.print()
    for told in (*summary_lines(dict(document)), tokens_line(document["tokens"])):
        if told is not None:
            say(told, sys.stdout)


def results_tables(points: Sequence[Point], width: int) -> list[Table]:
    """Make tables with a row for each point; k = 0 comes first at each target TP. Round times get
    their own table if one table would be wider than `width`. Return an empty list if nothing ran.
    """
    shown = [point for point in points if point.status != "skipped"]
    if not shown:
        return []
    timed = [point for point in shown if point.metrics is not None]
    times = [cell.TIMES[part] for part in (*stages_in(p.metrics for p in timed), "round")]
    whole = _table(shown, (*_SPEEDS, *times, cell.BLOCKS))
    if render.table_width(whole).maximum <= width:
        return [whole]
    speeds = _table(shown, (*_SPEEDS, cell.BLOCKS), is_narrow=True)
    return [speeds, *([_table(timed, times, is_narrow=True)] if timed else [])]


def _table(points: Sequence[Point], cells: Sequence[Cell], *, is_narrow: bool = False) -> Table:
    columns = cell.columns_of((cell.TARGET_TP, _DRAFT_TP, cell.BATCH, *cells), points)
    for place, point in enumerate(points):
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
    """Return a line for each point without a result. The line gives the reason, which does not fit
    into a column."""
    skipped = (f"{_pair_of(p)}: skipped: {p.reason}" for p in points if p.status == "skipped")
    failed = (point_line(p) for p in points if p.status in ("failed", "oom"))
    return [*dict.fromkeys(skipped), *failed]


def _pair_of(point: Point) -> str:
    of = f", draft TP {point.draft_tp}" if point.draft_tp is not None else " alone"
    return f"target TP {point.target_tp}{of}"
