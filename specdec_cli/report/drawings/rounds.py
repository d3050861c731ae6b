"""Draws figures of rounds: the time of each stage, the acceptance rate at each position of a
proposal, and verify time and distinct experts against the number of scored tokens."""

from typing import Any

from specdec_cli.core.figures import STAGES
from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.drawings import canvas
from specdec_cli.report.drawings.canvas import (
    FAINT,
    add_intervals,
    add_legend,
    label_axes,
    make_axes,
    safe,
    short,
    style_of,
)
from specdec_cli.report.drawings.panels import MOST_PANELS, placed, x_label
from specdec_cli.report.findings import longest_proposals
from specdec_cli.report.folder import ReportedRun, baseline_of

_PARTS = (*STAGES, "other")
_COLOURS = ("#e69f00", "#cc79a7", "#0072b2", "#009e73", "#d55e00", "#999999")


def draw_rounds(figure: Any, run: ReportedRun) -> bool:
    """Draw a bar for each point with the time of a round, divided into stages. Returns whether any
    round was timed."""
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
    # This plot has a panel for each line of the speed-up plot. If a panel of the speed-up plot has
    # at most 2 or 3 lines, make 2 or 3 columns here, so that a row shows the lines of one panel.
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
    """Return the time of a stage in ms. `other` is the time of a round outside all stages."""
    if stage != "other":
        return max(0.0, point.number(f"{stage}_ms") or 0.0)
    named = sum(_stage(point, name) for name in STAGES)
    return max(0.0, (point.number("round_ms") or 0.0) - named)


def draw_acceptance(figure: Any, run: ReportedRun) -> bool:
    """Draw the acceptance rate at each position, for each draft at its largest k and the smallest
    batch size measured with that k. Returns whether any acceptance is known."""
    longest = longest_proposals(run)
    if not longest:
        return False
    (axis,) = make_axes(figure, 1, 3.2)
    most = 1
    for index, (name, point) in enumerate(longest.items()):
        style = style_of(index)
        prefix = f"{safe(name)}, " if len(longest) > 1 else ""
        for key, word, dash in [
            ("acceptance_rate_per_pos", "marginal", "-"),
            ("conditional_acceptance_rate_per_pos", "conditional", "--"),
        ]:
            known = [
                (i, 100 * r) for i, r in enumerate(getattr(point.metrics, key), 1) if r is not None
            ]
            if known:
                xs, ys = zip(*known, strict=True)
                most = max(most, *xs)
                intervals = dict(enumerate(getattr(point, f"{key}_ci"), 1))
                ends = [intervals.get(x) for x in xs]
                is_hollow = {"mfc": "none"} if dash == "--" else {}
                shift = canvas.dodged(2 * index + (dash == "--"), 2 * len(longest))
                canvas.plot_with_intervals(
                    axis, [x + shift for x in xs], ys,
                    [[100 * end for end in e] if e else None for e in ends],
                    linestyle=dash, label=prefix + word, **style, **is_hollow,
                )  # fmt: skip
    axis.set_ylim(0, 103)
    axis.set_xticks(range(1, most + 1, -(-most // 16)))
    label_axes([axis], "position in the draft (1 is proposed first)", "accepted (%)")
    add_legend(figure, [axis])
    return True


def draw_experts(figure: Any, run: ReportedRun) -> bool:
    """Draw verify time and distinct experts by the number of scored tokens. Returns whether any
    experts were counted."""
    panels = {} if run.is_comparison else _panels(run)
    if not panels:
        return False
    axes = canvas.make_axes(figure, len(panels), 3.1)
    counts = [axis.twinx() for axis in axes]
    every = [p for lines in panels.values() for line in lines.values() for p in line]
    slowest, most = (
        max(point.number(name) or 0.0 for point in every)
        for name in ("verify_ms", "distinct_experts")
    )
    for axis, count, (title, lines) in zip(axes, counts, panels.items(), strict=True):
        for index, (name, line) in enumerate(sorted(lines.items())):
            widths, style = [point.k + 1 for point in line], canvas.style_of(index)
            of = f", {canvas.safe(name)}" if len(lines) > 1 else ""
            shift = canvas.dodged(index, len(lines))
            canvas.plot_with_intervals(
                axis, [width + shift for width in widths],
                [p.number("verify_ms") or 0.0 for p in line], [p.verify_ms_ci for p in line],
                label=f"verify time{of}", **style,
            )  # fmt: skip
            count.plot(
                widths, [p.number("distinct_experts") for p in line], linewidth=1.2, markersize=5,
                linestyle=(0, (4, 3)), mfc="none", label=f"distinct experts{of}", **style,
            )  # fmt: skip
        axis.set_title(title)
        count.set_ylim(0, 1.05 * most or 1.0)
        count.grid(False)
        count.spines["right"].set_visible(True)
    axes[0].set_ylim(0, 1.05 * slowest or 1.0)  # the other axes share these limits
    counts[-1].set_ylabel("distinct experts a layer")
    canvas.label_axes(axes, "tokens scored a sequence, k + 1", "verify time (ms)")
    canvas.add_legend(figure, [*axes, *counts])
    return True


def _panels(run: ReportedRun) -> dict[str, dict[str, list[Point]]]:
    """Group the points at which experts were counted, by batch size or request rate and by draft.
    Each list is sorted by k and starts with plain decoding, if experts were counted there."""
    found: dict[str, dict[str, list[Point]]] = {}
    for panel, lines in list(placed(run).items())[:MOST_PANELS]:
        for name, line in lines.items():
            plain = baseline_of(run.points, next(iter(line.values())))
            by_k = line if plain is None else {0: plain} | line
            points = [by_k[k] for k in sorted(by_k)]
            points = [p for p in points if p.number("distinct_experts") is not None]
            if points:
                found.setdefault(panel, {})[name] = points
    return found
