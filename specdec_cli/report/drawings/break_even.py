"""Tokens a round, and those at which speculation is as fast as plain decoding."""

from typing import Any

from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.drawings import canvas
from specdec_cli.report.drawings.panels import MOST_PANELS
from specdec_cli.report.folder import ReportedRun
from specdec_cli.report.tables import tokens_over_all_rounds


def draw_break_even(figure: Any, run: ReportedRun) -> bool:
    """Draw both by k, a panel for each batch size. Returns whether the run recorded them."""
    panels: dict[str, dict[str, list[Point]]] = {}
    for point in run.points:
        if point.break_even is not None and tokens_over_all_rounds(point) is not None:
            panel = panels.setdefault(f"batch size {point.batch_size}", {})
            panel.setdefault(run.labels[point.draft], []).append(point)
    if run.is_comparison or not panels:
        return False
    panels = dict(list(panels.items())[:MOST_PANELS])
    names = sorted({name for lines in panels.values() for name in lines})
    axes = canvas.make_axes(figure, len(panels), 3.1)
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        ticks = set[int]()
        for name, points in sorted(lines.items()):
            index, label = names.index(name), canvas.safe(name)
            style = canvas.style_of(index)
            places = [p.k + canvas.dodged(index, len(names)) for p in points]
            evens = [p.break_even for p in points if p.break_even is not None]
            canvas.plot_with_intervals(
                axis, places, [tokens_over_all_rounds(p) or 0.0 for p in points],
                [p.tokens_per_round_ci for p in points], label=f"{label}: tokens a round", **style,
            )  # fmt: skip
            canvas.plot_with_intervals(
                axis, places, [e.tokens_per_round or 0.0 for e in evens],
                [e.tokens_per_round_ci for e in evens], label=f"{label}: breaks even",
                linestyle=(0, (4, 3)), mfc="none", **style,
            )  # fmt: skip
            ticks |= {p.k for p in points}
        shown = sorted(ticks)
        axis.set_xticks(shown[:: -(-len(shown) // 12)])
        if len(panels) > 1:
            axis.set_title(title)
    axes[0].set_ylim(bottom=min(1.0, axes[0].get_ylim()[0]))
    canvas.label_axes(axes, "proposed tokens a round, k", "tokens a round (all rounds)")
    canvas.add_legend(figure, axes)
    return True
