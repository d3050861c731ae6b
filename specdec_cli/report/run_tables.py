"""Makes the tables of a report that compares several runs."""

from specdec_cli.core.figures import EngineFacts
from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.cells import Cell, Column, Table, span, table_of
from specdec_cli.report.runs import Compared, SideBySide, length_in_text, mean_time

_BY_TIME = (
    " At a request rate, each run's recommended point counts, overloaded points are left out, and "
    "ratios are the inverse ratios of the mean times of the same requests (request ms)."
)


def run_tables(whole: SideBySide) -> list[Table]:
    """Make the tables that have rows."""
    columns = (Column("key"), *(Column(name) for name in whole.runs))
    rows = tuple((key, *values) for key, values in whole.differences.items())
    title = "Differences in recipe and environment"
    differences = Table("differences", title, columns, rows)
    found = (_side_by_side(whole), _engines(whole), _pairs(whole), differences)
    return [table for table in found if table.rows]


def _level(point: Point) -> str | int:
    return point.batch_size if point.request_rate is None else point.level_in_words


def _engine(engine: EngineFacts | None) -> str:
    return f"{engine.kind} {engine.version or ''}".strip() if engine else "specdec"


# Each row of these tables is a `Compared`.
_RUN = Cell("run", lambda r: r.one.run)
_POINT = Cell("point", lambda r: r.one.setting)
_BATCH = Cell("batch", lambda r: _level(r.one.point))
_PROMPTS = Cell("prompts", lambda r: len(r.one.samples))
_SPEED = Cell("decoding", lambda r: r.one.point.speed, "tokens/s", 1)
_ENDS = Cell("95 % interval", lambda r: r.ratio and r.ratio.ends_in_words)
_TEXT = Cell("text", lambda r: r.ratio and r.ratio.texts_in_words)


def _ratio(title: str) -> Cell:
    return Cell(title, lambda r: r.ratio and r.ratio.speed_ratio, "×", 2)


def _side_by_side(whole: SideBySide) -> Table:
    rows = [Compared(one, one, whole.against_first(one)) for one in whole.shown]
    first = f"over {whole.names[0]}"
    cells = [
        *(_RUN, _POINT, _BATCH, _PROMPTS, _SPEED),
        *[Cell("request", lambda r: mean_time(r.one.point), "ms", 1)][: whole.has_rates],
        Cell("speed-up", lambda r: r.one.point.speedup, "×", 2),
        Cell("95 % interval", lambda r: span(r.one.point.speedup_ci)),
        Cell("tokens a round", lambda r: r.one.point.number("mean_acceptance_length"), "", 2),
        *(_ratio(first), _ENDS, _TEXT),
    ]
    note = (
        "Plain decoding, and each arm at its fastest point. Speed-up is over the run's own plain "
        f"decoding; the ratio {first} is over the same prompts, paired. Runs were "
        "measured at different times: intervals are over prompts, and do not cover differences in "
        f"the machine's speed between runs.{_BY_TIME if whole.has_rates else ''}"
    )
    strong = frozenset(i for i, one in enumerate(whole.shown) if one.is_best)
    return table_of(("runs", "Side by side", note), rows, cells, strong)


def _engines(whole: SideBySide) -> Table:
    cells = [
        _RUN,
        Cell("engine", lambda r: _engine(r.one.point.engine)),
        _BATCH,
        Cell("k", lambda r: r.one.point.k),
        _PROMPTS,
        Cell("tokens a round", lambda r: length_in_text(r.one), "", 2),
        _SPEED,
        Cell("95 % interval", lambda r: span(r.one.point.decode_tokens_per_second_ci)),
        Cell("round", lambda r: r.one.point.number("round_ms"), "ms", 2),
        Cell("95 % interval", lambda r: span(r.one.point.round_ms_ci)),
        *(_ratio("over the first"), _ENDS, _TEXT),
    ]
    note = (
        "The same k and batch size on several engines, over common prompts. Tokens a round count "
        "only tokens within the texts. The client measures the times of servers."
    )
    return table_of(("engines", "Engines", note), whole.by_engine, cells)


def _pairs(whole: SideBySide) -> Table:
    rows = [row for row in whole.pairs if row.ratio is not None]
    cells = [
        *(_RUN, _POINT),
        Cell("against", lambda r: r.other.run),
        Cell("its point", lambda r: r.other.setting),
        _BATCH,
        Cell("prompts", lambda r: r.ratio.num_prompts),
        _ratio("ratio of speeds"),
        Cell("95 % interval", lambda r: span(r.ratio.speed_ratio_ci)),
        Cell("verdict", lambda r: r.ratio.verdict),
    ]
    note = "Each run at its fastest point, the faster one first; speeds over common prompts."
    note += _BY_TIME if whole.has_rates else ""
    return table_of(("pairs", "Best against best", note), rows, cells)
