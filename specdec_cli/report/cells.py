"""Tables of a report as values, and how a table of points is made of cells."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from specdec_cli.experiment.folders.records import Point
from specdec_cli.experiment.statistics.stats import FEWEST
from specdec_cli.report.folder import ReportedRun

Value = str | float | int | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column. digits: after the decimal point; None for text and whole numbers."""

    title: str
    digits: int | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table. name: of its file. note: below the title. strong: rows to mark."""

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""
    strong: frozenset[int] = frozenset()

    def shown(self, row: Sequence[Value]) -> list[str]:
        """A row's cells as text."""
        return [cell(value, column) for value, column in zip(row, self.columns, strict=True)]


def is_text(table: Table, column: int) -> bool:
    """Whether a column holds words, which are left-aligned."""
    return any(
        isinstance(row[column], str) and not table.columns[column].title.endswith("interval")
        for row in table.rows
    )


def cell(value: Value, column: Column) -> str:
    if value is None:
        return "–"
    if isinstance(value, float) and column.digits is not None:
        return f"{value:.{column.digits}f}"
    return str(value)


Cell = tuple[Column, Callable[[Point], Value]]  # a column, and its value for a point


def by_point(
    texts: tuple[str, str, str], run: ReportedRun, points: Iterable[Point], cells: Iterable[Cell]
) -> Table:
    """A table with a row for each point, after the columns that name it.

    texts: the table's name, title and note.
    """
    setting: list[Cell]
    if run.is_comparison:
        setting = [
            (Column("target TP"), lambda p: p.target_tp),
            (Column("draft TP"), lambda p: None if p.is_baseline else p.draft_tp),
        ]
    else:
        setting = [(Column("draft"), lambda p: run.labels[p.draft])]
    setting += [(Column("batch"), lambda p: p.batch_size), (Column("k"), lambda p: p.k)]
    columns, values = zip(*setting, *cells, strict=True)
    rows = tuple(tuple(value(point) for value in values) for point in points)
    name, title, note = texts
    return Table(name, title, columns, rows, note)


def figure(title: str, digits: int, unit: str, name: str, part: str | None = None) -> Cell:
    return Column(title, digits, unit), lambda p: p.number(name, part)


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def span_of(point: Point, interval: Sequence[float] | None) -> str | None:
    if interval is None and point.is_ok and (point.number("num_prompts") or FEWEST) < FEWEST:
        return "too few prompts"
    return span(interval)


def span(interval: Sequence[float] | None) -> str | None:
    return None if interval is None else f"{interval[0]:.2f} – {interval[1]:.2f}"


def is_ok(point: Point) -> bool:
    return point.is_ok
