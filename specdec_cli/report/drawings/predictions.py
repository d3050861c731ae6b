"""How far predicted speed-ups are from measured ones."""

from collections.abc import Sequence
from typing import Any

from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.drawings import canvas
from specdec_cli.report.drawings.panels import MOST_PANELS
from specdec_cli.report.findings import residual
from specdec_cli.report.folder import ReportedRun

_BAND = 5  # percent


def draw_predictions(figure: Any, run: ReportedRun) -> bool:
    """Draw the relative error by k, with its interval. Returns whether there are predictions."""
    panels: dict[str, dict[str, list[tuple[Point, float]]]] = {}
    for point in run.points:
        if not point.is_baseline and (error := residual(point)) is not None:
            lines = panels.setdefault(f"batch size {point.batch_size}", {})
            lines.setdefault(run.labels[point.draft], []).append((point, 100 * error))
    if not panels:
        return False
    panels = dict(list(panels.items())[:MOST_PANELS])
    names = sorted({name for lines in panels.values() for name in lines})
    axes = canvas.make_axes(figure, len(panels), 3.1)
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        axis.axhline(0, color=canvas.FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
        axis.axhspan(-_BAND, _BAND, color=canvas.FAINT, alpha=0.15, linewidth=0)
        for name, found in sorted(lines.items()):
            index = names.index(name)
            canvas.plot_with_intervals(
                axis, [p.k + canvas.dodged(index, len(names)) for p, _ in found],
                [error for _, error in found], [_span(p) for p, _ in found], linestyle="none",
                label=canvas.safe(name), **canvas.style_of(index),
            )  # fmt: skip
        ks = sorted({p.k for found in lines.values() for p, _ in found})
        axis.set_xticks(ks[:: -(-len(ks) // 12)])
        if len(panels) > 1:
            axis.set_title(title)
    canvas.label_axes(axes, "proposed tokens a round, k", "predicted over measured (%)")
    canvas.add_legend(figure, axes)
    return True


def _span(point: Point) -> Sequence[float] | None:
    ends = point.prediction.speedup_error_ci if point.prediction is not None else None
    return None if ends is None else [100 * end for end in ends]
