"""Speed-up and tokens a round by category of prompt, at one point."""

from collections.abc import Sequence
from typing import Any

from specdec_cli.experiment.folders.records import CategoryMetrics, Point
from specdec_cli.report.drawings import canvas

_MOST_CATEGORIES = 24


def draw_categories(figure: Any, point: Point | None, title: str) -> bool:
    """Draw both with their intervals, the fastest category first.

    title: the point in words. Returns whether there are several categories.
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
        _draw(axes[0], spans, canvas.style_of(0))
        axes[0].set_xlabel("speed-up over k = 0 (×)")
    lengths = [(row.mean_acceptance_length, row.mean_acceptance_length_ci) for _, row in rows]
    _draw(axes[-1], lengths, canvas.style_of(1))
    axes[-1].set_xlabel("tokens a round")
    names = [f"{canvas.short(canvas.safe(name))} (n = {row.num_prompts})" for name, row in rows]
    canvas.name_rows(axes[0], names)
    figure.suptitle(canvas.safe(title), fontsize=10, fontweight="bold")
    return True


def _draw(
    axis: Any, spans: Sequence[tuple[float | None, list[float] | None]], style: dict[str, Any]
) -> None:
    """A point and its interval a row, with the value written above its right end."""
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
