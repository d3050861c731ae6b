"""Plots of run folders made by hand: they show the folder's figures at their places."""

import re
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.experiment.folders.conclusions import Best
from specdec_cli.report.drawings.canvas import STYLE, lay_out, name_rows, picture_of
from specdec_cli.report.drawings.lines import (
    draw_break_even,
    draw_predictions,
    draw_speeds,
    draw_speedup,
)
from specdec_cli.report.drawings.panels import placed
from specdec_cli.report.drawings.rounds import draw_rounds
from specdec_cli.report.drawings.rows import draw_categories, draw_comparisons
from specdec_cli.report.findings import Finding
from specdec_cli.report.folder import ReportedRun, read_folder
from specdec_cli.report.memory import write_memory_picture
from specdec_cli.report.plots import plots
from tests.report_helpers import comparison_points, sweep_points, write_folder
from tests.unit.test_card import content_of

Figure: Any = pytest.importorskip("matplotlib.figure").Figure
approx = pytest.approx


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> ReportedRun:
    points = sweep_points((0, 1, 3), (1,))
    return read_folder(write_folder(tmp_path_factory.mktemp("sweep"), points))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> ReportedRun:
    points = comparison_points((2, 16), (1,))
    return read_folder(write_folder(tmp_path_factory.mktemp("tp"), points))


def lines_of(axis: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Places and values of an axis's labelled lines."""
    found = {}
    for line in axis.lines:
        if not (label := str(line.get_label())).startswith("_"):
            found[label] = (
                [float(x) for x in line.get_xdata()],
                [float(y) for y in line.get_ydata()],
            )
    return found


def test_lines_of_a_sweep(sweep: ReportedRun) -> None:
    own = sorted((p for p in sweep.points if p.draft and "1b" in p.draft), key=lambda p: p.k)
    figure = Figure()
    ring, square = own
    assert draw_speedup(figure, sweep, [Finding(ring, ring, fastest=square)])
    (axis,) = figure.axes
    places, values = lines_of(axis)["draft-1b"]
    assert [round(x) for x in places] == [0, 1, 3]
    assert values == approx([1.0, *(p.speedup for p in own)])
    marks = {
        (line.get_marker(), line.get_ydata()[0])
        for line in axis.lines
        if len(line.get_xdata()) == 1
    }
    assert marks == {("o", ring.speedup), ("s", square.speedup)}

    figure = Figure()
    assert draw_break_even(figure, sweep)
    found = lines_of(figure.axes[0])
    for name, expected in (
        ("tokens a round", [p.number("tokens_per_round") for p in own]),
        ("breaks even", [p.break_even.tokens_per_round for p in own if p.break_even]),
    ):
        assert found[f"draft-1b: {name}"][1] == approx(expected)

    figure = Figure()
    assert draw_predictions(figure, sweep)
    errors = [
        100 * (p.predicted_speedup / p.speedup - 1)
        for p in own
        if p.speedup and p.predicted_speedup
    ]
    assert lines_of(figure.axes[0])["draft-1b"][1] == approx(errors)


def test_drafts_whose_long_names_end_alike_are_lines_of_their_own(tmp_path: Path) -> None:
    end = "checkpoint-final-of-the-training-run-2026"
    drafts = [(f"/models/run-a/{end}", 0.8, 0.95), (f"/models/run-b/{end}", 0.6, 0.95)]
    run = read_folder(write_folder(tmp_path, sweep_points((0, 1, 3), (1,), drafts)))
    assert list(run.labels.values()) == ["no draft", f"…a/{end}", f"…b/{end}"]
    figure = Figure()
    draw_speedup(figure, run, [])
    assert {f"…a/{end}", f"…b/{end}"} <= lines_of(figure.axes[0]).keys()


def test_nothing_is_marked_as_recommended_without_a_verdict(
    sweep: ReportedRun, tmp_path: Path
) -> None:
    own = sorted((p for p in sweep.points if p.draft and "1b" in p.draft), key=lambda p: p.k)
    guess = Best(k=own[0].k, draft=own[0].draft, tied=[], reason="", verdict="inconclusive")
    for fastest in own:
        figure = Figure()
        assert draw_speedup(figure, sweep, [Finding(own[0], own[0], guess, fastest=fastest)])
        lines = [line for line in figure.axes[0].lines if len(line.get_xdata()) == 1]
        found = [(line.get_marker(), line.get_ydata()[0]) for line in lines]
        assert found == [("s", fastest.speedup)]
    for verdict, told in (
        ("inconclusive", "intervals; a square marks the fastest point. Inconclusive at"),
        ("use", "; a ring marks the recommended point, a square the fastest if different. Rec"),
    ):
        plot = plots(content_of(tmp_path / verdict, verdict), (), svg=False)[0]
        assert (plot.name, told in plot.caption) == ("speedup", True), plot.caption


def test_bars_of_a_sweep(sweep: ReportedRun) -> None:
    """Stages of a round lie one on the other, up to its whole time."""
    figure = Figure()
    assert draw_rounds(figure, sweep)
    axis = figure.axes[0]
    for place, k in enumerate((0, 1, 3)):
        point = next(p for p in sweep.points if p.k == k)
        tops = [
            b.get_y() + b.get_height() for b in axis.patches if round(b.get_x() + 0.36) == place
        ]
        assert max(tops) == approx(point.number("round_ms"))
        bottoms = sorted(b.get_y() for b in axis.patches if round(b.get_x() + 0.36) == place)
        assert bottoms[1:] == approx(sorted(tops)[:-1])


def test_rows_of_a_sweep(sweep: ReportedRun) -> None:
    """The best row is the highest, and names stand beside their figures."""
    point = next(p for p in sweep.points if p.k == 3)
    figure = Figure()
    assert draw_categories(figure, point, "by category")
    speeds = figure.axes[0]
    rows = sorted(point.per_category.items(), key=lambda item: -(item[1].speedup or 0))
    names = [label.get_text() for label in speeds.get_yticklabels()]
    assert names == [f"{name} (n = 16)" for name, _ in rows]
    drawn = {
        line.get_ydata()[0]: line.get_xdata()[0]
        for line in speeds.lines
        if line.get_marker() == "o"
    }
    assert [drawn[row] for row in range(len(rows))] == approx([row.speedup for _, row in rows])
    assert speeds.yaxis_inverted()

    figure = Figure()
    assert draw_comparisons(figure, sweep)
    (axis,) = figure.axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    (one,) = sweep.summary.comparisons
    faster, slower = ((arm.draft or "").removeprefix("org/") for arm in (one.arm, one.against))
    assert names[0].index(faster) < names[0].index(slower) and names[1].strip() == "writing"
    fills = [line.get_markerfacecolor() for line in axis.lines if line.get_marker() == "o"]
    assert [fill == "none" for fill in fills] == [False, True]


def test_lines_of_a_comparison(comparison: ReportedRun) -> None:
    panels = placed(comparison)
    assert list(panels) == ["target TP 2", "target TP 16"]
    (line,) = panels["target TP 16"].values()
    assert {x: p.draft_tp for x, p in line.items()} == {1: 1, 2: 2, 4: 4}
    figure = Figure()
    assert draw_speeds(figure, comparison)
    plain = next(p for p in comparison.points if p.k == 0 and p.target_tp == 2)
    levels = [
        line.get_ydata()[0] for line in figure.axes[0].lines if len(set(line.get_xdata())) == 2
    ]
    assert approx(plain.number("decode_tokens_per_second")) in levels


@pytest.mark.parametrize("right", [2.2127, 3.01, 2.27])
def test_the_last_ticks_label_is_inside_its_picture(right: float) -> None:
    """Beside rows with long names, where the axis ends shortly after a tick."""
    with pytest.importorskip("matplotlib").rc_context(STYLE):
        figure = Figure((6.4, 4.2), layout="constrained")
        axis = figure.subplots()
        axis.set_xlim(0.6435, right)
        name_rows(axis, ["demo:smollm2-eagle3, k = 2 / no speculation"] * 9)
        lay_out(figure)
        svg = picture_of(figure, "svg", "x").decode()
    (width,) = re.findall(r'viewBox="0 0 ([0-9.]+) ', svg)
    places = re.findall(r'text-anchor: middle[^>]* x="([0-9.]+)"[^>]*>([0-9.]+)<', svg)
    ends = [float(x) + len(label) * 0.26 * STYLE["font.size"] for x, label in places]
    assert len(ends) > 3 and max(ends) <= float(width)


def test_memory_of_a_rank_is_one_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    sizes = {
        f"{name}_bytes": size * 2**30
        for size, name in enumerate(
            ("target_weight", "draft_weight", "activation", "graph", "target_block", "draft_block"),
            1,
        )
    }
    rank = {"rank": 0, **sizes, "stranded_bytes": 0, "other_bytes": 2**30, "free_bytes": 2**30}
    document = {"ranks": [rank], "num_blocks": 2, "block_size": 16, "method": "estimated"}
    write_memory_picture(document, tmp_path / "memory.png")
    bars = figures[0].axes[0].patches
    ends = [bar.get_x() + bar.get_width() for bar in bars]
    assert [bar.get_x() for bar in bars] == [0.0, *ends[:-1]]
    assert ends[-1] == 1 + 2 + 3 + 4 + 2 * (5 + 6) + 1 + 1
