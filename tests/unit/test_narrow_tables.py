"""Tables of results on narrow terminals: the columns that name a row are never cut."""

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from specdec_cli.core import types
from specdec_cli.core.figures import summarise
from specdec_cli.experiment.folders.conclusions import Arm, Best, Fastest
from specdec_cli.experiment.folders.records import Key, Point
from specdec_cli.report.folder import read_folder
from specdec_cli.report.tables import results
from specdec_cli.terminal import compare as compare_view
from specdec_cli.terminal import sweep as view
from specdec_cli.terminal.memory import cells
from specdec_cli.terminal.render import summary_line, summary_table, table_width, verdict_line
from specdec_cli.terminal.watching import point_line
from tests.report_helpers import (
    DRAFT,
    OTHER,
    Record,
    as_points,
    comparison_points,
    sweep_points,
    write_folder,
)


def lines_of(table: Table, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False).print(table)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def words(points: Sequence[Record], *keys: str) -> list[list[str]]:
    return [[str(p[key]) for key in keys] for p in points]


@pytest.mark.parametrize("width", [40, 50, 60, 80, 100, 120, 140])
def test_sweep(width: int) -> None:
    drafts = ((DRAFT, 0.78, 0.95),)
    points = sweep_points(ks=(0, 4, 10), batch_sizes=(1, 32), drafts=drafts)
    for point in points:
        point["draft"] = DRAFT
    table, needed = view.results_table(as_points(points), width)
    heading, *rows = lines_of(table, width)
    assert [row.split()[:2] for row in rows] == words(points, "batch_size", "k")
    assert all(len(row) <= width and "…" not in row for row in (heading, *rows))
    for row, point in zip(rows, points, strict=True):
        low, high = point["speedup_ci"]
        assert low == high or f"({low:.2f}–{high:.2f})" in row
    assert needed == (0 if width == 140 else 132) and ("break-even" in heading) == (width == 140)
    if needed:
        length = " tokens a round" * (width > 50)
        assert heading.split() == f"batch k{length} tokens/s x k = 0".split()


def test_a_narrow_table_marks_the_points_that_decide() -> None:
    """The recommended one at each batch size, and those tied with the fastest."""
    points = as_points(sweep_points(ks=(0, 4), batch_sizes=(1, 32)))
    arms = [(0, None), (4, DRAFT), (4, OTHER)]
    tied = [Arm(k=k, draft=draft) for k, draft in arms[1:]]
    found = {"1": Best(k=4, draft=DRAFT, tied=[4], reason="", verdict="use", tied_points=tied)}
    for verdict, mark in (("none", "recommended"), ("inconclusive", "")):
        found["32"] = Best(k=0, draft=None, tied=[], reason="", verdict=verdict)
        table, needed = view.results_table(points, 100, found)
        rows = [line.split() for line in lines_of(table, 100)[1:]]
        marks = [row[-1] if row[-1].isalpha() else "" for row in rows]
        assert needed > 100 and [(row[0], row[2]) for row in rows] == 2 * [
            ("–" if draft is None else draft, str(k)) for k, draft in arms
        ]
        assert marks == ["", "recommended", "tied", mark, "", ""]
        assert len(lines_of(view.results_table(points, needed, found)[0], needed)[0]) == needed


def test_a_narrow_table_has_the_predictions_of_points_without_figures() -> None:
    points = sweep_points(ks=(0, 4), batch_sizes=(1,), drafts=((DRAFT, 0.78, 0.95),))
    for is_measured in (True, False):
        if not is_measured:
            points[1] |= {"status": "skipped", "reason": "predicted", "metrics": None}
            points[1] |= {"speedup": None, "speedup_ci": None}
        heading, *_ = lines_of(view.results_table(as_points(points), 80)[0], 80)
        assert ("predicted" in heading) != is_measured and "break-even" not in heading


def test_broadcasts_are_a_column_where_the_target_has_ranks() -> None:
    """The column stands before verifying, as in a round."""
    points = sweep_points(ks=(0, 4), batch_sizes=(1,), drafts=((DRAFT, 0.78, 0.95),))
    for is_split in (False, True):
        for point in points:
            point["draft"] = DRAFT
            point["metrics"]["broadcast_ms"] = 7.25 * is_split
        table, needed = view.results_table(as_points(points), 200)
        heading, *rows = lines_of(table, 200)
        assert ("draft ms  broadcast ms  verify ms" in heading) == is_split and not needed
        assert all(("7.25" in row) == is_split for row in rows)


def test_commits_are_a_column_where_one_point_has_them() -> None:
    """It stands after sampling, as in a round."""
    points = sweep_points(ks=(0, 4), batch_sizes=(1,), drafts=((DRAFT, 0.78, 0.95),))
    for spent, is_shown in ((0.0, False), (3.75, True)):
        points[1]["metrics"]["commit_ms"] = spent
        heading, plain, row = lines_of(view.results_table(as_points(points), 200)[0], 200)
        assert ("sample ms  commit ms  round ms" in heading) == is_shown
        assert ("3.75" in row) == (plain.split()[-2:] == ["0.00", "4.40"]) == is_shown


def test_rounds_that_proposed_are_a_column_where_many_did_not() -> None:
    points = sweep_points(ks=(0, 2, 4), batch_sizes=(1,), drafts=(("ngram", 0.78, 0.95),))
    assert "proposing" not in lines_of(view.results_table(as_points(points), 200)[0], 200)[0]
    metrics = points[2]["metrics"]
    metrics["num_rounds_without_proposal"] = metrics["num_drafts"] // 4
    heading, *rows = lines_of(view.results_table(as_points(points), 200)[0], 200)
    assert "tokens a round  proposing  all rounds  accepted" in heading
    assert ["80%" in row for row in rows] == [False, False, True]
    lines = [point_line(point) for point in as_points(points)]
    assert [line.endswith("tokens a round") for line in lines] == [True, True, False]
    assert lines[2].endswith("tokens a round in the 80% that proposed")


def test_a_line_of_plain_decoding_names_no_draft() -> None:
    """Whichever arm measures it, and whether or not it succeeds."""
    for draft in ("ngram", None):
        lost = Point(**Key(draft, 2, 0).as_dict(), status="oom", reason="why")
        assert point_line(lost) == "no draft, batch 2, k=0: oom: why"
    assert point_line(lost.model_copy(update={"draft": "a", "k": 1})).startswith("a, batch 2")


def test_an_impossible_speedup_is_a_word_on_terminals_and_in_reports(tmp_path: Path) -> None:
    points = sweep_points(ks=(0, 4), batch_sizes=(1,), drafts=((DRAFT, 0.78, 0.95),))
    points[1] |= {"speedup": None, "speedup_ci": None, "impossible_speedup": 5.5}
    heading, *rows = lines_of(view.results_table(as_points(points), 200)[0], 200)
    assert "x k = 0" in heading
    assert ["impossible" in row.split() for row in rows] == [False, True]
    run = read_folder(write_folder(tmp_path, points))
    table = results(run, [])
    assert [row[3] for row in table.rows] == [1.0, "impossible"]


def test_a_summary_has_broadcasts_where_the_target_has_ranks() -> None:
    seq = types.Sequence(0, [1, 2], 1, 9, round_share=2.0, decode_seconds=0.1)
    seq.stage_ms |= {"draft": 12.0, "verify": 40.0, "sample": 2.0}
    for stage, expected in (
        (None, "ms: draft 6.00, verify 20.00, sample 1.00"),
        ("broadcast", "ms: draft 6.00, broadcast 4.00, verify 20.00, sample 1.00"),
        ("commit", "ms: draft 6.00, broadcast 4.00, verify 20.00, sample 1.00, commit 4.00"),
    ):
        seq.stage_ms |= {stage: 8.0} if stage else {}
        metrics = summarise([seq], 2, 1)
        table = summary_table(metrics, None, tinted=False)
        assert any(line.endswith(expected) for line in lines_of(table, 100))
    without = summarise([types.Sequence(0, [1, 2], 1, 9, round_share=2.0)], 2, 1)
    assert summary_line(without).endswith("k=2, no round had a proposal")
    (told,) = [
        one for one in lines_of(summary_table(without, None, tinted=False), 100) if "–" in one
    ]
    assert told.split() == ["accepted", "–", *"no round had a proposal".split()]
    fast, slow = (metrics.model_copy(update={"decode_tokens_per_second": s}) for s in (60.0, 40.0))
    table = summary_table(fast, slow, tinted=False)
    assert any(line.endswith("decoding (40.0 without a draft)") for line in lines_of(table, 100))
    assert verdict_line(fast, slow) == "Speculation is 1.50x as fast as k = 0 here."
    assert verdict_line(slow, fast).startswith("Speculation is slower here: 0.67x")


def test_drafts_are_told_apart() -> None:
    points = sweep_points(ks=(0, 4), batch_sizes=(1,))
    points[0]["draft"] = DRAFT
    for width in (40, 60, 80):
        table, _ = view.results_table(as_points(points), width)
        text = "".join(line[:14].strip() for line in lines_of(table, width))
        assert "…" not in text and DRAFT[:4] in text
    rows = lines_of(view.results_table(as_points(points), 80)[0], 80)
    assert [row.split()[0] for row in rows[1:]] == [DRAFT, DRAFT, OTHER]


def test_a_long_reason_takes_lines() -> None:
    points = sweep_points(ks=(0, 4), batch_sizes=(1,), drafts=((DRAFT, 0.78, 0.95),))
    failed = {"status": "oom", "reason": "out of memory " * 4, "metrics": None, "prediction": None}
    points[1] |= failed | {"predicted_speedup": None}
    shown = lines_of(view.results_table(as_points(points), 60)[0], 60)
    assert "oom: out of memory" in " ".join(" ".join(shown).split())
    assert max(map(len, shown)) <= 60


def test_hostile_categories_keep_to_their_row() -> None:
    (plain, point) = sweep_points(ks=(0, 4), batch_sizes=(1,), drafts=((DRAFT, 0.78, 0.95),))
    figures = point["per_category"]["qa"] | {"mean_acceptance_length": 2.0, "speedup": 2.0}
    figures["speedup_ci"] = None
    names = ["one\nk = 9 is the fastest", "two\ttabs", "long " * 90, "\x1b[31mred"]
    point["per_category"] = {name: figures for name in names}
    best = Best(k=4, draft=DRAFT, tied=[4], reason="")
    document = {"points": as_points([plain, point]), "best": best}
    for width in (40, 200):
        table = view._category_table(document, width)
        assert table is not None
        shown = lines_of(table, width)
        assert [row.endswith("2.00") for row in shown].count(True) == len(names)
        assert all("2.00" in row for row in shown if "fastest" in row and width == 200)
        assert max(map(len, shown)) <= width and "\x1b" not in "".join(shown)


def test_categories_of_several_batch_sizes_name_theirs() -> None:
    """They are those of the first batch size; the rows alone do not show it."""
    headings = []
    for sizes in ((8, 1), (8,)):
        points = as_points(sweep_points((0, 4), sizes, ((DRAFT, 0.78, 0.95),)))
        row = points[1].per_category["qa"]
        points[1] = points[1].model_copy(update={"per_category": {"qa": row, "code": row}})
        best = Best(k=4, draft=DRAFT, tied=[4], reason="")
        table = view._category_table({"points": points, "best": best}, 200)
        assert table is not None
        headings.append(lines_of(table, 200)[0].split("  ")[0])
    assert headings == ["category, k = 4, batch size 8", "category, k = 4"]


def test_categories_without_a_draft_read_as_such() -> None:
    """Plain decoding is no speculation, and a method without a draft has no draft."""
    drafts = ((DRAFT, 0.78, 0.95), ("ngram", 0.5, 0.9))
    points = as_points(sweep_points(ks=(0, 4), batch_sizes=(1,), drafts=drafts))
    row = next(iter(points[-1].per_category.values()))
    points[-1] = points[-1].model_copy(update={"per_category": dict.fromkeys("xyz", row)})
    own = {
        "x": Best(
            k=0, draft=None, tied=[0], reason="", fastest=Fastest(k=0, draft=None, speedup=1.0)
        ),
        "y": Best(
            k=4,
            draft="ngram",
            tied=[4],
            reason="",
            fastest=Fastest(k=4, draft="ngram", speedup=1.5),
        ),
        "z": Best(
            k=4, draft=DRAFT, tied=[4], reason="", fastest=Fastest(k=4, draft=DRAFT, speedup=1.5)
        ),
    }
    best = Best(k=4, draft="ngram", tied=[4], reason="", per_category=own)
    table = view._category_table({"points": points, "best": best}, 200)
    assert table is not None
    heading, x, y, z = lines_of(table, 200)
    assert heading.startswith("category, k = 4 with ngram ")
    assert x.count("no speculation") == 2 and "k = 0" not in x and "1.00x" not in x
    assert "k = 4 with ngram, 1.50x" in y and y.endswith(" k = 4 with ngram")
    assert z.endswith(f" k = 4 with draft {DRAFT}")


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_comparison(width: int) -> None:
    points = comparison_points()
    for point in points:
        point |= {"k": 5 if point["draft_tp"] else 0, "speedup_ci": [1.0, 2.0]}
        point["metrics"] |= {"broadcast_ms": 0.1}
    expected = [
        [a, "none" if b == "None" else b, c]
        for a, b, c in words(points, "target_tp", "draft_tp", "batch_size")
    ]
    tables = compare_view.results_tables(as_points(points), width)
    assert len(tables) == (1 if width == 160 else 2)
    for table in tables:  # whole, with the times of rounds below if they do not fit beside
        lines = lines_of(table, max(width, table_width(table).maximum))
        rows = [line for line in lines if line.split()[1:2] and line.split()[0].isdigit()]
        assert [row.split()[:3] for row in rows] == expected
        assert "…" not in "".join(lines)
    speeds = lines_of(tables[0], 200)
    for point in points:
        assert any(f"{point['speedup']:.2f} (1.00–2.00)" in row for row in speeds)


def test_a_small_part_of_the_memory_has_a_cell_of_the_bar() -> None:
    assert cells({"weights": 1000, "graphs": 2, "free": 0}, 72) == {
        "weights": 71,
        "graphs": 1,
        "free": 0,
    }
    assert cells({"weights": 1000, "graphs": 1, "free": 0}, 72)["graphs"] == 0
