"""The plots of a report, drawn with matplotlib without a display."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec_cli.errors import SetupError
from specdec_cli.report.content import Content
from specdec_cli.report.drawings.acceptance import draw_acceptance
from specdec_cli.report.drawings.canvas import (
    STYLE,
    png_of,
    svg_of,
    without_display,
    without_talk,
)
from specdec_cli.report.drawings.categories import draw_categories
from specdec_cli.report.drawings.comparisons import draw_comparisons
from specdec_cli.report.drawings.experts import draw_experts
from specdec_cli.report.drawings.panels import axis_of
from specdec_cli.report.drawings.predictions import draw_predictions
from specdec_cli.report.drawings.rounds import draw_rounds
from specdec_cli.report.drawings.speeds import draw_speeds
from specdec_cli.report.drawings.speedup import draw_speedup
from specdec_cli.report.findings import residuals_in_words
from specdec_cli.report.folder import ReportedRun


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawn plot. caption: also the alternative text. png, svg: empty if not asked for."""

    name: str
    title: str
    caption: str
    png: bytes
    svg: str


def plots(content: Content, *, png: bool = True, svg: bool = True) -> list[Plot]:
    """Every plot that the run has figures for. Raises `SetupError` without matplotlib."""
    run = content.run
    without_display()
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise SetupError(
            "plots need the package matplotlib", "pip install matplotlib, or leave out html and png"
        ) from None
    drawings: list[tuple[str, str, str, Callable[[Any], bool]]] = [
        (
            "speedup",
            "Speed-up",
            f"Speed-up over plain decoding by {axis_of(run)}, with 95 % intervals; rings mark the "
            "best at each batch size.",
            lambda figure: draw_speedup(figure, run, content.bests),
        ),
        (
            "speeds",
            "Tokens a second",
            "Decoding speed by draft TP at each target TP, on a logarithmic scale; dashed lines "
            "are plain decoding.",
            lambda figure: draw_speeds(figure, run),
        ),
        (
            "comparisons",
            "Arm against arm",
            "Ratio of decoding speeds of two arms, each at its fastest k, over the same prompts, "
            "with 95 % intervals: filled over all prompts, hollow by category. Where an interval "
            "crosses the line, the two are tied.",
            lambda figure: draw_comparisons(figure, run),
        ),
        (
            "acceptance",
            "Acceptance by position",
            "Share of rounds in which the proposal at a position stands: in all rounds (marginal), "
            "and in those whose earlier proposals stood (conditional).",
            lambda figure: draw_acceptance(figure, run),
        ),
        (
            "rounds",
            "Where a round's time goes",
            f"Mean time of an engine round by {axis_of(run)}, split by stage.",
            lambda figure: draw_rounds(figure, run),
        ),
        (
            "experts",
            "Experts that scoring reads",
            "Time of scoring (solid) and distinct experts that it reads in a layer (dashed), by "
            f"the tokens scored for each sequence.{_routing_of(run)}",
            lambda figure: draw_experts(figure, run),
        ),
        (
            "categories",
            "By category",
            "Mean tokens a round by category of prompt, the target's own token included.",
            lambda figure: draw_categories(figure, content.tables["categories"]),
        ),
        (
            "predictions",
            "Predicted and measured speed-up",
            "Each point's predicted speed-up against the measured one, with its 95 % interval; "
            "the numbers are k. On the line they agree, and the band is 5 %."
            f"{residuals_in_words(run)}",
            lambda figure: draw_predictions(figure, run),
        ),
    ]
    found = []
    with matplotlib.rc_context(STYLE), without_talk():
        for name, title, caption, draw in drawings:
            figure = Figure(layout="constrained")
            if draw(figure):
                picture = png_of(figure) if png else b""
                found.append(
                    Plot(name, title, caption, picture, svg_of(figure, name) if svg else "")
                )
    return found


def _routing_of(run: ReportedRun) -> str:
    if run.setting("target", "load_format") != "dummy":
        return ""
    return " The weights are random and choose evenly, which trained routers do not."
