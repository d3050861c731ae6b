"""Decoding speeds of a comparison, beside those of plain decoding."""

from typing import Any

from specdec_cli.report.cells import number
from specdec_cli.report.drawings.panels import Line, draw_panels, placed
from specdec_cli.report.folder import ReportedRun, baseline_of

_speed = number("decode_tokens_per_second")


def draw_speeds(figure: Any, run: ReportedRun) -> bool:
    """Draw tokens a second by draft TP. Returns whether the run is a comparison with points."""

    def draw(line: Line) -> None:
        line.plot(_speed, lambda p: p.decode_tokens_per_second_ci)
        plain = baseline_of(run.points, next(iter(line.points.values())))
        if plain is not None and (speed := _speed(plain)) is not None:
            look = {"color": line.style["color"], "linewidth": 1, "linestyle": (0, (4, 3))}
            line.axis.axhline(speed, **look)

    panels = placed(run, _speed) if run.is_comparison else {}
    axes = draw_panels(figure, run, panels, draw, "tokens/s")
    for axis in axes:
        axis.set_yscale("log")
        # Powers of ten would be markup, which text in drawings is never taken for.
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="minor", labelsize=7)
    return bool(axes)
