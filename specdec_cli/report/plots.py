"""The plots of a report, drawn with matplotlib without a display."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from specdec_cli.errors import SetupError
from specdec_cli.report.content import Content, conclusion
from specdec_cli.report.drawings.canvas import (
    STYLE,
    picture_of,
    svg_of,
    without_display,
    without_talk,
)
from specdec_cli.report.drawings.lines import (
    draw_break_even,
    draw_predictions,
    draw_speeds,
    draw_speedup,
)
from specdec_cli.report.drawings.load import draw_load
from specdec_cli.report.drawings.panels import axis_of
from specdec_cli.report.drawings.rounds import draw_acceptance, draw_experts, draw_rounds
from specdec_cli.report.drawings.rows import draw_categories, draw_comparisons


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawn plot. about: its content, in words. conclusion: what to conclude from it, or "". svg:
    part of a page, or empty. files: by format, those of `PICTURES` that were asked for."""

    name: str
    about: str
    conclusion: str
    svg: str
    files: Mapping[str, bytes]

    @property
    def caption(self) -> str:
        """Both, also as the alternative text."""
        return f"{self.about} {self.conclusion}".rstrip()


PICTURES = ("png", "svg", "pdf")


def drawing(
    name: str,
    about: str,
    draw: Callable[[Any], bool],
    pictures: Collection[str],
    *,
    svg: bool,
    conclusion: str = "",
) -> Plot | None:
    """One plot; None if there is nothing to draw. Raises `SetupError` without matplotlib.

    draw: draws into a figure, and returns whether there was anything to draw.
    """
    without_display()
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise SetupError(
            "plots need the package matplotlib", "pip install matplotlib, or leave out html and png"
        ) from None
    with matplotlib.rc_context(STYLE), without_talk():
        figure = Figure(layout="constrained")
        if not draw(figure):
            return None
        files = {form: picture_of(figure, form, name) for form in pictures}
        shown = svg_of(figure, name) if svg else ""
        return Plot(name, about, conclusion, shown, files)


def plots(
    content: Content, pictures: Collection[str] = ("png",), *, svg: bool = True
) -> list[Plot]:
    """Every plot that the run has figures for. Raises `SetupError` without matplotlib.

    pictures: formats of files. svg: whether to draw for a page too.
    """
    run = content.run
    drawings: list[tuple[str, str, Callable[[Any], bool]]] = [
        (
            "speedup",
            f"Speed-up over plain decoding by {axis_of(run)}, with 95 % intervals; a ring marks "
            "the recommended point, a square the fastest where that is another.",
            lambda figure: draw_speedup(figure, run, content.bests),
        ),
        (
            "load",
            "Goodput, mean time of a request from the time at which it is due, and the recommended "
            "k, by rate of requests; overloaded points are left out.",
            lambda figure: draw_load(figure, run, content.bests),
        ),
        (
            "speeds",
            "Decoding speed by draft TP at each target TP, on a logarithmic scale; dashed lines "
            "are plain decoding.",
            lambda figure: draw_speeds(figure, run),
        ),
        (
            "break_even",
            "Tokens a round over all rounds (solid), and those at which the measured costs give "
            "the speed of plain decoding (dashed), with 95 % intervals. Where solid is above "
            "dashed, speculation pays.",
            lambda figure: draw_break_even(figure, run),
        ),
        (
            "comparisons",
            "Ratio of decoding speeds of two arms, each at its fastest k, over the same prompts, "
            "with 95 % intervals: filled over all prompts, hollow by category. Where an interval "
            "crosses the line, the two are tied.",
            lambda figure: draw_comparisons(figure, run),
        ),
        (
            "acceptance",
            "Share of rounds in which the proposal at a position stands: in all rounds (marginal), "
            "and in those whose earlier proposals stood (conditional), with 95 % intervals.",
            lambda figure: draw_acceptance(figure, run),
        ),
        (
            "rounds",
            f"Mean time of an engine round by {axis_of(run)}, split by stage, with the 95 % "
            "interval of the whole.",
            lambda figure: draw_rounds(figure, run),
        ),
        (
            "experts",
            "Time of scoring (solid) and distinct experts that it reads in a layer (dashed), by "
            "the tokens scored for each sequence.",
            lambda figure: draw_experts(figure, run),
        ),
        (
            "categories",
            f"{content.category_point} Speed-up and tokens a round by category of prompt, with "
            "95 % intervals.",
            lambda figure: draw_categories(figure, content.shown, content.category_point[:-1]),
        ),
        (
            "predictions",
            "Predicted speed-up over the measured one, less one, by k, with 95 % intervals. On the "
            "line they agree, and the band is 5 %.",
            lambda figure: draw_predictions(figure, run),
        ),
    ]
    found = [
        drawing(
            *(name, about, draw, pictures),
            svg=svg,
            conclusion=conclusion(name, content),
        )
        for name, about, draw in drawings
    ]
    return [plot for plot in found if plot is not None]
