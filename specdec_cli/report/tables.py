"""The tables of a report as values, for HTML, markdown and CSV alike."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from specdec_cli.core.figures import STAGES
from specdec_cli.experiment.records import (
    Arm,
    CategoryComparison,
    Comparison,
    Key,
    Point,
    blocks_in_words,
)
from specdec_cli.experiment.stats import proposing_rate
from specdec_cli.report.findings import Best, residual, residuals_in_words
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


Cell = tuple[Column, Callable[[Point], Value]]  # a column, and its value for a point


def _by_point(
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


def _figure(title: str, digits: int, unit: str, name: str, part: str | None = None) -> Cell:
    return Column(title, digits, unit), lambda p: p.number(name, part)


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value


def results(run: ReportedRun, bests: Sequence[Best]) -> Table:
    """Speed and acceptance of every point, including failed ones."""
    cells: list[Cell] = [
        _figure("speed-up", 2, "×", "speedup"),
        (Column("95 % interval"), lambda p: _span(p.speedup_ci)),
        _figure("decoding", 1, "tokens/s", "decode_tokens_per_second"),
        _figure("tokens a round", 2, "", "mean_acceptance_length"),
        (Column("95 % interval"), lambda p: _span(p.mean_acceptance_length_ci)),
        (Column("accepted", 1, "%"), lambda p: _percent(p.number("draft_acceptance_rate"))),
    ]
    if any(_proposing(point) is not None for point in run.points):
        cells.insert(-1, (Column("proposing", 0, "% of rounds"), _proposing))
    if run.is_comparison:
        cells.append(_figure("against equal TP", 2, "×", "speedup_vs_equal_tp"))
        cells.append((Column("blocks"), lambda p: blocks_in_words(p.blocks_per_rank) or None))
    cells.append((Column("status"), lambda p: p.status if p.is_ok else f"{p.status}: {p.reason}"))
    note = "Speed-up is against plain decoding (k = 0) of the same prompts at the same batch size."
    shown = [p for p in run.points if not (run.is_comparison and p.status == "skipped")]
    table = _by_point(("results", "Every point", note), run, shown, cells)
    best = {id(b.point) for b in bests if b.point is not None}
    return replace(table, strong=frozenset(i for i, p in enumerate(shown) if id(p) in best))


def pairs_not_run(run: ReportedRun) -> list[str]:
    """One line for the pairs of a comparison that were not run, with reasons."""
    if not run.is_comparison:
        return []
    skipped = [p for p in run.points if p.status == "skipped"]
    names = [f"target TP {p.target_tp} with draft TP {p.draft_tp} ({p.reason})" for p in skipped]
    return [f"Not run: {'; '.join(dict.fromkeys(names))}."] if names else []


def degrees(run: ReportedRun) -> Table | None:
    """The best draft TP for each target TP, as the run recorded it, and what decided."""
    recorded = (run.summary or {}).get("best_by_target_tp")
    rows: list[tuple[Value, ...]] = []
    for target, row in recorded.items() if isinstance(recorded, Mapping) else ():
        for size, best in row.items() if isinstance(row, Mapping) else ():
            if not isinstance(best, Mapping) or not isinstance(best.get("draft_tp"), int):
                continue
            speed, tied = best.get("decode_tokens_per_second"), best.get("tied")
            ties = [
                str(one.get("draft_tp"))
                for one in (tied if isinstance(tied, list) else ())
                if isinstance(one, Mapping)
            ]
            rows.append(
                (
                    *(str(target), str(size), best["draft_tp"], ", ".join(ties) or None),
                    _decision_in_words(best.get("decided_by")),
                    speed if isinstance(speed, float) else None,
                )
            )
    if not rows:
        return None
    columns = (
        *(Column("target TP"), Column("batch"), Column("best draft TP"), Column("tied")),
        *(Column("decided by"), Column("decoding", 1, "tokens/s")),
    )
    note = "Decided by: the stage in which a round saves most against the next best draft TP."
    return Table("degrees", "The best draft TP", columns, tuple(rows), note)


def _decision_in_words(decided: object) -> str | None:
    if not isinstance(decided, Mapping) or not isinstance(decided.get("saved_ms"), float):
        return None
    stage, rival = decided.get("stage"), decided.get("draft_tp")
    return f"{stage}: {decided['saved_ms']:.2f} ms less than with draft TP {rival}"


def _proposing(point: Point) -> float | None:
    if (m := point.metrics) is None:
        return None
    return _percent(proposing_rate(m.num_drafts, m.num_rounds_without_proposal))


def _span(interval: Sequence[float] | None) -> str | None:
    return None if interval is None else f"{interval[0]:.2f} – {interval[1]:.2f}"


def times_of_a_round(run: ReportedRun) -> Table:
    """The time of a round by stage."""
    cells = [_figure(part, 3, "ms", f"{part}_ms") for part in (*STAGES, "round")]
    cells.append(_figure("prefill", 2, "ms", "prefill_ms"))
    if _counts_experts(run):
        cells.append(_figure("experts", 1, "a layer", "distinct_experts"))
    note = "Means per engine round; prefill is per prompt. What the stages leave is the host's."
    return _by_point(("rounds", "Time of a round", note), run, filter(_is_ok, run.points), cells)


def _counts_experts(run: ReportedRun) -> bool:
    return any(point.number("distinct_experts") is not None for point in run.points)


def latencies(run: ReportedRun) -> Table:
    """Time to the first token and per token after it, over prompts."""
    cells = [_figure(f"first token {p}", 1, "ms", "ttft_ms", p) for p in _PERCENTILES]
    cells += [_figure(f"per token {p}", 2, "ms", "tpot_ms", p) for p in _PERCENTILES]
    note = "Percentiles over prompts: to the first token (TTFT), and per token after it (TPOT)."
    return _by_point(("latencies", "Latency", note), run, filter(_is_ok, run.points), cells)


def _is_ok(point: Point) -> bool:
    return point.is_ok


def predictions(run: ReportedRun) -> Table | None:
    """Predicted speed-up beside the measured one; None without predictions."""
    points = [p for p in run.points if not p.is_baseline and p.predicted_speedup is not None]
    if not points:
        return None
    cells: list[Cell] = [
        _figure("predicted", 3, "×", "predicted_speedup"),
        _figure("measured", 3, "×", "speedup"),
        (Column("95 % interval"), lambda p: _span(p.speedup_ci)),
        (Column("residual", 1, "%"), lambda p: _percent(residual(p))),
    ]
    note = (
        f"Predicted from the run at the largest k{_method(points)}; the residual is predicted over "
        f"measured, less one.{residuals_in_words(run)}"
    )
    return _by_point(("predictions", "Predicted and measured", note), run, points, cells)


def _method(points: Sequence[Point]) -> str:
    """The method of prediction in words, as far as the points record it."""
    are_exact = [p.prediction.is_exact for p in points if p.prediction is not None]
    if not are_exact:
        return ""
    if all(are_exact):
        return (
            " by replaying rounds over the recorded matches, which gives the rounds exactly, not "
            "their times"
        )
    return (
        " by replaying rounds over the chance of each proposal to stand, given the text: in other "
        "texts it may differ"
    )


def categories(run: ReportedRun, point: Point) -> Table | None:
    """One point by category of prompt, from its record, else from its samples."""
    found: list[tuple[Value, ...]] = []
    for name, row in point.per_category.items():
        percent = _percent(row.draft_acceptance_rate)
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


def comparisons(run: ReportedRun) -> Table | None:
    """Arm against arm, with a row for each category below; None without several drafts."""
    pairs = run.comparisons
    if len({draft for one in pairs for draft in (one.arm.draft, one.against.draft) if draft}) < 2:
        return None
    has_categories = any(one.per_category for one in pairs)
    rows = []
    for one in pairs:
        setting = (arm_in_words(run, one.arm), arm_in_words(run, one.against), one.batch_size)
        parts: list[tuple[str | None, Comparison | CategoryComparison]] = [(None, one)]
        parts += one.per_category.items()
        for name, part in parts:
            kept: tuple[Value, ...] = ("all" if name is None else name,) if has_categories else ()
            found = (part.speed_ratio, _span(part.speed_ratio_ci), _tie_in_words(part.tied))
            rows.append((*setting, *kept, part.num_prompts, *found))
    columns = [Column("arm"), Column("against"), Column("batch")]
    columns += [Column("category")] * has_categories
    columns += [Column("prompts"), Column("ratio of speeds", 2, "×"), Column("95 % interval")]
    note = "Each draft at its fastest k, the faster one first; speeds over the same prompts."
    if any(one.is_predicted for one in pairs):
        note += " Speeds are predicted."
    return Table("comparisons", "Arm against arm", (*columns, Column("verdict")), tuple(rows), note)


def arm_in_words(run: ReportedRun, arm: Arm) -> str:
    """One side of a comparison: `draft-1b, k = 4`."""
    return f"{run.labels.get(arm.draft, arm.draft)}, k = {arm.k}" if arm.k else "no speculation"


def _tie_in_words(tied: bool | None) -> str:
    if tied is None:
        return "too few prompts for an interval"
    return "tied" if tied else "differ"


# Tables for other programs, with full names and figures as recorded.
_SETTING = ("draft", "target_tp", "draft_tp", "k", "batch_size")


def _setting(point: Point) -> tuple[Value, ...]:
    return tuple(getattr(point, name) for name in _SETTING)


def raw_points(run: ReportedRun) -> Table:
    """One row a point with every figure of it."""
    names: tuple[str, ...] = (
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
    if _counts_experts(run):
        names = (*names, "distinct_experts")
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


def raw_comparisons(run: ReportedRun) -> Table:
    """One row for each two arms, and one for each of their categories."""
    rows = []
    for one in run.comparisons:
        setting = (one.batch_size, one.arm.draft, one.arm.k, one.against.draft, one.against.k)
        parts: list[tuple[str | None, Comparison | CategoryComparison]] = [(None, one)]
        parts += one.per_category.items()
        for name, part in parts:
            ends = part.speed_ratio_ci or (None, None)
            rows.append((*setting, name, part.num_prompts, part.speed_ratio, *ends))
    sides = ("draft", "k", "against_draft", "against_k")
    figures = ("num_prompts", "speed_ratio", "speed_ratio_lo", "speed_ratio_hi")
    titles = ("batch_size", *sides, "category", *figures)
    return Table("comparisons", "", tuple(map(Column, titles)), tuple(rows))


def raw_acceptance(run: ReportedRun) -> Table:
    """One row a point and position."""
    rates = ("acceptance_rate", "conditional_acceptance_rate")
    rows = [
        (*_setting(point), position, *pair)
        for point in run.points
        if point.metrics is not None
        for position, pair in enumerate(
            zip(*(getattr(point.metrics, f"{rate}_per_pos") for rate in rates), strict=True),
            start=1,
        )
    ]
    return Table("acceptance", "", tuple(map(Column, (*_SETTING, "position", *rates))), tuple(rows))


def raw_categories(run: ReportedRun) -> Table:
    """One row a point and category."""
    names = ("num_prompts", "mean_acceptance_length", "draft_acceptance_rate", "speedup")
    rows = [
        (*_setting(point), category, *(getattr(row, name) for name in names))
        for point in run.points
        for category, row in point.per_category.items()
    ]
    titles = (*_SETTING, "category", *names)
    return Table("categories", "", tuple(map(Column, titles)), tuple(rows))
