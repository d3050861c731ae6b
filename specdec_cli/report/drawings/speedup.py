"""Speed-ups over plain decoding, with their intervals."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_cli.experiment.records import Point
from specdec_cli.report.drawings.canvas import (
    FAINT,
    add_legend,
    label_axes,
    make_axes,
    safe,
    short,
    style_of,
)
from specdec_cli.report.drawings.panels import MOST_PANELS, first_number, placed, x_label
from specdec_cli.report.findings import Best
from specdec_cli.report.folder import ReportedRun


def draw_speedup(figure: Any, run: ReportedRun, bests: Sequence[Best]) -> bool:
    """Draw speed-ups by proposal length or draft TP. Returns whether there are any."""
    panels = {
        panel: lines
        for panel, lines in placed(run).items()
        if any(p.speedup is not None for line in lines.values() for _, p in line)
    }
    if not panels:
        return False
    panels = dict(list(panels.items())[:MOST_PANELS])
    series = sorted({name for lines in panels.values() for name in lines}, key=first_number)
    best = {id(b.point) for b in bests if b.point is not None}
    axes = make_axes(figure, len(panels), 3.1)
    for axis, (panel, lines) in zip(axes, panels.items(), strict=True):
        axis.axhline(1, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        ticks = set()
        for name, line in sorted(lines.items()):
            known = [(place.x, s, p) for place, p in line if (s := p.speedup) is not None]
            if not known:
                continue
            known.sort(key=lambda item: item[0])
            ticks |= {x for x, _, _ in known}
            style = style_of(series.index(name))
            _line(axis, known, safe(name), style, starts_at_plain=not run.is_comparison)
            for x, y, point in known:
                if id(point) in best:
                    axis.plot(x, y, "o", markersize=13, mfc="none", mec=style["color"], mew=1.6)
        _x_ticks(axis, run, ticks if run.is_comparison else ticks | {0})
        axis.set_title(short(safe(panel)))
        if len(panels) == 1:
            axis.text(
                1, 1, "plain decoding ", color=FAINT, ha="right", va="bottom", fontsize=8,
                transform=axis.get_yaxis_transform(),
            )  # fmt: skip
    shown = [p for lines in panels.values() for line in lines.values() for _, p in line]
    axes[0].set_ylim(*_span_of(run, shown))
    label_axes(axes, x_label(run), "speed-up over k = 0 (×)")
    add_legend(figure, axes)
    return True


def _span_of(run: ReportedRun, points: Sequence[Point]) -> tuple[float, float]:
    """Limits of the y axis around every speed-up, its interval and plain decoding."""
    reach = [1.0, *(s for p in points if (s := p.speedup) is not None)]
    reach += [end for p in points for end in p.speedup_ci or ()]
    pad = 0.06 * (max(reach) - min(reach)) + 0.02
    return max(0.0, min(reach) - pad), max(reach) + pad


def _line(
    axis: Any,
    known: Sequence[tuple[int, float, Point]],
    name: str,
    style: Mapping[str, Any],
    *,
    starts_at_plain: bool,
) -> None:
    """Draw speed-ups with their intervals; the line starts at plain decoding if x is k."""
    start = [(0, 1.0)] if starts_at_plain else []
    xs, ys = zip(*start, *((x, y) for x, y, _ in known), strict=True)
    axis.plot(xs, ys, linewidth=1.5, markersize=4.5, label=name, **style)
    for x, y, point in known:
        if (interval := point.speedup_ci) is not None:
            reach = [[max(0.0, y - interval[0])], [max(0.0, interval[1] - y)]]
            axis.errorbar(x, y, reach, color=style["color"], capsize=3, linewidth=1.2)


def _x_ticks(axis: Any, run: ReportedRun, ticks: set[int]) -> None:
    shown = sorted(ticks)
    if run.is_comparison:
        axis.set_xscale("log", base=2)
        axis.set_xticks(shown, map(str, shown))
        axis.minorticks_off()
        axis.set_xlim(min(shown) / 1.4, max(shown) * 1.4)
    else:
        step = -(-len(shown) // 12)
        axis.set_xticks(shown[::step])
