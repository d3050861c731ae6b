"""Tables of a report as values, and how a table of points is made of cells."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.folder import ReportedRun
from specdec_cli.report.point_cells import BATCH, DRAFT_TP, TARGET_TP, Cell, K, Value, span_of


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


def table_of(
    texts: tuple[str, str, str],
    items: Iterable[Any],
    cells: Sequence[Cell],
    strong: frozenset[int] = frozenset(),
) -> Table:
    """A table with a row for each item. A figure with an interval takes two columns.

    texts: the table's name, title and note.
    """
    columns: list[Column] = []
    values: list[Callable[[Any], Value]] = []
    for one in cells:
        columns.append(Column(one.title, one.digits, one.unit))
        values.append(one.of)
        if (interval := one.interval) is not None:
            columns.append(Column("95 % interval"))
            values.append(partial(_span, interval))
    rows = tuple(tuple(value(item) for value in values) for item in items)
    name, title, note = texts
    return Table(name, title, tuple(columns), rows, note, strong)


def _span(of: Callable[[Any], Sequence[float] | None], item: Any) -> str | None:
    return span_of(item, of(item))


def by_point(
    texts: tuple[str, str, str],
    run: ReportedRun,
    points: Iterable[Point],
    cells: Sequence[Cell],
    strong: frozenset[int] = frozenset(),
) -> Table:
    """A table with a row for each point, after the cells that name it."""
    draft = Cell("draft", lambda p: run.labels[p.draft])
    setting = (TARGET_TP, DRAFT_TP) if run.is_comparison else (draft,)
    return table_of(texts, points, (*setting, BATCH, K, *cells), strong)
