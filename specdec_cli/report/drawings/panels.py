"""Arranges points in drawings: a panel for each setting, and a line for each draft."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.drawings import canvas
from specdec_cli.report.folder import ReportedRun

MOST_PANELS = 12
Panels = Mapping[str, dict[str, dict[int, Point]]]  # points by panel, line and x


@dataclass(frozen=True, slots=True)
class Line:
    """A line in a panel. points: the points by x. shift: the x offset that keeps intervals from
    overlapping. is_log: whether x is on a logarithmic scale."""

    axis: Any
    name: str
    points: Mapping[int, Point]
    shift: float
    style: Mapping[str, Any]
    is_log: bool

    def place(self, x: int) -> float:
        return x * 2**self.shift if self.is_log else x + self.shift

    def plot(
        self,
        of: Callable[[Point], float | None],
        ends: Callable[[Point], Sequence[float] | None],
        **look: Any,
    ) -> None:
        """Plot one figure of each point, with its interval."""
        points = self.points.values()
        canvas.plot_with_intervals(
            self.axis, list(map(self.place, self.points)), [of(p) or 0.0 for p in points],
            list(map(ends, points)), **{"label": self.name, **self.style, **look},
        )  # fmt: skip


def axis_of(run: ReportedRun) -> str:
    return "draft TP" if run.is_comparison else "proposal length"


def x_label(run: ReportedRun) -> str:
    return "draft TP (ranks)" if run.is_comparison else "proposed tokens a round, k"


def placed(run: ReportedRun, keep: Callable[[Point], object] = lambda p: p.is_ok) -> Panels:
    """Arrange the points with proposals for which `keep` is true, by panel, line and x."""
    found: dict[str, dict[str, dict[int, Point]]] = {}
    for point in run.points:
        if point.is_baseline or not keep(point) or (run.is_comparison and point.draft_tp is None):
            continue
        panel, line, x = point.level_in_words, run.labels[point.draft], point.k
        if run.is_comparison:
            panel, line, x = f"target TP {point.target_tp}", panel, point.draft_tp or 0
        found.setdefault(panel, {}).setdefault(line, {})[x] = point
    return dict(sorted(found.items(), key=lambda item: first_number(item[0])))


def draw_panels(
    figure: Any,
    run: ReportedRun,
    panels: Panels,
    draw: Callable[[Line], object],
    y_label: str,
    begin: Callable[[Any], object] = lambda axis: None,
    *,
    from_zero: bool = False,
    is_titled: bool = True,
) -> list[Any]:
    """Draw the lines of the first `MOST_PANELS` panels. Returns their axes; [] if there are none.

    draw: draws one line.
    begin: called with the axes of each panel before its lines are drawn.
    from_zero: whether the x axis has a tick at k = 0.
    is_titled: whether a panel has a title even if it is the only one.
    """
    panels = dict(list(panels.items())[:MOST_PANELS])
    if not panels:
        return []
    # Choose a draft's colour by its index in the sorted names of all panels, so that it is the same
    # in every panel, and in every drawing that shows the same drafts.
    names = sorted({name for lines in panels.values() for name in lines})
    if run.is_comparison:
        names.sort(key=first_number)
    axes: list[Any] = canvas.make_axes(figure, len(panels), 3.1)
    for axis, (title, lines) in zip(axes, panels.items(), strict=True):
        begin(axis)
        for name, points in sorted(lines.items()):
            index = names.index(name)
            shift, style = canvas.dodged(index, len(names)), canvas.style_of(index)
            ordered = dict(sorted(points.items()))
            draw(Line(axis, canvas.safe(name), ordered, shift, style, run.is_comparison))
        ticks = {x for points in lines.values() for x in points}
        shown = sorted(ticks | {0} if from_zero else ticks)
        axis.set_xticks(shown[:: -(-len(shown) // 12)])
        if run.is_comparison:
            axis.set_xscale("log", base=2)
            axis.set_xticks(shown, map(str, shown))
            axis.minorticks_off()
            axis.set_xlim(min(shown) / 1.4, max(shown) * 1.4)
        if is_titled or len(panels) > 1:
            axis.set_title(canvas.short(canvas.safe(title)))
    canvas.label_axes(axes, x_label(run), y_label)
    canvas.add_legend(figure, axes)
    return axes


def first_number(text: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, text))
    return (int(digits) if digits else 0, text)
