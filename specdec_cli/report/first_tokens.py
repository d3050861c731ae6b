"""The table of what the time to the first token is spent on."""

from functools import partial

from specdec_cli.core.figures import TTFT_PARTS
from specdec_cli.experiment.folders.records import Point
from specdec_cli.report.cells import Table, by_point
from specdec_cli.report.folder import ReportedRun
from specdec_cli.report.point_cells import Cell, Value, number

_NOTE = (
    "Means over prompts. The queue is the wait for a slot, which the time to the first token does "
    "not contain. Prefill counts all passes that a prompt waits for, other prompts' too. The first "
    "round is the rest. In plain decoding prefill decides the first token, and no round is needed."
)


def first_tokens(run: ReportedRun) -> Table | None:
    """The parts of the time to the first token; None where no prompt has them."""
    points = [p for p in run.points if p.metrics is not None and p.metrics.ttft_parts_ms]
    if not points:
        return None
    cells = [
        Cell("first token", number("ttft_ms", "mean"), "ms", 1),
        *(Cell(title, partial(_part, name), "ms", 1) for name, title in TTFT_PARTS.items()),
    ]
    return by_point(("first_tokens", "The first token", _NOTE), run, points, cells)


def _part(name: str, point: Point) -> Value:
    assert point.metrics is not None and point.metrics.ttft_parts_ms is not None
    return point.metrics.ttft_parts_ms.get(name)
