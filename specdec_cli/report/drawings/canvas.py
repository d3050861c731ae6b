"""Helpers for all drawings: colours, grids of axes, labels, and saving figures as PNG, PDF or SVG.

Text is never interpreted as markup. Colours are readable on light and dark backgrounds.
"""

import io
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from specdec_cli.text import inert, one_line

# The colours of the Okabe-Ito palette (for colour-blind readers) that show on black and on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
# Seven markers and six colours have no common factor, so 42 lines look different.
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_INK = "#1b1e24"  # SVG uses the page's own text colour instead
FAINT = "#8a8f98"
_WIDTHS = {1: 6.4, 2: 8.2, 3: 9.6}  # inches, by the number of panels side by side
STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    **{f"{part}color": _INK for part in ("axes.edge", "axes.label", "text.", "xtick.", "ytick.")},
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    "text.parse_math": False,
    "svg.fonttype": "none",
    "font.family": "sans-serif",
}


def without_display() -> None:
    """Select matplotlib's backend without a display. Call this before importing matplotlib: the
    import fails if MPLBACKEND, which the user may have set, names an unknown backend."""
    os.environ["MPLBACKEND"] = "agg"


@contextmanager
def without_talk() -> Iterator[None]:
    """Silence matplotlib's warnings, such as those about characters that a font lacks."""
    logger = logging.getLogger("matplotlib")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


# Metadata to leave out, so that a picture's bytes depend only on its content.
_METADATA: Mapping[str, Mapping[str, None]] = {
    "png": {"Software": None},
    "pdf": dict.fromkeys(("Creator", "CreationDate")),
    "svg": dict.fromkeys(("Date", "Creator", "Format", "Type")),
}


def lay_out(figure: Any) -> None:
    """Place the axes so that all labels fit, and fix their positions. Otherwise `savefig` would
    place them again, as if the last tick's label did not extend beyond the axis."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def picture_of(figure: Any, form: str, name: str, **look: Any) -> bytes:
    """Render the figure as the bytes of an image file, by default with a white background.

    form: png, pdf or svg.
    name: the seed of the ids in an SVG file, which would otherwise be random.
    look: further arguments of matplotlib's `savefig`.
    """
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format=form, dpi=160, metadata=dict(_METADATA[form]), **look)
    return buffer.getvalue()


def svg_of(figure: Any, name: str) -> str:
    """Return the figure as an SVG element with a transparent background and the page's text colour.
    name: a prefix that makes its ids unique."""
    text = picture_of(figure, "svg", name, transparent=True).decode()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    # A page may contain several plots, and its ids must be unique.
    return (
        text.replace(' id="', f' id="{name}-')
        .replace('"#', f'"#{name}-')
        .replace("url(#", f"url(#{name}-")
    )


def make_axes(
    figure: Any, count: int, height: float, columns: int = 3, *, shares_y: bool = True
) -> list[Any]:
    """Make `count` axes in rows of at most `columns`, and never more than three.

    height: the height of each row, in inches.
    shares_y: whether all axes have the same y limits.
    """
    columns = max(1, min(columns, count, 3))
    rows = -(-count // columns)
    figure.set_size_inches(_WIDTHS[columns], height * rows + 0.5)
    axes = list(figure.subplots(rows, columns, squeeze=False, sharey=shares_y).flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    return axes[:count]


def label_axes(axes: Sequence[Any], x: str, y: str) -> None:
    """Write labels on the outer axes of a grid."""
    for index, axis in enumerate(axes):
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel(y)
        columns = axis.get_subplotspec().get_gridspec().ncols
        if index + columns >= len(axes):
            axis.set_xlabel(x)


def add_legend(figure: Any, axes: Sequence[Any]) -> None:
    """Add one legend below all panels, with as many entries per row as fit."""
    entries: dict[str, Any] = {}
    for axis in axes:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    if not entries:
        return
    inches = 0.75 + 0.075 * max(map(len, entries))
    fit = max(1, int(figure.get_size_inches()[0] / inches))
    figure.legend(
        entries.values(), entries.keys(), loc="outside lower center", ncols=min(fit, len(entries))
    )


def style_of(index: int) -> dict[str, Any]:
    return {
        "color": COLOURS[index % len(COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
    }


def reach(value: float, ends: Sequence[float]) -> list[list[float]]:
    """Return the lengths of an error bar below and above a value, as `errorbar` takes them."""
    return [[max(0.0, value - ends[0])], [max(0.0, ends[1] - value)]]


def draw_row(
    axis: Any, place: int, value: float, ends: Sequence[float] | None, **look: Any
) -> None:
    """Draw a value in its own row, with its interval if it has one."""
    if ends is not None:
        arms = reach(value, ends)
        axis.errorbar(value, place, xerr=arms, color=look["color"], capsize=3, linewidth=1.2)
    axis.plot(value, place, **look)


def name_rows(axis: Any, names: Sequence[str]) -> None:
    """Label the rows, from top to bottom."""
    axis.set_yticks(range(len(names)), [safe(name) for name in names])
    axis.set_ylim(len(names) - 0.4, -0.6)


def line_at_one(axis: Any) -> None:
    """Draw a vertical line at the ratio 1, where both speeds are equal."""
    axis.axvline(1, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)


def dodged(index: int, count: int) -> float:
    """Return a small x offset for line `index` of `count`, so that intervals do not overlap."""
    return (index - (count - 1) / 2) * min(0.14, 0.5 / max(1, count))


def plot_with_intervals(
    axis: Any,
    places: Sequence[float],
    values: Sequence[float],
    ends: Sequence[Sequence[float] | None],
    **look: Any,
) -> None:
    """Draw a line of points, each with its interval if it has one."""
    axis.plot(places, values, **{"linewidth": 1.5, "markersize": 4.5} | look)
    add_intervals(axis, places, values, ends, color=look["color"])


def add_intervals(
    axis: Any,
    places: Sequence[float],
    values: Sequence[float],
    ends: Sequence[Sequence[float] | None],
    **look: Any,
) -> None:
    """Draw the interval of each value that has one, all in one call, which is faster."""
    known = [
        (place, value, *(arm for (arm,) in reach(value, interval)))
        for place, value, interval in zip(places, values, ends, strict=True)
        if interval is not None
    ]
    if known:
        xs, ys, down, up = zip(*known, strict=True)
        shape = {"fmt": "none", "capsize": 2.5, "linewidth": 1.1}
        axis.errorbar(xs, ys, [down, up], **shape | look)


def safe(text: str) -> str:
    return one_line(inert(text))


def short(title: str) -> str:
    return title if len(title) <= 38 else f"…{title[-37:]}"
