"""The tables of a report as values, for HTML, markdown and CSV alike."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from specdec_cli.core.stages import STAGES
from specdec_cli.experiment.records import Key, Point
from specdec_cli.experiment.stats import proposing_rate
from specdec_cli.report.findings import Best, residual
from specdec_cli.report.folder import ReportedRun

_PERCENTILES = ("p50", "p90", "p99")

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


def cell(value: Value, column: Column) -> str:
    if value is None:
        return "–"
    if isinstance(value, float) and column.digits is not None:
        return f"{value:.{column.digits}f}"
    return str(value)


def setting_columns(run: ReportedRun) -> tuple[Column, ...]:
    """The columns that name a row's point."""
    if run.is_comparison:
        return (Column("target TP"), Column("draft TP"), Column("batch"), Column("k"))
    return (Column("draft"), Column("batch"), Column("k"))


def setting_cells(run: ReportedRun, point: Point) -> tuple[Value, ...]:
    """A point's cells under `setting_columns`."""
    if run.is_comparison:
        draft_tp = None if point.is_baseline else point.draft_tp
        return (point.target_tp, draft_tp, point.batch_size, point.k)
    return (run.labels[point.draft], point.batch_size, point.k)


def results(run: ReportedRun, bests: Sequence[Best]) -> Table:
    """Speed and acceptance of every point, including failed ones."""
    columns = (
        *setting_columns(run),
        Column("speed-up", 2, "×"),
        Column("95 % interval"),
        Column("decoding", 1, "tokens/s"),
        Column("tokens a round", 2),
        Column("95 % interval"),
        Column("proposing", 0, "% of rounds"),
        Column("accepted", 1, "%"),
        Column("status"),
    )
    if run.is_comparison:
        extra = (Column("against equal TP", 2, "×"), Column("blocks"))
        columns = (*columns[:-1], *extra, columns[-1])
    rows = []
    for point in run.points:
        rate = point.number("draft_acceptance_rate")
        row: list[Value] = [
            *setting_cells(run, point),
            point.speedup,
            _span(point.speedup_ci),
            point.number("decode_tokens_per_second"),
            point.number("mean_acceptance_length"),
            _span(point.mean_acceptance_length_ci),
            _proposing(point),
            None if rate is None else 100 * rate,
        ]
        if run.is_comparison:
            row += [point.speedup_vs_equal_tp, point.num_blocks]
        status = point.status if point.is_ok else f"{point.status}: {point.reason}"
        rows.append((*row, status))
    best = {id(b.point) for b in bests if b.point is not None}
    strong = frozenset(i for i, p in enumerate(run.points) if id(p) in best)
    note = "Speed-up is against plain decoding (k = 0) of the same prompts at the same batch size."
    return _without_empty(
        "proposing", Table("results", "Every point", columns, tuple(rows), note, strong)
    )


def _proposing(point: Point) -> float | None:
    drafts, without = (point.number(name) for name in ("num_drafts", "num_rounds_without_proposal"))
    rate = proposing_rate(int(drafts or 0), int(without or 0))
    return None if rate is None else 100 * rate


def _without_empty(title: str, table: Table) -> Table:
    """The table without the column of this title if it is empty."""
    place = [column.title for column in table.columns].index(title)
    if any(row[place] is not None for row in table.rows):
        return table
    return replace(
        table,
        columns=table.columns[:place] + table.columns[place + 1 :],
        rows=tuple(row[:place] + row[place + 1 :] for row in table.rows),
    )


def _span(interval: Sequence[float] | None) -> str | None:
    return None if interval is None else f"{interval[0]:.2f} – {interval[1]:.2f}"


def times_of_a_round(run: ReportedRun) -> Table:
    """The time of a round by stage."""
    columns = (
        *setting_columns(run),
        *(Column(stage, 3, "ms") for stage in STAGES),
        Column("round", 3, "ms"),
        Column("prefill", 2, "ms"),
    )
    rows = [
        (
            *setting_cells(run, point),
            *(point.number(f"{stage}_ms") for stage in STAGES),
            point.number("round_ms"),
            point.number("prefill_ms"),
        )
        for point in run.points
        if point.is_ok
    ]
    note = "Means per engine round; prefill is per prompt. What the stages leave is the host's."
    return Table("rounds", "Time of a round", columns, tuple(rows), note)


def latencies(run: ReportedRun) -> Table:
    """Time to the first token and per token after it, over prompts."""
    columns = (
        *setting_columns(run),
        *(Column(f"first token {p}", 1, "ms") for p in _PERCENTILES),
        *(Column(f"per token {p}", 2, "ms") for p in _PERCENTILES),
    )
    rows = [
        (
            *setting_cells(run, point),
            *(point.number("ttft_ms", p) for p in _PERCENTILES),
            *(point.number("tpot_ms", p) for p in _PERCENTILES),
        )
        for point in run.points
        if point.is_ok
    ]
    note = "Percentiles over prompts: to the first token (TTFT), and per token after it (TPOT)."
    return Table("latencies", "Latency", columns, tuple(rows), note)


def predictions(run: ReportedRun) -> Table | None:
    """Predicted speed-up beside the measured one; None without predictions."""
    points = [p for p in run.points if not p.is_baseline and p.predicted_speedup is not None]
    if not points:
        return None
    columns = (
        *setting_columns(run),
        Column("predicted", 3, "×"),
        Column("measured", 3, "×"),
        Column("95 % interval"),
        Column("residual", 1, "%"),
    )
    rows = []
    for point in points:
        miss = residual(run, point)
        rows.append(
            (
                *setting_cells(run, point),
                point.predicted_speedup,
                point.speedup,
                _span(point.speedup_ci),
                None if miss is None else 100 * miss,
            )
        )
    note = (
        f"Predicted from the run at the largest k{_method(points)}; the residual is predicted over "
        "measured, less one."
    )
    return Table("predictions", "Predicted and measured", columns, tuple(rows), note)


def _method(points: Sequence[Point]) -> str:
    """The method of prediction in words, as far as the points record it."""
    are_exact = [p.prediction.is_exact for p in points if p.prediction is not None]
    if not are_exact:
        return ""
    if all(are_exact):
        return " by replaying rounds over the recorded matches, which is exact"
    return (
        " by replaying rounds over the chance of each proposal to stand, given the text: in other "
        "texts it may differ"
    )


def categories(run: ReportedRun, point: Point) -> Table | None:
    """One point by category of prompt, from its record, else from its samples."""
    found: list[tuple[Value, ...]] = []
    for name, row in point.per_category.items():
        rate = row.draft_acceptance_rate
        percent = None if rate is None else 100 * rate
        found.append((name, row.num_prompts, row.mean_acceptance_length, percent, row.speedup))
    note = ""
    if not found:
        counts = run.samples.get(Key.of(point), {})
        found = [
            (name, prompts, 1 + tokens / drafts if drafts else None, None, None)
            for name, (drafts, tokens, prompts) in counts.items()
        ]
        note = "Counted from samples.jsonl."
    if not found:
        return None
    found.sort(key=lambda row: (-float(row[2] or 0), str(row[0])))
    columns = (
        Column("category"),
        Column("prompts"),
        Column("tokens a round", 2),
        Column("accepted", 1, "%"),
        Column("speed-up", 2, "×"),
    )
    kept = [i for i in range(len(columns)) if i < 3 or any(row[i] is not None for row in found)]
    return Table(
        "categories",
        "By category",
        tuple(columns[i] for i in kept),
        tuple(tuple(row[i] for i in kept) for row in found),
        note,
    )


# Tables for other programs, with full names and figures as recorded.


def raw_points(run: ReportedRun) -> Table:
    """One row a point with every figure of it."""
    names = (
        "decode_tokens_per_second",
        "output_tokens_per_second",
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "num_drafts",
        "num_draft_tokens",
        "num_accepted_tokens",
        "num_prompts",
        "num_output_tokens",
        "num_rounds",
        *(f"{stage}_ms" for stage in STAGES),
        "round_ms",
        "prefill_ms",
        "predicted_speedup",
    )
    spreads = [(name, p) for name in ("ttft_ms", "tpot_ms") for p in ("mean", *_PERCENTILES)]
    setting: tuple[str, ...] = ("draft", "k", "batch_size")
    if run.is_comparison:
        setting = ("target_tp", "draft_tp", "batch_size", "k")
        names = (*names, "num_blocks", "speedup_vs_equal_tp")
    titles = (
        *setting,
        "status",
        "reason",
        "speedup",
        "speedup_lo",
        "speedup_hi",
        "mean_acceptance_length_lo",
        "mean_acceptance_length_hi",
        *names,
        *(f"{name.removesuffix('_ms')}_{p}_ms" for name, p in spreads),
    )
    rows = [
        (
            *(getattr(point, name) for name in setting),
            point.status,
            point.reason,
            point.speedup,
            *(point.speedup_ci or (None, None)),
            *(point.mean_acceptance_length_ci or (None, None)),
            *(point.number(name) for name in names),
            *(point.number(name, p) for name, p in spreads),
        )
        for point in run.points
    ]
    return Table("points", "", tuple(map(Column, titles)), tuple(rows))


def raw_acceptance(run: ReportedRun) -> Table:
    """One row a point and position."""
    titles = ("draft", "target_tp", "draft_tp", "k", "batch_size", "position")
    rates = ("acceptance_rate", "conditional_acceptance_rate")
    rows = [
        (
            point.draft,
            point.target_tp,
            point.draft_tp,
            point.k,
            point.batch_size,
            position,
            *pair,
        )
        for point in run.points
        if point.metrics is not None
        for position, pair in enumerate(
            zip(*(getattr(point.metrics, f"{rate}_per_pos") for rate in rates), strict=True),
            start=1,
        )
    ]
    return Table("acceptance", "", tuple(map(Column, (*titles, *rates))), tuple(rows))


def raw_categories(run: ReportedRun) -> Table:
    """One row a point and category."""
    names = ("num_prompts", "mean_acceptance_length", "draft_acceptance_rate", "speedup")
    titles = ("draft", "target_tp", "draft_tp", "k", "batch_size", "category", *names)
    rows = []
    for point in run.points:
        for category, row in point.per_category.items():
            setting = (point.draft, point.target_tp, point.draft_tp, point.k, point.batch_size)
            rows.append((*setting, category, *(getattr(row, name) for name in names)))
    return Table("categories", "", tuple(map(Column, titles)), tuple(rows))
