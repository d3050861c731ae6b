"""The time of scoring and the distinct experts that it reads, by the number of tokens scored."""

from typing import Any

from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.drawings import canvas
from specdec_cli.report.drawings.panels import MOST_PANELS, placed
from specdec_cli.report.folder import ReportedRun, baseline_of


def draw_experts(figure: Any, run: ReportedRun) -> bool:
    """Draw verify time and distinct experts by width. Returns whether any experts were counted."""
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
    axes[0].set_ylim(0, 1.05 * slowest or 1.0)  # the others share it
    counts[-1].set_ylabel("distinct experts a layer")
    canvas.label_axes(axes, "tokens scored a sequence, k + 1", "verify time (ms)")
    canvas.add_legend(figure, [*axes, *counts])
    return True


def _panels(run: ReportedRun) -> dict[str, dict[str, list[Point]]]:
    """The points that counted experts, by k from plain decoding on, by batch size and draft."""
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
