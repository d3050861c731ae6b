"""Draws the plots of a report with matplotlib, without a display."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from specdec_cli.errors import SetupError
from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.content import Content, conclusion
from specdec_cli.report.drawings.canvas import (
    STYLE,
    lay_out,
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
from specdec_cli.report.drawings.load import advised_by_rate, draw_load
from specdec_cli.report.drawings.panels import axis_of
from specdec_cli.report.drawings.rounds import draw_acceptance, draw_experts, draw_rounds
from specdec_cli.report.drawings.rows import draw_categories, draw_comparisons


@dataclass(frozen=True, slots=True)
class Plot:
    """A drawn plot.

    about: a sentence that says what the plot shows.
    conclusion: a sentence that says what follows from it; "" if there is none.
    svg: an SVG element to put into an HTML page; "" if none was requested.
    files: the contents of the plot's file in each requested format, by format (see `PICTURES`).
    """

    name: str
    about: str
    conclusion: str
    svg: str
    files: Mapping[str, bytes]

    @property
    def caption(self) -> str:
        """The description followed by the conclusion. It is also the image's alternative text."""
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
    """Draw one plot. Return None if there is nothing to draw. Raises `SetupError` without
    matplotlib.

    draw: a function that draws into a figure and returns whether there was anything to draw.
    pictures: the file formats to draw the plot in.
    svg: whether to draw it as an SVG element for an HTML page as well.
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
        lay_out(figure)
        files = {form: picture_of(figure, form, name) for form in pictures}
        shown = svg_of(figure, name) if svg else ""
        return Plot(name, about, conclusion, shown, files)


# For each plot: a sentence that describes it, and the function that draws it.
_DRAWINGS: Mapping[str, tuple[str, Callable[..., bool]]] = {
    "speedup": (
        "Speed-up over plain decoding by {axis}, with 95 % intervals{marks}.",
        lambda f, c: draw_speedup(f, c.run, c.bests),
    ),
    "load": (
        "Goodput, mean time from when a request is due to its end{advised}, by request rate; "
        "overloaded points are left out.",
        lambda f, c: draw_load(f, c.run, c.bests),
    ),
    "speeds": (
        "Decoding speed by draft TP at each target TP, on a logarithmic scale; dashed lines "
        "are plain decoding.",
        lambda f, c: draw_speeds(f, c.run),
    ),
    "break_even": (
        "Tokens a round over all rounds (solid), and the break-even at the measured costs "
        "(dashed), with 95 % intervals. Speculation pays if the solid line is above the dashed "
        "one.",
        lambda f, c: draw_break_even(f, c.run),
    ),
    "comparisons": (
        "Ratio of decoding speeds of two arms, each at its fastest k, over the same prompts, "
        "with 95 % intervals: filled over all prompts, hollow by category. Where an interval "
        "crosses the line, the two are tied.",
        lambda f, c: draw_comparisons(f, c.run),
    ),
    "acceptance": (
        "Share of rounds that accept the proposal at a position: of all rounds (marginal), and "
        "of those that accept all earlier proposals (conditional), with 95 % intervals.",
        lambda f, c: draw_acceptance(f, c.run),
    ),
    "rounds": (
        "Mean time of an engine round by {axis}, split by stage, with the 95 % "
        "interval of the total.",
        lambda f, c: draw_rounds(f, c.run),
    ),
    "experts": (
        "Time of scoring (solid) and distinct experts that it reads in a layer (dashed), by "
        "the tokens scored for each sequence.",
        lambda f, c: draw_experts(f, c.run),
    ),
    "categories": (
        "{point} Speed-up and tokens a round by category of prompt, with 95 % intervals.",
        lambda f, c: draw_categories(f, c.shown, c.category_point[:-1]),
    ),
    "predictions": (
        "Relative error of the predicted speed-up by k, with 95 % intervals. The line is an error "
        "of 0, and the band is 5 %.",
        lambda f, c: draw_predictions(f, c.run),
    ),
}


def plots(
    content: Content, pictures: Collection[str] = ("png",), *, svg: bool = True
) -> list[Plot]:
    """Draw every plot for which the run has data. Raises `SetupError` without matplotlib.

    pictures: the file formats to draw each plot in.
    svg: whether to draw each plot as an SVG element for an HTML page as well.
    """
    names = {
        "axis": axis_of(content.run),
        "point": content.category_point,
        "marks": _marks(content),
        "advised": ", and the recommended k" if advised_by_rate(content.bests) else "",
    }
    found = [
        drawing(
            *(name, about.format_map(names), partial(draw, c=content), pictures),
            svg=svg,
            conclusion=conclusion(name, content),
        )
        for name, (about, draw) in _DRAWINGS.items()
    ]
    return [plot for plot in found if plot is not None]


def _marks(content: Content) -> str:
    """Explain the marks in the plot of speed-ups; "" if it has none. Plain decoding is a line of
    that plot, and is not marked."""

    def is_marked(point: Point | None) -> bool:
        return point is not None and not point.is_baseline and point.speedup is not None

    if any(is_marked(best.advised) for best in content.bests):
        return "; a ring marks the recommended point, a square the fastest if different"
    if any(is_marked(best.fastest) for best in content.bests):
        return "; a square marks the fastest point"
    return ""
