"""Speed-ups over plain decoding, with their intervals."""

from collections.abc import Sequence
from typing import Any

from specdec_cli.report.drawings import canvas
from specdec_cli.report.drawings.panels import Line, draw_panels, placed
from specdec_cli.report.findings import Finding
from specdec_cli.report.folder import ReportedRun


def draw_speedup(figure: Any, run: ReportedRun, bests: Sequence[Finding]) -> bool:
    """Draw speed-ups by proposal length or draft TP. Returns whether there are any."""
    best = {id(b.point) for b in bests if b.point is not None}
    fastest = {id(b.fastest) for b in bests if b.fastest is not None}
    limits = [1.0]

    def begin(axis: Any) -> None:
        axis.axhline(
            1, color=canvas.FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1,
            label="plain decoding",
        )  # fmt: skip

    def draw(line: Line) -> None:
        known = [(line.place(x), p.speedup or 0.0, p) for x, p in line.points.items()]
        # The line starts at plain decoding if x is k.
        first = [] if run.is_comparison else [(line.shift, 1.0, None)]
        xs, ys, ends = zip(*first, *((x, y, p.speedup_ci) for x, y, p in known), strict=True)
        canvas.plot_with_intervals(line.axis, xs, ys, ends, label=line.name, **line.style)
        ring = {"mfc": "none", "mec": line.style["color"]}
        for x, y, point in known:
            limits.extend((y, *(point.speedup_ci or ())))
            if id(point) in best:
                line.axis.plot(x, y, "o", markersize=13, mew=1.6, **ring)
            elif id(point) in fastest:
                line.axis.plot(x, y, "s", markersize=12, mew=1.2, **ring)

    panels = placed(run, lambda p: p.is_ok and p.speedup is not None)
    from_zero, label = not run.is_comparison, "speed-up over k = 0 (×)"
    axes = draw_panels(figure, run, panels, draw, label, begin, from_zero=from_zero)
    if axes:
        pad = 0.06 * (max(limits) - min(limits)) + 0.02
        axes[0].set_ylim(max(0.0, min(limits) - pad), max(limits) + pad)
    return bool(axes)
