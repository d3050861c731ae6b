"""The arrangement of points in drawings: a panel for each setting, a line for each draft."""

from collections.abc import Iterable, Mapping

from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.folder import ReportedRun

MOST_PANELS = 12


def axis_of(run: ReportedRun) -> str:
    return "draft TP" if run.is_comparison else "proposal length"


def x_label(run: ReportedRun) -> str:
    return "draft TP (ranks)" if run.is_comparison else "proposed tokens a round, k"


def placed(run: ReportedRun) -> dict[str, dict[str, dict[int, Point]]]:
    """The measured points with proposals, by panel, line and x."""
    found: dict[str, dict[str, dict[int, Point]]] = {}
    for point in run.points:
        if point.is_baseline or not point.is_ok or (run.is_comparison and point.draft_tp is None):
            continue
        panel, line, x = f"batch size {point.batch_size}", run.labels[point.draft], point.k
        if run.is_comparison:
            panel, line, x = f"target TP {point.target_tp}", panel, point.draft_tp or 0
        found.setdefault(panel, {}).setdefault(line, {})[x] = point
    return dict(sorted(found.items(), key=lambda item: first_number(item[0])))


def series_of(run: ReportedRun, panels: Mapping[str, Iterable[str]]) -> list[str]:
    """The names of all lines, in an order that gives each one its colour in every drawing."""
    names = {name for lines in panels.values() for name in lines}
    return sorted(names, key=first_number) if run.is_comparison else sorted(names)


def first_number(text: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, text))
    return (int(digits) if digits else 0, text)
