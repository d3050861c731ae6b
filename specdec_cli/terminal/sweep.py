"""Shows the results of a sweep on the terminal. They are computed in `experiment.points`."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rich.table import Table

from specdec_cli.core.figures import stages_in
from specdec_cli.experiment.folders.conclusions import (
    Arm,
    Best,
    Comparison,
    Crossover,
    Fastest,
)
from specdec_cli.experiment.folders.records import (
    CategoryMetrics,
    Point,
    rate_in_words,
)
from specdec_cli.experiment.statistics.promise import check_line, tokens_line
from specdec_cli.experiment.statistics.stats import FEWEST
from specdec_cli.experiment.sweep.recommend import has_several_drafts, in_words
from specdec_cli.report import cells as cell
from specdec_cli.report.cells import Cell, Value
from specdec_cli.terminal import render
from specdec_cli.terminal.watching import NO_DRAFT
from specdec_cli.text import inert, one_line, say

_MOST_REASON = 60  # characters of a reason in a table
_MARK = ""
# The columns to show if the terminal is too narrow for all.
_DECIDING = {"draft", "requests/s", "batch", "k", "tokens a round", "tokens/s", "x k = 0", _MARK}
_MANY = "intervals are 95 %: of many such comparisons one in twenty differs by chance"
_NO_SPECULATION = "no speculation"


def print_results(document: Mapping[str, Any], *, with_pairs: bool = False) -> None:
    """Print the table of points and the recommendation on stdout.

    with_pairs: whether to compare arms (drafts, each at its fastest k) by category too.
    """
    out = render.console_of_results()
    table, needed = results_table(document["points"], out.width, document["best_by_batch_size"])
    out.print(table, soft_wrap=False)
    if needed:
        where = f"use a terminal of {needed} columns, --json or report.html (-o DIR)"
        say(f"to see all figures, {where}", sys.stdout)
    tables = [load_table(document["points"], out.width), _category_table(document, out.width)]
    with_draft = has_several_drafts(document["points"])
    pairs = comparison_tables(document["comparisons"], out.width) if with_draft else []
    for further in filter(None, [*tables, *(pairs if with_pairs else pairs[:1])]):
        out.print()
        out.print(further, soft_wrap=False)
    if with_draft and not pairs and document["best_by_batch_size"]:
        out.print()
        say(f"no arms to compare: {document['best'].reason}", sys.stdout)
    if with_pairs and len(pairs) > 1:
        say(_MANY, sys.stdout)
    out.print()
    by_rate: Mapping[str, Best] = document.get("best_by_request_rate", {})
    for rate, best in by_rate.items():
        name = rate_in_words("inf" if rate == "inf" else float(rate))
        say(f"{name}: {_judged(best)}", sys.stdout)
    if (at := document.get("crossover")) is not None and (told := _crossover_line(at)):
        say(told, sys.stdout)
    for batch_size, best in document["best_by_batch_size"].items():
        where = f"batch size {batch_size}: " if len(document["best_by_batch_size"]) > 1 else ""
        tied = _tied(best, with_draft=with_draft)
        say(f"{where}{_judged(best)}{tied}", sys.stdout)
        line = _first_token_line(document["points"], int(batch_size), best, with_draft=with_draft)
        if line is not None:
            say(f"{where}{line}", sys.stdout)
    if (about_tokens := tokens_line(document["tokens"])) is not None:
        say(about_tokens, sys.stdout)
    if (check := document.get("lossless_check")) is not None:
        say(check_line(check), sys.stdout)


def _crossover_line(at: Crossover) -> str:
    """Say up to which request rate speculation pays. "" if either rate is unknown, or unless the
    recommendation changes exactly once, from speculation to plain decoding."""
    if at.below is None or at.above is None or float(at.below) >= float(at.above):
        return ""
    return f"speculation pays up to {at.below:g} requests/s, but not from {at.above:g} on"


def load_table(points: Sequence[Point], width: int) -> Table | None:
    """Make the table of the points that were measured at a request rate. Return None if there are
    none."""
    shown = [p for p in points if p.load is not None]
    if not shown:
        return None
    named = [cell.RATE, cell.K, *([_DRAFT] if has_several_drafts(points) else [])]
    columns = cell.columns_of([*named, *cell.LOAD], shown)
    columns = {title: of for title, of in columns.items() if any(of)}
    spare = ["first token p50 ms", "first token p99 ms", "whole p99 ms", "offered/s", "under way"]
    return render.table_within(width, columns, spare=spare, names=["draft"])


def _judged(best: Best) -> str:
    """Return the reason for a recommendation, prefixed with "recommended" or "inconclusive" if that
    is its verdict."""
    words = {"use": "recommended: ", "inconclusive": "inconclusive: "}
    return f"{words.get(best.verdict or '', '')}{best.reason}"


def _first_token_line(
    points: Sequence[Point], batch_size: int, best: Best, *, with_draft: bool
) -> str | None:
    """Write the mean time to the first token and its parts, at k = 0 and at the recommended point
    (or at the fastest one if none is recommended). Return None if the parts are not known."""
    arm = best if best.k else best.fastest or best
    shown = []
    for p in points:
        is_named = p.is_baseline or (p.k, p.draft) == (arm.k, arm.draft)
        if p.batch_size != batch_size or not is_named or (m := p.metrics) is None:
            continue
        if (parts := render.first_token_parts(m)) and m.ttft_ms.mean is not None:
            name = one_line(in_words(p.k, p.draft, with_draft=with_draft))
            shown.append(f"{m.ttft_ms.mean:.1f} ms at {name} ({parts})")
    return f"first token, means: {'; '.join(shown)}" if shown else None


def results_table(
    points: Sequence[Point], width: int, best: Mapping[str, Best] | None = None
) -> tuple[Table, int]:
    """Make the table of points, and compute the terminal width at which it would show all columns.
    The returned width is 0 if the table already shows them all.

    There are columns for the draft and the batch size only if these differ between points, and
    columns of times only for stages that took any time.
    If some columns do not fit into `width`, only the most important ones are shown, and one more
    column marks the recommended and tied points.
    best: the recommendation for each batch size.
    """
    stages = stages_in(p.metrics for p in points)
    cells = [
        *([_DRAFT] if has_several_drafts(points) else []),
        *([cell.RATE] if any(p.request_rate is not None for p in points) else []),
        *([cell.BATCH] if len({p.batch_size for p in points}) > 1 else []),
        *(cell.K, _LENGTH, cell.PROPOSING, cell.OVERALL, cell.ACCEPTED, _SPEED, cell.SPEEDUP),
        *(_PREDICTED, _EVEN, *(cell.TIMES[part] for part in (*stages, "round"))),
    ]
    columns = cell.columns_of(cells, points)
    if not any(columns["proposing"]):
        del columns["proposing"], columns["all rounds"]
    if not any(columns[_EVEN.title]):  # leave this column out if only plain decoding was measured
        del columns[_EVEN.title]
    wrapped = {"names": ["draft"], "long": ["tokens/s"]}
    needed = render.least_width(columns, ("draft", "tokens/s"))
    if needed <= width:
        return render.table_within(width, columns, **wrapped), 0
    columns[_MARK] = [_mark(point, (best or {}).get(str(point.batch_size))) for point in points]
    is_predicted = any(p.is_predicted for p in points)
    decide = _DECIDING | ({"predicted"} if is_predicted else set())
    shown = {name: of for name, of in columns.items() if name in decide and any(of)}
    return render.table_within(width, shown, spare=[_MARK, cell.LENGTH.title], **wrapped), needed


def _mark(point: Point, best: Best | None) -> str:
    """Return the mark of a point that is recommended or tied with the fastest; "" for other
    points."""
    if best is None or point.request_rate is not None:
        return ""
    arm = point.k, point.draft
    if arm == (best.k, best.draft) and best.verdict != "inconclusive":
        return "recommended"
    return "tied" if arm in [(one.k, one.draft) for one in best.tied_points] else ""


def _length(point: Point) -> Value:
    if point.metrics is None and point.prediction is not None:
        return f"~{point.prediction.mean_acceptance_length:.2f}"
    return point.number("mean_acceptance_length")


def _speed(point: Point) -> Value:
    """Return the decoding speed, or the reason why there is none."""
    if point.metrics is not None:
        return point.metrics.decode_tokens_per_second
    why = inert(point.reason or "")
    why = why if len(why) <= _MOST_REASON else f"{why[: _MOST_REASON - 1]}…"
    return point.status if point.status == "skipped" else f"{point.status}: {why}"


_DRAFT = Cell("draft", lambda p: one_line(p.draft or NO_DRAFT))
_LENGTH, _SPEED = replace(cell.LENGTH, of=_length), replace(cell.SPEED, of=_speed)
# Show the interval only for points that were not measured, because the table would be too wide if
# measured points showed theirs as well.
_PREDICTED = replace(
    cell.PREDICTED,
    interval=lambda p: p.prediction.speedup_ci if not p.metrics and p.prediction else None,
)


def _speedup(row: CategoryMetrics) -> str:
    if row.impossible_speedup is None and row.num_prompts < FEWEST and row.speedup is not None:
        return f"{row.speedup:.2f} (too few prompts)"
    return cell.SPEEDUP.text(row)


def _break_even(point: Point) -> str:
    """Write the tokens per round at which a point breaks even and the acceptance needed for it,
    such as `1.72 (31%)`."""
    if (even := point.break_even) is None or even.tokens_per_round is None:
        return ""
    rate = even.draft_acceptance_rate
    return f"{even.tokens_per_round:.2f} ({'never' if rate is None else f'{100 * rate:.0f}%'})"


_EVEN = Cell("break-even", _break_even)


def comparison_tables(comparisons: Sequence[Comparison], width: int) -> list[Table]:
    """Make the table that compares arms (drafts, each at its fastest k), and a second one by
    category if categories were compared. Return no tables if there are no comparisons."""
    if not comparisons:
        return []
    with_batch = len({one.batch_size for one in comparisons}) > 1

    def named(arm: Arm, batch_size: int | None = None) -> str:
        words = f"{arm.draft}, k = {arm.k}" if arm.k else "k = 0"
        return one_line(f"batch {batch_size}: {words}" if batch_size is not None else words)

    def arm_of(row: Any) -> str:
        return named(row[0].arm, row[0].batch_size if with_batch else None)

    figures = [
        Cell("against", lambda row: named(row[0].against)),
        Cell(
            "x", lambda row: row[2].speed_ratio, "", 2, interval=lambda row: row[2].speed_ratio_ci
        ),
        Cell("", lambda row: row[2].verdict if row[2].tied is not False else ""),
    ]
    wholes = [(one, "", one) for one in comparisons]
    columns = cell.columns_of([Cell("arm, fastest k", arm_of), *figures], wholes)
    tables = [render.table_within(width, columns, names=["arm, fastest k", "against"])]
    parts = [
        (one, *part) for one in comparisons if one.against.k for part in one.per_category.items()
    ]
    if parts:
        category = Cell("category", lambda row: one_line(row[1]))
        prompts = Cell("prompts", lambda row: row[2].num_prompts)
        columns = cell.columns_of([category, prompts, Cell("arm", arm_of), *figures], parts)
        names = ["category", "arm", "against"]
        tables.append(render.table_within(width, columns, spare=["prompts"], names=names))
    return tables


def _category_table(document: Mapping[str, Any], width: int) -> Table | None:
    """Make the table of speed-ups by category at the recommended point. Return None if there are
    fewer than two categories.

    If the recommendation is not to speculate, the table shows the fastest point instead. With
    several batch sizes or rates, it is a point at the first of them, which the heading names.
    """
    best: Best = document["best"]
    shown = best if best.k else best.fastest
    if shown is None or shown.k == 0:
        return None
    point = next(p for p in document["points"] if (p.k, p.draft) == (shown.k, shown.draft))
    rows = point.per_category
    if len(rows) < 2:
        return None
    with_draft = has_several_drafts(document["points"])
    at = f", {point.level_in_words}" if len({p.level for p in document["points"]}) > 1 else ""
    name = one_line(f"category, {in_words(point.k, point.draft, with_draft=with_draft)}{at}")
    columns: dict[str, list[str]] = {
        name: [one_line(category) for category in rows],
        **cell.columns_of([cell.PROMPTS, cell.LENGTH, cell.SPEED], [*rows.values()]),
        "x k = 0": [_speedup(row) for row in rows.values()],
    }
    own = best.per_category
    if all(category in own for category in rows):
        columns |= {
            "fastest here": [_fastest_here(own[c].fastest, with_draft=with_draft) for c in rows],
            "recommended": [_advice(own[c], with_draft=with_draft) for c in rows],
        }
    spare = ["fastest here", "recommended", "tokens/s", "prompts", "tokens a round"]
    return render.table_within(width, columns, spare=spare, names=[name])


def _advice(best: Best, *, with_draft: bool) -> str:
    """Return the recommendation for a category, or "inconclusive" if there is none."""
    if best.verdict == "inconclusive" or best.k is None:
        return "inconclusive"
    if best.k == 0:
        return _NO_SPECULATION
    return one_line(in_words(best.k, best.draft, with_draft=with_draft))


def _fastest_here(fastest: Fastest | None, *, with_draft: bool) -> str:
    if fastest is None or fastest.speedup is None:
        return ""
    if fastest.k == 0:
        return _NO_SPECULATION
    name = in_words(fastest.k, fastest.draft, with_draft=with_draft)
    return one_line(f"{name}, {fastest.speedup:.2f}x")


def _tied(best: Best, *, with_draft: bool) -> str:
    """Name the other points tied with the fastest, except those named in the reason."""
    named = {(one.k, one.draft) for one in (best, best.fastest) if one is not None}
    if with_draft:
        others = [p for p in best.tied_points if (p.k, p.draft) not in named]
        tied = ", ".join(dict.fromkeys(in_words(p.k, p.draft, with_draft=True) for p in others))
        return f" (tied: {tied})" if tied else ""
    ks = [str(k) for k in best.tied if k not in {k for k, _ in named}]
    return f" (tied: k = {', '.join(ks)})" if ks else ""
