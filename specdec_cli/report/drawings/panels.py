"""The arrangement of points in drawings: a panel for each setting, a line for each draft."""

from specdec_cli.experiment.records import Point
from specdec_cli.report.findings import PlotPlace, place_of
from specdec_cli.report.folder import ReportedRun

MOST_PANELS = 12


def axis_of(run: ReportedRun) -> str:
    return "draft TP" if run.is_comparison else "proposal length"


def x_label(run: ReportedRun) -> str:
    return "draft TP (ranks)" if run.is_comparison else "proposed tokens a round, k"


def placed(run: ReportedRun) -> dict[str, dict[str, list[tuple[PlotPlace, Point]]]]:
    """The measured points that have a place, by panel and line."""
    found: dict[str, dict[str, list[tuple[PlotPlace, Point]]]] = {}
    for point in run.points:
        place = place_of(run, point)
        if place is not None and point.is_ok:
            lines = found.setdefault(place.panel, {})
            lines.setdefault(place.series, []).append((place, point))
    return dict(sorted(found.items(), key=lambda item: first_number(item[0])))


def first_number(text: str) -> tuple[int, str]:
    digits = "".join(filter(str.isdigit, text))
    return (int(digits) if digits else 0, text)
