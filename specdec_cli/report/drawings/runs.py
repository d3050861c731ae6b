"""Speeds of several runs' points over those of the first run, with their intervals."""

from typing import Any

from specdec_cli.report.drawings import canvas
from specdec_cli.report.runs import SideBySide

_MOST_ROWS = 40


def draw_runs(figure: Any, whole: SideBySide) -> bool:
    """Draw a row for each point that has one in the first run. Returns whether there are any."""
    rows = [(one, r) for one in whole.shown if (r := whole.against_first(one)) is not None]
    rows = rows[:_MOST_ROWS]
    if not rows:
        return False
    (axis,) = canvas.make_axes(figure, 1, 0.9 + 0.3 * len(rows))
    canvas.line_at_one(axis)
    for place, (one, ratio) in enumerate(rows):
        style = canvas.style_of(whole.names.index(one.run) - 1)
        canvas.draw_row(axis, place, ratio.value, ratio.ends, markersize=6, **style)
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
