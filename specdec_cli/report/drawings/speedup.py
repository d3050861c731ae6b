"""Speed-ups over plain decoding, with their intervals."""

from collections.abc import Sequence
from typing import Any

from specdec_cli.report.drawings import canvas
from specdec_cli.report.drawings.panels import MOST_PANELS, first_number, placed, x_label
from specdec_cli.report.findings import Best
from specdec_cli.report.folder import ReportedRun


def draw_speedup(figure: Any, run: ReportedRun, bests: Sequence[Best]) -> bool:
    """Draw speed-ups by proposal length or draft TP. Returns whether there are any."""
    panels = {
        panel: lines
        for panel, lines in placed(run).items()
        if any(p.speedup is not None for line in lines.values() for p in line.values())
    }
    if not panels:
        return False
    panels = dict(list(panels.items())[:MOST_PANELS])
    series = sorted({name for lines in panels.values() for name in lines}, key=first_number)
    best = {id(b.point) for b in bests if b.point is not None}
    axes = canvas.make_axes(figure, len(panels), 3.1)
    for axis, (panel, lines) in zip(axes, panels.items(), strict=True):
        axis.axhline(1, color=canvas.FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
        ticks = set[int]()
        for name, line in sorted(lines.items()):
            known = {x: (s, p) for x, p in sorted(line.items()) if (s := p.speedup) is not None}
            if not known:
                continue
            ticks |= known.keys()
            style = canvas.style_of(series.index(name))
            # The line starts at plain decoding if x is k.
            drawn = ({} if run.is_comparison else {0: 1.0}) | {x: y for x, (y, _) in known.items()}
            axis.plot(*zip(*drawn.items(), strict=True), linewidth=1.5, markersize=4.5,
                      label=canvas.safe(name), **style)  # fmt: skip
            for x, (y, point) in known.items():
                if (ends := point.speedup_ci) is not None:
                    axis.errorbar(
                        x, y, canvas.reach(y, ends), color=style["color"], capsize=3, linewidth=1.2
                    )
                if id(point) in best:
                    axis.plot(x, y, "o", markersize=13, mfc="none", mec=style["color"], mew=1.6)
        set_x_ticks(axis, run, ticks if run.is_comparison else ticks | {0})
        axis.set_title(canvas.short(canvas.safe(panel)))
        if len(panels) == 1:
            axis.text(
                1, 1, "plain decoding ", color=canvas.FAINT, ha="right", va="bottom", fontsize=8,
                transform=axis.get_yaxis_transform(),
            )  # fmt: skip
    shown = [p for lines in panels.values() for line in lines.values() for p in line.values()]
    ends = [1.0, *(s for p in shown if (s := p.speedup) is not None)]
    ends += [end for p in shown for end in p.speedup_ci or ()]
    pad = 0.06 * (max(ends) - min(ends)) + 0.02
    axes[0].set_ylim(max(0.0, min(ends) - pad), max(ends) + pad)
    canvas.label_axes(axes, x_label(run), "speed-up over k = 0 (×)")
    canvas.add_legend(figure, axes)
    return True


def set_x_ticks(axis: Any, run: ReportedRun, ticks: set[int]) -> None:
    """Ticks at the proposal lengths or draft TPs that were measured."""
    shown = sorted(ticks)
    if run.is_comparison:
        axis.set_xscale("log", base=2)
        axis.set_xticks(shown, map(str, shown))
        axis.minorticks_off()
        axis.set_xlim(min(shown) / 1.4, max(shown) * 1.4)
    else:
        step = -(-len(shown) // 12)
        axis.set_xticks(shown[::step])
