"""Makes the tables of a report. The HTML, markdown and LaTeX reports show the same tables, and
leave out those without rows."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from operator import itemgetter

from specdec_cli.core.figures import TTFT_PARTS, stages_in
from specdec_cli.experiment.folders.conclusions import (
    Arm,
    Best,
    Comparison,
    Decision,
    Fastest,
    SpeedRatio,
)
from specdec_cli.experiment.folders.records import BreakEven, Point
from specdec_cli.report import cells as cell
from specdec_cli.report.cells import (
    Cell,
    Table,
    Value,
    by_point,
    number,
    percent,
    span,
    span_of,
    table_of,
)
from specdec_cli.report.findings import Finding, residual, residuals_in_words, times
from specdec_cli.report.folder import ReportedRun


def results(run: ReportedRun, bests: Sequence[Finding]) -> Table:
    """Make the table of every point's speed and acceptance, including failed points."""
    cells = [cell.SPEEDUP, cell.SPEED, cell.LENGTH, cell.ACCEPTED]
    if any(cell.PROPOSING.of(point) is not None for point in run.points):
        cells[-1:-1] = [cell.PROPOSING, cell.OVERALL]
    if run.is_comparison:
        cells += [cell.EQUAL, cell.BLOCKS]
    cells.append(Cell("status", lambda p: p.status if p.is_ok else f"{p.status}: {p.reason}"))
    note = "Speed-up is against plain decoding (k = 0) of the same prompts at the same batch size."
    shown = [p for p in run.points if not (run.is_comparison and p.status == "skipped")]
    strong = frozenset(i for i, p in enumerate(shown) if any(p is b.advised for b in bests))
    return by_point(("results", "Every point", note), run, shown, cells, strong)


def load(run: ReportedRun, bests: Sequence[Finding]) -> Table:
    """Make the table of the points that were measured at a request rate. The table has no rows if
    there are no such points."""
    points = [p for p in run.points if p.load is not None]
    strong = frozenset(i for i, p in enumerate(points) if any(p is b.advised for b in bests))
    note = (
        "Latencies run from the time at which a request is due. Good: the share of requests that "
        "meet every objective. An overloaded point has no latencies, because they keep growing."
    )
    return by_point(("load", "Under load", note), run, points, cell.LOAD, strong)


def break_even(run: ReportedRun) -> Table:
    """Make the table that shows, for each point, the acceptance at which it would be exactly as
    fast as plain decoding."""
    points = [p for p in run.points if p.break_even is not None]
    cells = [
        Cell("tokens a round, all rounds", tokens_over_all_rounds, "", 2),
        Cell(
            *("breaks even at", lambda p: even_of(p).tokens_per_round, "", 2),
            interval=lambda p: even_of(p).tokens_per_round_ci,
        ),
        replace(cell.ACCEPTED, digits=0),
        Cell("needs accepted", lambda p: _needed(even_of(p).draft_acceptance_rate), "%", 0),
        Cell("needs a chance of", lambda p: _needed(even_of(p).alpha), "% each", 0),
    ]
    note = (
        "Breaks even at: the tokens a round, over all rounds, that give the speed of plain "
        "decoding. This is the cost of a round divided by that of a round at k = 0. Needs: the "
        "share of proposals that must be accepted for it, and the chance that each proposal is "
        "accepted if all chances are equal (geometric model)."
    )
    if any(even_of(p).is_predicted for p in points):
        note += " The costs of points that were not measured come from the time curve."
    return by_point(("break_even", "Break-even", note), run, points, cells)


def even_of(point: Point) -> BreakEven:
    assert point.break_even is not None
    return point.break_even


def _needed(rate: float | None) -> Value:
    return "never" if rate is None else percent(rate)


def tokens_over_all_rounds(point: Point) -> float | None:
    """Return a point's tokens per round, averaged over all rounds. If the point was not measured,
    compute the value that its predicted speed-up implies. Return None if neither is known."""
    found = point.number("tokens_per_round")
    if found is not None or point.break_even is None or point.predicted_speedup is None:
        return found
    return point.predicted_speedup * (point.break_even.tokens_per_round or 0.0)


def degrees(run: ReportedRun) -> Table:
    """Make the table of the best draft TP for each target TP and batch size, as the run recorded
    it. The table also names the stage of a round (such as `draft`) in which the best draft TP saves
    the most time compared with the next best."""
    rows = [
        (target, size, best)
        for target, row in run.summary.best_by_target_tp.items()
        for size, best in row.items()
        if best.draft_tp is not None
    ]

    def decision(of: Decision | None) -> str | None:
        less = f"{of.saved_ms:.2f} ms less than with draft TP {of.draft_tp}" if of else ""
        return f"{of.stage}: {less}" if of else None

    cells = [
        Cell("target TP", lambda r: r[0]),
        Cell("batch", lambda r: r[1]),
        Cell("best draft TP", lambda r: r[2].draft_tp),
        Cell("tied", lambda r: ", ".join(str(d.draft_tp) for d in r[2].tied) or None),
        Cell("decided by", lambda r: decision(r[2].decided_by)),
        Cell("decoding", lambda r: r[2].decode_tokens_per_second, "tokens/s", 1),
    ]
    note = "Decided by: the stage in which a round saves the most over the next best draft TP."
    return table_of(("degrees", "The best draft TP", note), rows, cells)


def times_of_a_round(run: ReportedRun) -> Table:
    """Make the table of the mean time of a round, split by stage."""
    cells = [cell.TIMES[stage] for stage in stages_in(p.metrics for p in run.points)]
    cells += [replace(cell.TIMES["round"], interval=lambda p: p.round_ms_ci), cell.PREFILL]
    if counts_experts(run):
        cells.append(cell.EXPERTS)
    note = "Means per engine round; prefill is per prompt. The host takes the rest of a round."
    points = [p for p in run.points if p.is_ok]
    return by_point(("rounds", "Time of a round", note), run, points, cells)


def counts_experts(run: ReportedRun) -> bool:
    return any(point.number("distinct_experts") is not None for point in run.points)


def latencies(run: ReportedRun) -> Table:
    """Make the table of latencies: percentiles, over prompts, of the time to the first token and of
    the time per token after it."""
    note = "Percentiles over prompts: to the first token (TTFT), and per token after it (TPOT)."
    return by_point(
        ("latencies", "Latency", note), run, [p for p in run.points if p.is_ok], cell.LATENCIES
    )


def predictions(run: ReportedRun) -> Table:
    """Make the table that compares predicted with measured speed-ups."""
    points = [p for p in run.points if not p.is_baseline and p.predicted_speedup is not None]
    cells = [
        replace(
            cell.PREDICTED, interval=lambda p: p.prediction.speedup_ci if p.prediction else None
        ),
        Cell("measured", cell.speedup, "×", 3, interval=lambda p: p.speedup_ci),
        Cell("residual", lambda p: percent(residual(p)), "%", 1),
    ]
    note = (
        f"Predicted from the run at the largest k{_method(points)}; the residual is the relative "
        f"error of the prediction.{residuals_in_words(run)}"
    )
    return by_point(("predictions", "Predicted and measured", note), run, points, cells)


def _method(points: Sequence[Point]) -> str:
    """Describe the method of prediction, as far as the points record it."""
    are_exact = [p.prediction.is_exact for p in points if p.prediction is not None]
    if not are_exact:
        return ""
    if all(are_exact):
        return (
            " by replaying rounds with the recorded acceptance, which gives exact rounds but not "
            "exact times"
        )
    return (
        " by replaying rounds with the acceptance chance of each proposal in this text; for other "
        "texts it may differ"
    )


def categories(run: ReportedRun, point: Point | None, best: Finding | None = None) -> Table:
    """Make the table of one point's figures for each category of prompts.

    point: the point to show; the table has no rows if it is None.
    best: the finding at the point's batch size. If it has recommendations by category, the table
        shows them too.
    """
    own = best.by_category if best is not None else {}
    rows = sorted(
        point.per_category.items() if point is not None else (),
        key=lambda row: (-(row[1].mean_acceptance_length or 0), row[0]),
    )
    cells = [
        Cell("category", lambda r: r[0]),
        *chain.from_iterable(map(_of_category, _OF_CATEGORIES)),
    ]
    if own:
        cells += [
            Cell("fastest here", lambda r: _named(run, own[r[0]].fastest) if r[0] in own else None),
            Cell("recommended here", lambda r: _advice(run, own.get(r[0]))),
        ]
        note = (
            "Fastest here, recommended here: for the prompts of a category alone. The recommended "
            "k is the smallest tied with the fastest and faster than plain decoding beyond chance."
        )
    found = table_of(("categories", "By category", note if own else ""), rows, cells)
    columns = range(len(found.columns))
    kept = itemgetter(*(i for i in columns if i < 3 or any(r[i] is not None for r in found.rows)))
    return replace(found, columns=kept(found.columns), rows=tuple(map(kept, found.rows)))


_OF_CATEGORIES = (cell.PROMPTS, cell.LENGTH, cell.ACCEPTED, cell.SPEED, cell.SPEEDUP)


def _of_category(one: Cell) -> list[Cell]:
    """Make the columns for one figure: the value, and the 95 % interval if the figure has one. Each
    row of the table is a tuple (category, figures of the category)."""
    found = [Cell(one.title, lambda row: one.of(row[1]), one.unit, one.digits)]
    if (ends := one.interval) is not None:
        found.append(Cell("95 % interval", lambda row: span_of(row[1], ends(row[1]))))
    return found


def _advice(run: ReportedRun, one: Best | None) -> str | None:
    """Return the point recommended for a category, or "inconclusive" if there were too few prompts
    or the timings were disturbed."""
    is_open = one is not None and one.verdict == "inconclusive"
    return "inconclusive" if is_open else _named(run, one)


def _named(run: ReportedRun, one: Best | Fastest | None) -> str | None:
    if one is None or one.k is None:
        return None
    if one.k == 0:
        return "no speculation"
    several = len({p.draft for p in run.points if p.draft is not None}) > 1
    named = f" with {run.labels.get(one.draft, one.draft)}" if several and one.draft else ""
    return f"k = {one.k}{named}{f', {times(one.speedup)}' if one.speedup is not None else ''}"


def comparisons(run: ReportedRun) -> Table:
    """Make the table that compares arms (drafts, each at its fastest k) with one another. The table
    has no rows unless the run has several drafts."""
    note = "Each draft at its fastest k, the faster one first; speeds over the same prompts."
    rows = [(one, "", one) for one in _pairs_of_drafts(run)]
    return _pairs_table(run, ("comparisons", "Arm against arm", note), rows)


def category_pairs(run: ReportedRun) -> Table:
    """Make the table that compares drafts with one another for each category of prompts. The table
    has no rows unless the run has several drafts."""
    rows = [(one, *part) for one in _pairs_of_drafts(run) for part in one.per_category.items()]
    note = "Intervals are 95 %: of many such comparisons one in twenty differs by chance."
    return _pairs_table(run, ("category_pairs", "Arm against arm, by category", note), rows)


def _pairs_of_drafts(run: ReportedRun) -> Sequence[Comparison]:
    """Return the run's comparisons if it has several drafts; otherwise return no comparisons."""
    found = run.summary.comparisons
    drafts = {side.draft for one in found for side in (one.arm, one.against)} - {None}
    return found if len(drafts) > 1 else ()


def _pairs_table(
    run: ReportedRun,
    texts: tuple[str, str, str],
    rows: Sequence[tuple[Comparison, str, SpeedRatio]],
) -> Table:
    cells = [
        Cell("arm", lambda r: arm_in_words(run, r[0].arm)),
        Cell("against", lambda r: arm_in_words(run, r[0].against)),
        Cell("batch", lambda r: r[0].batch_size),
        *([Cell("category", lambda r: r[1])] if any(row[1] for row in rows) else []),
        Cell("prompts", lambda r: r[2].num_prompts),
        Cell("ratio of speeds", lambda r: r[2].speed_ratio, "×", 2),
        Cell("95 % interval", lambda r: span(r[2].speed_ratio_ci)),
        Cell("verdict", lambda r: r[2].verdict),
    ]
    name, title, note = texts
    if any(one.is_predicted for one, _, _ in rows):
        note += " Speeds are predicted."
    return table_of((name, title, note), rows, cells)


def arm_in_words(run: ReportedRun, arm: Arm) -> str:
    """Name one side of a comparison, such as `draft-1b, k = 4`."""
    return f"{run.labels.get(arm.draft, arm.draft)}, k = {arm.k}" if arm.k else "no speculation"


_NOTE = (
    "Means over prompts. Queue: the wait for a slot, not part of the time to the first token. "
    "Prefill: all passes that a prompt waits for, including those of other prompts. First round: "
    "the rest; in plain decoding, prefill gives the first token and no round is needed."
)


def first_tokens(run: ReportedRun) -> Table:
    """Make the table that splits the time to the first token into its parts, for points that
    recorded the parts."""
    points = [p for p in run.points if p.metrics is not None and p.metrics.ttft_parts_ms]
    cells = [
        Cell("first token", number("ttft_ms", "mean"), "ms", 1),
        *(
            Cell(title, partial(cell.first_token_part, name), "ms", 1)
            for name, title in TTFT_PARTS.items()
        ),
    ]
    return by_point(("first_tokens", "The first token", _NOTE), run, points, cells)
