"""Ratios of the speeds of two arms, with their intervals."""

from typing import Any

from specdec_cli.experiment.folders.conclusions import CategoryComparison, Comparison
from specdec_cli.report.drawings import canvas
from specdec_cli.report.folder import ReportedRun
from specdec_cli.report.tables import arm_in_words, comparisons

_MOST_ROWS = 40


def draw_comparisons(figure: Any, run: ReportedRun) -> bool:
    """Draw a row for each two arms, and one for each category. Returns whether there are any."""
    if comparisons(run) is None:
        return False
    rows = _rows(run)[:_MOST_ROWS]
    (axis,) = canvas.make_axes(figure, 1, 0.8 + 0.27 * len(rows))
    canvas.line_at_one(axis)
    for place, (_, part, is_whole) in enumerate(rows):
        if part.speed_ratio is None:
            continue
        colour = canvas.COLOURS[0]
        look = {"marker": "o", "markersize": 6 if is_whole else 4.5, "color": colour}
        look |= {} if is_whole else {"mfc": "none"}
        canvas.draw_row(axis, place, part.speed_ratio, part.speed_ratio_ci, **look)
    canvas.name_rows(axis, [name for name, *_ in rows])
    axis.grid(False)
    axis.set_xlabel("ratio of speeds (×)")
    return True


def _rows(run: ReportedRun) -> list[tuple[str, Comparison | CategoryComparison, bool]]:
    """Name, figures, and whether they are over all prompts."""
    with_batch = len({one.batch_size for one in run.comparisons}) > 1
    rows: list[tuple[str, Comparison | CategoryComparison, bool]] = []
    for one in run.comparisons:
        name = f"{arm_in_words(run, one.arm)} / {arm_in_words(run, one.against)}"
        rows.append((f"batch {one.batch_size}: {name}" if with_batch else name, one, True))
        if one.arm.k and one.against.k:
            rows += [(f"    {name}", part, False) for name, part in one.per_category.items()]
    return rows
