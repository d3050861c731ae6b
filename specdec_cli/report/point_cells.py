"""The figures of points and categories for people: heading, unit and value of each, once for
terminals and reports. In CSV files they have the names of their fields, see `raw_tables`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_cli.core.figures import STAGES
from specdec_cli.experiment.folders.records import CategoryMetrics, Point, blocks_in_words
from specdec_cli.experiment.statistics.stats import FEWEST, proposing_rate

Value = str | float | int | None
PERCENTILES = ("p50", "p90", "p99")


Figures = Point | CategoryMetrics


@dataclass(frozen=True, slots=True)
class Cell:
    """A figure of what a row is about, such as a point. title, unit: of a report's column. digits:
    after the decimal point; None for text and whole numbers. heading, places: likewise on a
    terminal, where the unit is part of the heading. interval: its 95 % interval, if it has one."""

    title: str
    of: Callable[[Any], Value]
    unit: str = ""
    digits: int | None = None
    heading: str = ""
    places: int = 2
    interval: Callable[[Any], Sequence[float] | None] | None = None

    def text(self, row: Any) -> str:
        """The figure and its interval on a terminal; empty without one."""
        value = self.of(row)
        if value is None or isinstance(value, str) or self.digits is None:
            return "" if value is None else str(value)
        sign = "%" if self.unit.startswith("%") else ""
        ends = self.interval(row) if self.interval is not None else None
        return f"{value:.{self.places}f}{sign}{span_after(ends)}"


def span_after(ends: Sequence[float] | None) -> str:
    """An interval to follow a value: ` (1.20–1.31)`; empty without one or without width."""
    return "" if ends is None or ends[0] == ends[1] else f" ({ends[0]:.2f}–{ends[1]:.2f})"


def number(name: str, part: str | None = None) -> Callable[[Figures], float | None]:
    """A figure by its name."""
    return lambda found: found.number(name, part)


def speedup(found: Figures) -> Value:
    return "impossible" if found.impossible_speedup is not None else found.speedup


def percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def span(ends: Sequence[float] | None) -> str | None:
    return None if ends is None else f"{ends[0]:.2f} – {ends[1]:.2f}"


def span_of(found: Figures, ends: Sequence[float] | None) -> str | None:
    """An interval, or why a figure over few prompts has none."""
    if ends is None and found.is_ok and (found.number("num_prompts") or FEWEST) < FEWEST:
        return "too few prompts"
    return span(ends)


def _proposing(point: Point) -> float | None:
    if (m := point.metrics) is None:
        return None
    return percent(proposing_rate(m.num_drafts, m.num_rounds_without_proposal))


TARGET_TP = Cell("target TP", lambda p: p.target_tp)
DRAFT_TP = Cell("draft TP", lambda p: None if p.is_baseline else p.draft_tp)
BATCH = Cell("batch", lambda p: p.batch_size)
K = Cell("k", lambda p: p.k)
PROMPTS = Cell("prompts", number("num_prompts"))
SPEEDUP = Cell(*("speed-up", speedup, "×", 2, "x k = 0"), interval=lambda p: p.speedup_ci)
SPEED = Cell("decoding", number("decode_tokens_per_second"), "tokens/s", 1, "tokens/s", 1)
LENGTH = Cell(
    *("tokens a round", number("mean_acceptance_length"), "", 2),
    interval=lambda p: p.mean_acceptance_length_ci,
)
PROPOSING = Cell("proposing", _proposing, "% of rounds", 0, places=0)
OVERALL = Cell("tokens a round, all rounds", number("tokens_per_round"), "", 2, "all rounds")
ACCEPTED = Cell(
    *("accepted", lambda p: percent(p.number("draft_acceptance_rate")), "%", 1), places=0
)
EQUAL = Cell("against equal TP", number("speedup_vs_equal_tp"), "×", 2, "x equal TP")
BLOCKS = Cell("blocks", lambda p: blocks_in_words(p.blocks_per_rank) or None)
PREDICTED = Cell("predicted", lambda p: p.predicted_speedup or None, "×", 3)
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
    """The columns of a terminal's table, by heading."""
    return {c.heading or c.title: [c.text(row) for row in rows] for c in cells}
