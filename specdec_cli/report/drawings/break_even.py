"""Tokens a round, and those at which speculation is as fast as plain decoding."""

from typing import Any

from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.drawings.panels import Line, draw_panels, placed
from specdec_cli.report.folder import ReportedRun
from specdec_cli.report.tables import even_of, tokens_over_all_rounds


def draw_break_even(figure: Any, run: ReportedRun) -> bool:
    """Draw both by k, a panel for each batch size. Returns whether the run recorded them."""

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
