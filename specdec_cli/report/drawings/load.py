"""Draws goodput and latency of each k by request rate, and the recommended k at each rate."""

from collections.abc import Callable, Sequence
from typing import Any

from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.cells import number
from specdec_cli.report.drawings import canvas
from specdec_cli.report.findings import Finding
from specdec_cli.report.folder import ReportedRun


def draw_load(figure: Any, run: ReportedRun, bests: Sequence[Finding]) -> bool:
    """Draw goodput, latency and, if any k is recommended, the recommended k against the request
    rate. The rate inf is left out. Returns whether there are any finite rates."""
    points = [p for p in run.points if p.load is not None and p.request_rate != "inf"]
    if not points:
        return False
    shown: list[tuple[str, Callable[[Point], float | None]]] = [
        ("goodput, requests/s", lambda p: p.load.goodput if p.load is not None else None),
        ("mean time of a request, ms", number("e2el_ms", "mean")),
    ]
    if all(p.load is None or p.load.goodput is None for p in points):
        del shown[0]
    best = advised_by_rate(bests)
    axes = canvas.make_axes(figure, len(shown) + bool(best), 3.1, shares_y=False)
    lines: dict[tuple[str, int], list[Point]] = {}
    for point in points:
        lines.setdefault((run.labels[point.draft] if point.k else "", point.k), []).append(point)
    several = len({name for name, k in lines if k}) > 1
    for axis, (title, of) in zip(axes, shown, strict=False):
        for index, ((name, k), own) in enumerate(sorted(lines.items())):
            known = sorted(
                (float(p.request_rate or 0), found) for p in own if (found := of(p)) is not None
            )
            label = canvas.safe(f"{name}, k = {k}" if several and k else f"k = {k}")
            axis.plot(*zip(*known, strict=True) if known else ((), ()), label=label,
                      **canvas.style_of(index))  # fmt: skip
        axis.set_title(title)
    if best:
        axes[-1].plot(*zip(*best, strict=True), "o-", color=canvas.FAINT)
        axes[-1].set_title("recommended k")
    for axis in axes:
        axis.set_xscale("log", base=2)
        ticks = sorted({float(p.request_rate or 0) for p in points})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    canvas.label_axes(axes, "requests a second", "")
    canvas.add_legend(figure, axes)
    return True


def advised_by_rate(bests: Sequence[Finding]) -> list[tuple[float, int]]:
    """Return the finite request rates at which some k is recommended, each with that k."""
    points = [point for best in bests if (point := best.advised) is not None]
    return [(float(p.request_rate), p.k) for p in points if p.request_rate not in (None, "inf")]
