"""The time of a round by stage."""

from typing import Any

from specdec_cli.core.figures import STAGES
from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.drawings.canvas import (
    FAINT,
    add_intervals,
    add_legend,
    label_axes,
    make_axes,
    safe,
    short,
)
from specdec_cli.report.drawings.panels import MOST_PANELS, placed, x_label
from specdec_cli.report.folder import ReportedRun, baseline_of

_PARTS = (*STAGES, "other")
_COLOURS = ("#e69f00", "#cc79a7", "#0072b2", "#009e73", "#d55e00", "#999999")


def draw_rounds(figure: Any, run: ReportedRun) -> bool:
    """Draw bars of the stages of a round. Returns whether there are any."""
    groups: dict[str, dict[int, Point]] = {}
    for panel, lines in placed(run).items():
        for name, line in lines.items():
            title = panel if len(lines) == 1 and not run.is_comparison else f"{name}, {panel}"
            base = baseline_of(run.points, next(iter(line.values())))
            groups[title] = {0: base, **line} if base is not None else line
    if not groups:
        groups = {p.level_in_words: {0: p} for p in run.points if p.is_ok and p.is_baseline}
    groups = {
        title: group
        for title, group in groups.items()
        if any(p.number("round_ms") is not None for p in group.values())
    }
    if not groups:
        return False
    groups = dict(list(groups.items())[:MOST_PANELS])
    # One row for each panel of the speed-up plot, if its lines fit side by side.
    widest = max((len(lines) for lines in placed(run).values()), default=1)
    axes = make_axes(figure, len(groups), 2.7, widest if 1 < widest <= 3 else 3)
    for axis, (title, group) in zip(axes, groups.items(), strict=True):
        xs = sorted(group)
        bottom = [0.0] * len(xs)
        for stage, colour in zip(_PARTS, _COLOURS, strict=True):
            heights = [_stage(group[x], stage) for x in xs]
            if any(h > 0 for h in heights):
                axis.bar(range(len(xs)), heights, 0.72, bottom, label=stage,
                         color=colour)  # fmt: skip
            bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
        wholes = [group[x].number("round_ms") or 0.0 for x in xs]
        ends = [group[x].round_ms_ci for x in xs]
        add_intervals(axis, range(len(xs)), wholes, ends, color=FAINT, linewidth=1.4)
        plain = "none" if run.is_comparison else "0"
        axis.set_xticks(range(len(xs)), [plain if x == 0 else str(x) for x in xs])
        axis.set_title(short(safe(title)))
    label_axes(axes, x_label(run), "time of a round (ms)")
    add_legend(figure, axes)
    return True


def _stage(point: Point, stage: str) -> float:
    """A stage's time in ms; `other` is the rest of the round."""
    if stage != "other":
        return max(0.0, point.number(f"{stage}_ms") or 0.0)
    named = sum(_stage(point, name) for name in STAGES)
    return max(0.0, (point.number("round_ms") or 0.0) - named)
