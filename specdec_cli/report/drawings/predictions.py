"""Predicted speed-ups against measured ones."""

from typing import Any

from specdec_cli.experiment.records import Point
from specdec_cli.report.drawings import canvas
from specdec_cli.report.folder import ReportedRun


def draw_predictions(figure: Any, run: ReportedRun) -> bool:
    """Draw predicted against measured speed-ups. Returns whether there are any."""
    groups: dict[str, list[tuple[float, float, Point]]] = {}
    for point in run.points:
        predicted, measured = point.predicted_speedup, point.speedup
        if predicted is None or measured is None or point.is_baseline:
            continue
        drafts = {p.draft for p in run.points if not p.is_baseline}
        name = f"batch size {point.batch_size}"
        if len(drafts) > 1:
            name = f"{run.labels[point.draft]}, {name}"
        groups.setdefault(name, []).append((measured, predicted, point))
    if not groups:
        return False
    (axis,) = canvas.make_axes(figure, 1, 4.0)
    ends = [v for group in groups.values() for m, p, _ in group for v in (m, p)]
    spans = [p.speedup_ci for group in groups.values() for _, _, p in group]
    ends += [end for span in spans for end in span or ()]
    pad = 0.05 * (max(ends) - min(ends)) + 0.01
    low, high = min(ends) - pad, max(ends) + pad
    axis.plot([low, high], [low, high], color=canvas.FAINT, linewidth=1.2, linestyle=(0, (4, 3)))
    axis.fill_between(
        [low, high], [0.95 * low, 0.95 * high], [1.05 * low, 1.05 * high],
        color=canvas.FAINT, alpha=0.15, linewidth=0,
    )  # fmt: skip
    for index, (name, group) in enumerate(groups.items()):
        style = canvas.style_of(index)
        for measured, predicted, point in group:
            if (ends_of := point.speedup_ci) is not None:
                arms = canvas.reach(measured, ends_of)
                axis.errorbar(
                    measured, predicted, xerr=arms, color=style["color"], linewidth=1, capsize=2
                )
        xs, ys, _ = zip(*group, strict=True)
        axis.plot(xs, ys, linestyle="none", markersize=5.5, label=canvas.safe(name), **style)
        if sum(map(len, groups.values())) <= 20:
            for measured, predicted, point in group:
                axis.annotate(
                    f"{point.k}", (measured, predicted), (4, 5), textcoords="offset points",
                    fontsize=8, color=style["color"],
                )  # fmt: skip
    axis.set_xlim(low, high)
    axis.set_ylim(low, high)
    axis.grid(True, axis="both")
    canvas.label_axes([axis], "measured speed-up (×)", "predicted speed-up (×)")
    canvas.add_legend(figure, [axis])
    return True
