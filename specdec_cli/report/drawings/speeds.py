"""Decoding speeds of a comparison, beside those of plain decoding."""

from typing import Any

from specdec_cli.report.drawings import canvas
from specdec_cli.report.drawings.panels import MOST_PANELS, first_number, placed, x_label
from specdec_cli.report.drawings.speedup import set_x_ticks
from specdec_cli.report.folder import ReportedRun, baseline_of

_NAME = "decode_tokens_per_second"


def draw_speeds(figure: Any, run: ReportedRun) -> bool:
    """Draw tokens a second by draft TP. Returns whether the run is a comparison with points."""
    panels = dict(list(placed(run).items())[:MOST_PANELS]) if run.is_comparison else {}
    if not panels:
        return False
    series = sorted({name for lines in panels.values() for name in lines}, key=first_number)
    axes = canvas.make_axes(figure, len(panels), 3.1)
    for axis, (panel, lines) in zip(axes, panels.items(), strict=True):
        ticks = set[int]()
        for name, line in sorted(lines.items()):
            index = series.index(name)
            style, factor = canvas.style_of(index), 2 ** canvas.dodged(index, len(series))
            drawn = {x: p for x, p in sorted(line.items()) if p.number(_NAME) is not None}
            canvas.plot_with_intervals(
                axis, [x * factor for x in drawn], [p.number(_NAME) or 0.0 for p in drawn.values()],
                [p.decode_tokens_per_second_ci for p in drawn.values()], label=canvas.safe(name),
                **style,
            )  # fmt: skip
            ticks |= drawn.keys()
            plain = baseline_of(run.points, next(iter(line.values())))
            if plain is not None and (speed := plain.number(_NAME)) is not None:
                axis.axhline(speed, color=style["color"], linewidth=1, linestyle=(0, (4, 3)))
        set_x_ticks(axis, run, ticks)
        axis.set_yscale("log")
        # Powers of ten would be markup, which text in drawings is never taken for.
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="minor", labelsize=7)
        axis.set_title(canvas.short(canvas.safe(panel)))
    canvas.label_axes(axes, x_label(run), "tokens/s")
    canvas.add_legend(figure, axes)
    return True
