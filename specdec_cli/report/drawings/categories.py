"""Tokens a round by category of prompt."""

from typing import Any

from specdec_cli.report.drawings.canvas import COLOURS, make_axes, safe, short
from specdec_cli.report.tables import Table

_MOST_CATEGORIES = 24


def draw_categories(figure: Any, table: Table | None) -> bool:
    """Draw bars of tokens a round, the table's third column. Returns whether there are several."""
    if table is None or len(table.rows) < 2:
        return False
    rows = [row for row in table.rows if isinstance(row[2], float)][:_MOST_CATEGORIES]
    if not rows:
        return False
    (axis,) = make_axes(figure, 1, 0.7 + 0.27 * len(rows))
    names = [short(safe(str(row[0]))) for row in rows]
    values = [float(row[2] or 0) for row in rows]
    bars = axis.barh(range(len(rows)), values, 0.7, color=COLOURS[0])
    axis.bar_label(bars, [f"{value:.2f}" for value in values], padding=3, fontsize=8.5)
    axis.set_yticks(range(len(rows)), names)
    axis.invert_yaxis()
    axis.grid(False)
    axis.margins(x=0.1)
    axis.set_xlabel("tokens a round")
    return True
