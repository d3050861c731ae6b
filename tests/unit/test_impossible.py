"""A ratio beyond what is possible stands in no table, of the whole or of a category."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specdec_cli.experiment.compare.comparison_records import ComparisonRecords
from specdec_cli.experiment.compare.verdict import best_of
from specdec_cli.experiment.folders.conclusions import BestPair, Comparison, Tokens
from specdec_cli.experiment.folders.records import Key, Pair, Point, Sample
from specdec_cli.experiment.sweep.gains import compare_arms, measured_gains
from specdec_cli.experiment.sweep.recommend import recommend
from specdec_cli.report.export import raw_comparisons
from specdec_cli.report.folder import read_folder
from specdec_cli.report.runs import side_by_side
from specdec_cli.report.tables import category_pairs, predictions
from specdec_cli.terminal import compare as compare_view
from specdec_cli.terminal import sweep as view
from tests.report_helpers import DRAFT, OTHER, sweep_points, write_folder
from tests.unit.test_compare import SETTINGS
from tests.unit.test_compare import sample as pair_sample
from tests.unit.test_points import point_of, sample
from tests.unit.test_runs import folder


def two_drafts(plain_of_b: float) -> tuple[list[Point], list[Comparison]]:
    """Points and comparisons of two drafts at k = 1, whose rounds write two tokens. plain_of_b:
    seconds of plain decoding in category "b"."""

    def of(rounds: list[tuple[int, int]], times: dict[str, float]) -> dict[int, Sample]:
        return {
            i: sample(i, rounds, times[name] * (1 + i / 50), category=name)
            for i, name in enumerate("aaaabb")
        }

    samples = {}
    for draft, speed in (("d", 1.6), ("e", 1.2)):
        samples[Key(draft, 1, 0)] = of([], {"a": 1.0, "b": plain_of_b})
        samples[Key(draft, 1, 1)] = of([(1, 1)] * 6, {"a": 1 / speed, "b": 1 / speed})
    points = [point_of(key, own, samples[Key(key.draft, 1, 0)]) for key, own in samples.items()]
    gains = measured_gains(points, samples)
    return points, compare_arms(gains, samples, seed=0)


def test_pairs_of_a_category_have_no_ratio_where_a_speedup_has_none() -> None:
    _, sound = two_drafts(1.0)
    assert [one.per_category["b"].verdict for one in sound].count("no valid ratio") == 0
    points, found = two_drafts(1.9)
    (first,) = (p for p in points if p.draft == "d" and p.k)
    assert first.speedup is not None and first.per_category["b"].speedup is None
    assert first.per_category["b"].impossible_speedup == pytest.approx(1.9 * 1.6, rel=0.01)
    for one in found:
        assert one.speed_ratio is not None
        a, b = (one.per_category[name] for name in "ab")
        assert a.speed_ratio is not None and b.speed_ratio is None and b.speed_ratio_ci is None
        assert b.verdict == "no valid ratio"
    whole, by_category = view.comparison_tables(found, 200)
    console = Console(width=200)
    with console.capture() as shown:
        console.print(by_category)
    rows = shown.get().splitlines()[1:]
    assert ["no valid ratio" in row for row in rows] == [row.startswith("b") for row in rows]
    assert whole.row_count == 3


def test_reports_and_files_have_no_such_ratio_either(tmp_path: Path) -> None:
    _, found = two_drafts(1.9)
    points = sweep_points(ks=(0, 4), batch_sizes=(1,))
    run = read_folder(write_folder(tmp_path, points))
    object.__setattr__(run.summary, "comparisons", found)
    table = category_pairs(run)
    of = [column.title for column in table.columns]
    for row in table.rows:
        is_b = row[of.index("category")] == "b"
        assert (row[of.index("ratio of speeds")] is None) == is_b
        assert (row[of.index("verdict")] == "no valid ratio") == is_b
    raw = raw_comparisons(run)
    of = [column.title for column in raw.columns]
    for row in raw.rows:
        assert (row[of.index("speed_ratio")] is None) == (row[of.index("category")] == "b")


def test_predictions_stand_beside_the_word() -> None:
    points = sweep_points(ks=(0, 4), batch_sizes=(1,), drafts=((DRAFT, 0.78, 0.95),))
    points[1] |= {"speedup": None, "speedup_ci": None, "impossible_speedup": 5.5}
    points[1]["predicted_speedup"] = 1.5

    class Run:
        is_comparison, labels = False, {DRAFT: DRAFT, None: "–"}
        points: Any = ()

    Run.points = [Point.model_validate(p) for p in points]
    (row,) = predictions(Run).rows  # type: ignore[arg-type]
    assert "impossible" in row


def test_a_run_that_was_cut_short_follows_the_rule(tmp_path: Path) -> None:
    """Its report computes speed-ups from speeds."""
    points = sweep_points(ks=(0, 4), batch_sizes=(1,), drafts=((DRAFT, 0.78, 0.95),))
    for point in points:
        point["speedup"] = point["speedup_ci"] = None
    points[1]["metrics"] |= {"tokens_per_round": 2.0}
    plain = points[0]["metrics"]["decode_tokens_per_second"]
    for factor in (1.9, 2.2):
        points[1]["metrics"]["decode_tokens_per_second"] = factor * plain
        one = read_folder(write_folder(tmp_path / str(factor), points, finished=False)).points[1]
        known = one.speedup, one.impossible_speedup
        assert known == ((1.9, None) if factor < 2 else (None, pytest.approx(2.2)))


def test_side_by_side_leaves_out_impossible_points(tmp_path: Path) -> None:
    fine, wrong = folder(tmp_path / "a", 1.0), folder(tmp_path / "b", 1.0)
    assert [one.point.k for one in side_by_side([fine, wrong]).shown] == [0, 2, 0, 2]
    record = sweep_points(ks=(0, 2), batch_sizes=(1,), drafts=((DRAFT, 0.78, 0.95),))
    record[1] |= {"speedup": None, "speedup_ci": None, "impossible_speedup": 9.0}
    samples = (wrong / "samples.jsonl").read_text()
    write_folder(wrong, record)
    (wrong / "samples.jsonl").write_text(samples)
    assert [one.point.k for one in side_by_side([fine, wrong]).shown] == [0, 2, 0]


@pytest.mark.parametrize("plain_ms", [10.0, 30.0])
def test_a_comparison_concludes_nothing_from_impossible_pairs(plain_ms: float) -> None:
    records = ComparisonRecords(SETTINGS, {})
    for degree in (1, 2):
        pair = Pair(2, degree)
        for index in range(10):
            for k in (0, 2):
                made = pair_sample(pair, 1, k, index, verify=10.0 if k else plain_ms)
                records.kept.samples[SETTINGS.key(pair, 1, k)][index] = made
    records.update_points()
    points = [p for p in records.points if p.k and p.batch_size == 1]
    best = best_of(records, [2], 1)
    is_wrong = plain_ms > 20
    assert all((p.impossible_speedup is not None) == is_wrong for p in points)
    assert all((p.speedup_vs_equal_tp is None) == is_wrong for p in points)
    assert (best.k is None) == is_wrong
    assert best.as_dict().keys() == BestPair.model_fields.keys()
    assert ("nothing was compared: the times were disturbed" in best.reason) == is_wrong


def test_tables_without_rows_are_no_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert view.comparison_tables([], 100) == []
    skipped = Point(target_tp=2, draft_tp=1, k=3, batch_size=1, status="skipped", reason="why")
    assert compare_view.results_tables([skipped], 100) == []
    drafts = ((DRAFT, 0.78, 0.95), (OTHER, 0.6, 0.9))
    points = [
        Point.model_validate(p) for p in sweep_points(ks=(0, 4), batch_sizes=(1,), drafts=drafts)
    ]
    wrong = {"speedup": None, "speedup_ci": None, "impossible_speedup": 9.0}
    points = [p.model_copy(update=wrong) if p.k else p for p in points]
    gains = measured_gains(points, {})
    best = recommend(points, gains, 0)
    document = {"points": points, "best": best, "best_by_batch_size": {"1": best}}
    document |= {
        "comparisons": [],
        "tokens": Tokens(compared=False, must_be_identical=False, identical=None, diverging=[]),
    }
    view.print_results(document)
    out = capsys.readouterr().out
    assert "arm, fastest k" not in out and "no arms to compare: nothing was compared" in out
