"""Draws line plots whose x axis is the proposal length or, for compare-tp, the draft's TP.

There is a panel for each batch size, request rate or target TP. The plots show speed-ups over plain
decoding, tokens per round and those needed to break even, errors of predicted speed-ups, and
decoding speeds of compare-tp.
"""

from collections.abc import Sequence
from typing import Any

from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.cells import number, percent
from specdec_cli.report.drawings import canvas
from specdec_cli.report.drawings.panels import Line, draw_panels, placed
from specdec_cli.report.findings import Finding, residual
from specdec_cli.report.folder import ReportedRun, baseline_of
from specdec_cli.report.tables import even_of, tokens_over_all_rounds

_BAND = 5  # predictions within this many percent of the measurement are in a shaded band
_speed = number("decode_tokens_per_second")


def draw_speedup(figure: Any, run: ReportedRun, bests: Sequence[Finding]) -> bool:
    """Draw speed-ups by proposal length or draft TP. Returns whether there are any."""
    best = {id(b.advised) for b in bests if b.advised is not None}
    fastest = {id(b.fastest) for b in bests if b.fastest is not None}
    limits = [1.0]

    def begin(axis: Any) -> None:
        axis.axhline(
            1, color=canvas.FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1,
            label="plain decoding",
        )  # fmt: skip

    def draw(line: Line) -> None:
        known = [(line.place(x), p.speedup or 0.0, p) for x, p in line.points.items()]
        # If the x axis is k, begin the line at k = 0, where the speed-up is 1.
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


def draw_break_even(figure: Any, run: ReportedRun) -> bool:
    """Draw tokens per round by k, and the tokens per round at which speculation breaks even.
    Returns whether anything was drawn."""

    def draw(line: Line) -> None:
        line.plot(
            tokens_over_all_rounds, lambda p: p.tokens_per_round_ci,
            label=f"{line.name}: tokens a round",
        )  # fmt: skip
        line.plot(
            lambda p: even_of(p).tokens_per_round, lambda p: even_of(p).tokens_per_round_ci,
            label=f"{line.name}: breaks even", linestyle=(0, (4, 3)), mfc="none",
        )  # fmt: skip

    def is_known(point: Point) -> bool:
        return point.break_even is not None and tokens_over_all_rounds(point) is not None

    panels = {} if run.is_comparison else placed(run, is_known)
    label = "tokens a round (all rounds)"
    axes = draw_panels(figure, run, panels, draw, label, is_titled=False)
    if axes:
        axes[0].set_ylim(bottom=min(1.0, axes[0].get_ylim()[0]))
    return bool(axes)


def draw_predictions(figure: Any, run: ReportedRun) -> bool:
    """Draw the relative error of predictions by k, with its interval. Returns whether there are
    predictions."""

    def begin(axis: Any) -> None:
        axis.axhline(0, color=canvas.FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
        axis.axhspan(-_BAND, _BAND, color=canvas.FAINT, alpha=0.15, linewidth=0)

    def ends(point: Point) -> Sequence[float] | None:
        found = point.prediction and point.prediction.speedup_error_ci
        return [100 * end for end in found] if found else None

    def draw(line: Line) -> None:
        line.plot(lambda p: percent(residual(p)), ends, linestyle="none")

    panels = placed(run, lambda p: residual(p) is not None)
    label = "predicted over measured (%)"
    return bool(draw_panels(figure, run, panels, draw, label, begin, is_titled=False))


def draw_speeds(figure: Any, run: ReportedRun) -> bool:
    """Draw tokens per second by draft TP for a compare-tp run. Returns whether anything was drawn,
    which is False for other runs."""

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
        # Matplotlib labels logarithmic ticks with powers of ten, whose exponents need markup. As
        # markup is disabled, write plain numbers.
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.tick_params(axis="y", which="minor", labelsize=7)
    return bool(axes)
