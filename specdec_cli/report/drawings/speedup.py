"""Speed-ups over plain decoding, with their intervals."""

from collections.abc import Sequence
from typing import Any

from specdec_cli.report.drawings import canvas
from specdec_cli.report.drawings.panels import MOST_PANELS, placed, series_of, x_label
from specdec_cli.report.findings import Finding
from specdec_cli.report.folder import ReportedRun


def draw_speedup(figure: Any, run: ReportedRun, bests: Sequence[Finding]) -> bool:
    """Draw speed-ups by proposal length or draft TP. Returns whether there are any."""
    panels = {
        panel: lines
        for panel, lines in placed(run).items()
        if any(p.speedup is not None for line in lines.values() for p in line.values())
    }
    if not panels:
        return False
    panels = dict(list(panels.items())[:MOST_PANELS])
    series = series_of(run, panels)
    best = {id(b.point) for b in bests if b.point is not None}
    fastest = {id(b.fastest) for b in bests if b.fastest is not None}
    axes = canvas.make_axes(figure, len(panels), 3.1)
    for axis, (panel, lines) in zip(axes, panels.items(), strict=True):
        axis.axhline(
            1, color=canvas.FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1,
            label="plain decoding",
        )  # fmt: skip
        ticks = set[int]()
        for name, line in sorted(lines.items()):
            known = {x: (s, p) for x, p in sorted(line.items()) if (s := p.speedup) is not None}
            if not known:
                continue
            ticks |= known.keys()
            index = series.index(name)
            style, shift = canvas.style_of(index), canvas.dodged(index, len(series))
            places = {x: x * 2**shift if run.is_comparison else x + shift for x in known}
            # The line starts at plain decoding if x is k.
            first = [] if run.is_comparison else [(shift, 1.0, None)]
            drawn = first + [(places[x], y, p.speedup_ci) for x, (y, p) in known.items()]
            xs, ys, ends = zip(*drawn, strict=True)
            canvas.plot_with_intervals(axis, xs, ys, ends, label=canvas.safe(name), **style)
            for x, (y, point) in known.items():
                if id(point) in best:
                    axis.plot(
                        places[x], y, "o", markersize=13, mfc="none", mec=style["color"], mew=1.6
                    )
                elif id(point) in fastest:
                    axis.plot(
                        places[x], y, "s", markersize=12, mfc="none", mec=style["color"], mew=1.2
                    )
        set_x_ticks(axis, run, ticks if run.is_comparison else ticks | {0})
        axis.set_title(canvas.short(canvas.safe(panel)))
    shown = [p for lines in panels.values() for line in lines.values() for p in line.values()]
    limits = [1.0, *(s for p in shown if (s := p.speedup) is not None)]
    limits += [end for p in shown for end in p.speedup_ci or ()]
    pad = 0.06 * (max(limits) - min(limits)) + 0.02
    axes[0].set_ylim(max(0.0, min(limits) - pad), max(limits) + pad)
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
