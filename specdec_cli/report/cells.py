"""Defines the columns of human-readable tables, such as tokens per second at each point of a run.

The heading, unit and value of a column are defined once, for both terminals and reports. CSV files
are for programs, so `export` uses field names as their headings instead.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_cli.core.figures import STAGES
from specdec_cli.experiment.folders.records import (
    CategoryMetrics,
    Point,
    blocks_in_words,
    rate_name,
)
from specdec_cli.experiment.statistics.stats import FEWEST, proposing_rate
from specdec_cli.report.folder import ReportedRun

Value = str | float | int | None
PERCENTILES = ("p50", "p90", "p99")


Figures = Point | CategoryMetrics


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure that a table shows in a column. Each row is about one object, such as a point.

    title: the heading of the column in a report.
    unit: the unit of the column in a report; "" for none.
    of: takes the object that a row is about, and returns its figure.
    digits: digits after the decimal point in a report; None for text and whole numbers.
    heading: the heading on a terminal, which includes the unit; "" for the same as `title`.
    places: digits after the decimal point on a terminal.
    interval: takes the object that a row is about, and returns the 95 % interval of its figure, or
        None if that is unknown. `interval` itself is None if the figure never has an interval.
    """

    title: str
    of: Callable[[Any], Value]
    unit: str = ""
    digits: int | None = None
    heading: str = ""
    places: int = 2
    interval: Callable[[Any], Sequence[float] | None] | None = None

    def text(self, row: Any) -> str:
        """Format the figure and its interval for a terminal; "" if the row has no such figure."""
        value = self.of(row)
        if value is None or isinstance(value, str) or self.digits is None:
            return "" if value is None else str(value)
        sign = "%" if self.unit.startswith("%") else ""
        ends = self.interval(row) if self.interval is not None else None
        return f"{value:.{self.places}f}{sign}{span_after(ends)}"


def span_after(ends: Sequence[float] | None) -> str:
    """Format an interval as a suffix of a value, such as ` (1.20–1.31)`; "" if there is no interval
    or it has no width."""
    return "" if ends is None or ends[0] == ends[1] else f" ({ends[0]:.2f}–{ends[1]:.2f})"


def number(name: str, part: str | None = None) -> Callable[[Figures], float | None]:
    """Return a function that reads the figure with this name from a point or category.

    part: the percentile to read, such as `p50`, or `mean`; None for a figure without percentiles.
    """
    return lambda found: found.number(name, part)


def speedup(found: Figures) -> Value:
    return "impossible" if found.impossible_speedup is not None else found.speedup


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def span(ends: Sequence[float] | None) -> str | None:
    return None if ends is None else f"{ends[0]:.2f} – {ends[1]:.2f}"


def span_of(found: Figures, ends: Sequence[float] | None) -> str | None:
    """Format an interval. Return "too few prompts" if it is None for that reason, and None if it is
    None for another reason."""
    if ends is None and found.is_ok and (found.number("num_prompts") or FEWEST) < FEWEST:
        return "too few prompts"
    return span(ends)


def first_token_part(name: str, point: Point) -> float | None:
    """Return one part of the mean time to the first token, in ms; None if it was not recorded.
    name: a key of `TTFT_PARTS`."""
    return (point.metrics.ttft_parts_ms or {}).get(name) if point.metrics is not None else None


TARGET_TP = Cell("target TP", lambda p: p.target_tp)
DRAFT_TP = Cell("draft TP", lambda p: None if p.is_baseline else p.draft_tp)
BATCH = Cell("batch", lambda p: p.batch_size or None)
RATE = Cell("requests/s", lambda p: None if p.request_rate is None else rate_name(p.request_rate))
K = Cell("k", lambda p: p.k)
PROMPTS = Cell("prompts", number("num_prompts"))
SPEEDUP = Cell(*("speed-up", speedup, "×", 2, "x k = 0"), interval=lambda p: p.speedup_ci)
SPEED = Cell("decoding", number("decode_tokens_per_second"), "tokens/s", 1, "tokens/s", 1)
LENGTH = Cell(
    *("tokens a round", number("mean_acceptance_length"), "", 2),
    interval=lambda p: p.mean_acceptance_length_ci,
)
PROPOSING = Cell(
    *("proposing", lambda p: p.metrics and percent(proposing_rate(p.metrics)), "% of rounds", 0),
    places=0,
)
OVERALL = Cell("tokens a round, all rounds", number("tokens_per_round"), "", 2, "all rounds")
ACCEPTED = Cell(
    *("accepted", lambda p: percent(p.number("draft_acceptance_rate")), "%", 1), places=0
)
EQUAL = Cell("against equal TP", number("speedup_vs_equal_tp"), "×", 2, "x equal TP")
BLOCKS = Cell("blocks", lambda p: blocks_in_words(p.blocks_per_rank) or None)
PREDICTED = Cell("predicted", lambda p: p.predicted_speedup or None, "×", 3)
LOAD = [
    Cell("offered", lambda p: p.load.offered_rate, "/s", 2, "offered/s"),
    Cell("answered", lambda p: p.load.achieved_rate, "/s", 2, "answered/s"),
    Cell("under way", lambda p: p.load.max_in_flight),
    Cell(*("good", lambda p: percent(p.load.slo_attainment), "%", 1), places=0),
    Cell(
        *("goodput", lambda p: p.load.goodput, "/s", 2, "goodput/s"),
        interval=lambda p: p.load.goodput_ci,
    ),
    *(
        Cell(f"{title} {p}", number(name, p), "ms", 1, f"{title} {p} ms", 0)
        for title, name in (("first token", "ttft_ms"), ("whole", "e2el_ms"))
        for p in ("p50", "p99")
    ),
    SPEEDUP,
    Cell("state", lambda p: "overloaded" if p.load.overloaded else None),
]
TIMES = {
    part: Cell(part, number(f"{part}_ms"), "ms", 3, f"{part} ms") for part in (*STAGES, "round")
}
PREFILL = Cell("prefill", number("prefill_ms"), "ms", 2)
EXPERTS = Cell("experts", number("distinct_experts"), "a layer", 1)
LATENCIES = [
    Cell(f"{title} {p}", number(name, p), "ms", digits)
    for title, name, digits in (("first token", "ttft_ms", 1), ("per token", "tpot_ms", 2))
    for p in PERCENTILES
]


def columns_of(cells: Sequence[Cell], rows: Sequence[Any]) -> dict[str, list[str]]:
    """Return the columns of a terminal table: each heading with a list of one text per row."""
    return {c.heading or c.title: [c.text(row) for row in rows] for c in cells}


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. digits: the number of digits after the decimal point; None for text and
    whole numbers."""

    title: str
    digits: int | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a report.

    name: the name of its file, without the extension.
    note: the text below the title.
    strong: the indexes of the rows to emphasise.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    note: str = ""
    strong: frozenset[int] = frozenset()

    @property
    def titles(self) -> list[str]:
        """The columns' titles with their units."""
        return [f"{c.title} ({c.unit})" if c.unit else c.title for c in self.columns]

    def shown(self, row: Sequence[Value]) -> list[str]:
        """Return the cells of a row as text."""
        return [cell(value, column) for value, column in zip(row, self.columns, strict=True)]


def is_text(table: Table, column: int) -> bool:
    """Return True if a column contains words, and so should be left-aligned."""
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
    """Make a table with a row for each item. A figure with an interval takes two columns.

    texts: the table's name, title and note.
    strong: the indexes of the rows to emphasise.
    """
    columns: list[Column] = []
    values: list[Callable[[Any], Value]] = []
    for one in cells:
        columns.append(Column(one.title, one.digits, one.unit))
        values.append(one.of)
        if (interval := one.interval) is not None:
            columns.append(Column("95 % interval"))
            values.append(lambda item, of=interval: span_of(item, of(item)))  # type: ignore[misc]
    rows = tuple(tuple(value(item) for value in values) for item in items)
    name, title, note = texts
    return Table(name, title, tuple(columns), rows, note, strong)


def by_point(
    texts: tuple[str, str, str],
    run: ReportedRun,
    points: Iterable[Point],
    cells: Sequence[Cell],
    strong: frozenset[int] = frozenset(),
) -> Table:
    """Make a table with a row for each point. Columns that identify the point precede `cells`."""
    draft = Cell("draft", lambda p: run.labels[p.draft])
    setting = (TARGET_TP, DRAFT_TP) if run.is_comparison else (draft,)
    rate = (RATE,) if any(p.request_rate is not None for p in run.points) else ()
    return table_of(texts, points, (*rate, *setting, BATCH, K, *cells), strong)


def rows_of(environment: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten the environment into dotted keys and values."""
    found: list[tuple[str, str]] = []
    for key, value in environment.items():
        if isinstance(value, Mapping):
            found += rows_of(value, f"{prefix}{key}.")
        else:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            found.append((f"{prefix}{key}", shown))
    return found
