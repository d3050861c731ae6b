"""Drawing of predicted speed-ups beside measured ones."""

from collections.abc import Sequence
from typing import Any

from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.cells import percent
from specdec_cli.report.drawings import canvas
from specdec_cli.report.drawings.panels import Line, draw_panels, placed
from specdec_cli.report.findings import residual
from specdec_cli.report.folder import ReportedRun

_BAND = 5  # percent


def draw_predictions(figure: Any, run: ReportedRun) -> bool:
    """Draw the relative error by k, with its interval. Returns whether there are predictions."""

    def begin(axis: Any) -> None:
        axis.axhline(0, color=canvas.FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
        axis.axhspan(-_BAND, _BAND, color=canvas.FAINT, alpha=0.15, linewidth=0)

    def draw(line: Line) -> None:
        line.plot(lambda p: percent(residual(p)), _span, linestyle="none")

    panels = placed(run, lambda p: residual(p) is not None)
    label = "predicted over measured (%)"
    return bool(draw_panels(figure, run, panels, draw, label, begin, is_titled=False))


def _span(point: Point) -> Sequence[float] | None:
    ends = point.prediction.speedup_error_ci if point.prediction is not None else None
    return None if ends is None else [100 * end for end in ends]
