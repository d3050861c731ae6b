"""Draws plots with one value and its interval per row.

The rows are categories of prompts at one point, pairs of arms (an arm is a draft at one k, or plain
decoding), or points of several runs relative to the first run.
"""

from collections.abc import Sequence
from typing import Any

from specdec_cli.experiment.folders.conclusions import SpeedRatio
from specdec_cli.experiment.folders.records import CategoryMetrics, Point
from specdec_cli.report.drawings import canvas
from specdec_cli.report.folder import ReportedRun
from specdec_cli.report.runs import SideBySide
from specdec_cli.report.tables import arm_in_words, comparisons

_MOST_CATEGORIES, _MOST_PAIRS = 24, 40


def draw_categories(figure: Any, point: Point | None, title: str) -> bool:
    """Draw the speed-up and the tokens per round of each category with their intervals. The fastest
    category comes first.

    Without speed-ups, only the tokens per round are drawn, the highest first.

    title: a description of the point.
    Returns False, and draws nothing, if the point has fewer than two categories.
    """
    if point is None or len(point.per_category) < 2:
        return False
    by_speed = any(row.speedup is not None for row in point.per_category.values())

    def place(item: tuple[str, CategoryMetrics]) -> float:
        found = item[1].speedup if by_speed else item[1].mean_acceptance_length
        return -(found or 0.0)

    rows = sorted(point.per_category.items(), key=place)[:_MOST_CATEGORIES]
    axes = canvas.make_axes(figure, 1 + by_speed, 1.0 + 0.3 * len(rows))
    if by_speed:
        canvas.line_at_one(axes[0])
        spans = [(row.speedup, row.speedup_ci) for _, row in rows]
        _draw_values(axes[0], spans, canvas.style_of(0))
        axes[0].set_xlabel("speed-up over k = 0 (×)")
    lengths = [(row.mean_acceptance_length, row.mean_acceptance_length_ci) for _, row in rows]
    _draw_values(axes[-1], lengths, canvas.style_of(1))
    axes[-1].set_xlabel("tokens a round")
    names = [f"{canvas.short(canvas.safe(name))} (n = {row.num_prompts})" for name, row in rows]
    canvas.name_rows(axes[0], names)
    figure.suptitle(canvas.safe(title), fontsize=10, fontweight="bold")
    return True


def _draw_values(
    axis: Any, spans: Sequence[tuple[float | None, list[float] | None]], style: dict[str, Any]
) -> None:
    """Draw a point and its interval in each row, with the value above the point."""
    for row, (value, ends) in enumerate(spans):
        if value is None:
            continue
        canvas.draw_row(axis, row, value, ends, markersize=6, **style)
        axis.annotate(
            f"{value:.2f}", (value, row), (0, 6), textcoords="offset points", ha="center",
            fontsize=8.5,
        )  # fmt: skip
    axis.grid(True, axis="x")
    axis.grid(False, axis="y")
    axis.margins(x=0.1)


def draw_comparisons(figure: Any, run: ReportedRun) -> bool:
    """Draw the ratio of speeds for each pair of arms (a draft at one k, or plain decoding) and,
    below it, for each category of prompts. Returns whether there are any pairs of drafts."""
    if not comparisons(run).rows:
        return False
    rows = _pairs(run)[:_MOST_PAIRS]
    (axis,) = canvas.make_axes(figure, 1, 0.8 + 0.27 * len(rows))
    canvas.line_at_one(axis)
    for place, (_, part, is_whole) in enumerate(rows):
        if part.speed_ratio is None:
            continue
        look = {"marker": "o", "markersize": 6 if is_whole else 4.5, "color": canvas.COLOURS[0]}
        look |= {} if is_whole else {"mfc": "none"}
        canvas.draw_row(axis, place, part.speed_ratio, part.speed_ratio_ci, **look)
    canvas.name_rows(axis, [name for name, *_ in rows])
    axis.grid(False)
    axis.set_xlabel("ratio of speeds (×)")
    return True


def _pairs(run: ReportedRun) -> list[tuple[str, SpeedRatio, bool]]:
    """Return the rows of the plot of comparisons: each row's name, its ratio of speeds, and True if
    the ratio is over all prompts or False if it is over one category."""
    with_batch = len({one.batch_size for one in run.summary.comparisons}) > 1
    rows: list[tuple[str, SpeedRatio, bool]] = []
    for one in run.summary.comparisons:
        name = f"{arm_in_words(run, one.arm)} / {arm_in_words(run, one.against)}"
        rows.append((f"batch {one.batch_size}: {name}" if with_batch else name, one, True))
        if one.arm.k and one.against.k:
            rows += [(f"    {name}", part, False) for name, part in one.per_category.items()]
    return rows


_MOST_ROWS = 40


def draw_runs(figure: Any, whole: SideBySide) -> bool:
    """Draw the speed of each point of the later runs, relative to the same point in the first run.
    Points that the first run lacks are left out. Returns whether any are left."""
    rows = [(one, r) for one in whole.shown if (r := whole.against_first(one)) is not None]
    rows = rows[:_MOST_ROWS]
    if not rows:
        return False
    (axis,) = canvas.make_axes(figure, 1, 0.9 + 0.3 * len(rows))
    canvas.line_at_one(axis)
    for place, (one, ratio) in enumerate(rows):
        style = canvas.style_of(whole.names.index(one.run) - 1)
        value, ends = ratio.speed_ratio or 0.0, ratio.speed_ratio_ci
        canvas.draw_row(axis, place, value, ends, markersize=6, **style)
    sizes = {one.point.batch_size for one, _ in rows}
    names = [
        f"{one.run}: {one.setting}" + (f", batch {one.point.batch_size}" if len(sizes) > 1 else "")
        for one, _ in rows
    ]
    canvas.name_rows(axis, names)
    axis.grid(True, axis="x")
    axis.grid(False, axis="y")
    axis.set_xlabel(canvas.safe(f"speed over {whole.names[0]} (×)"))
    return True
