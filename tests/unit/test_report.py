"""Reports of run folders made by hand: figures equal the folder's, and words follow from them."""

import csv
import functools
import io
import json
import shlex
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.errors import SetupError, UsageError
from specdec_cli.experiment.folders.conclusions import VERSION
from specdec_cli.report import write
from specdec_cli.report.content import Content, conclusion
from specdec_cli.report.drawings.canvas import reach
from specdec_cli.report.drawings.rounds import draw_acceptance, draw_experts
from specdec_cli.report.export import csv_tables, markdown
from specdec_cli.report.folder import baseline_of, read_folder
from specdec_cli.report.page import page
from specdec_cli.report.plots import Plot, plots
from specdec_cli.report.write import write_report
from tests.fixtures import without_pixels
from tests.report_helpers import (
    DRAFT,
    OTHER,
    RECIPE,
    Record,
    comparison_points,
    sample_record,
    sweep_point,
    sweep_points,
    write_folder,
)

pytest.importorskip("matplotlib")
ONE_DRAFT = ((DRAFT, 0.7, 0.9),)


class Page(HTMLParser):
    """Tables by id as rows of cells, tags, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._rows: list[list[str]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self._rows = self.tables[str(dict(attrs)["id"])] = []
        if tag == "tr":
            self._rows.append([])
        if tag in ("td", "th"):
            self._rows[-1].append("")
            self._in_cell = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data: str) -> None:
        self.text += data
        if self._in_cell:
            self._rows[-1][-1] += data


def read(folder: Path) -> Content:
    return Content(read_folder(folder))


def html(content: Content, drawn: list[Plot] | None = None) -> str:
    return page(content, drawn or [])


@functools.lru_cache(2)
def _drawn(path: Path, has_pixels: bool) -> list[Plot]:
    with pytest.MonkeyPatch.context() as patch:
        if not has_pixels:
            without_pixels(patch)
        return plots(read(path))


def drawn(content: Content, has_pixels: bool = False) -> list[Plot]:
    """All plots. has_pixels: whether their pictures for other programs are made too."""
    return _drawn(content.run.path, has_pixels)


def csv_rows(content: Content, name: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_tables(content.run)[name])))


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Content:
    return read(write_folder(tmp_path_factory.mktemp("sweep"), sweep_points()))


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Content:
    skipped = {
        "target_tp": 4,
        "draft_tp": 3,
        "k": 5,
        "batch_size": 1,
        "status": "skipped",
        "reason": "3 does not divide 4",
    }
    return read(write_folder(tmp_path_factory.mktemp("tp"), [*comparison_points(), skipped]))


# Figures


def test_csv_has_every_figure_as_it_was(sweep: Content) -> None:
    points = sweep_points()
    rows = csv_rows(sweep, "points.csv")
    assert len(rows) == len(points)
    by_setting = {(r["draft"], int(r["k"]), int(r["batch_size"])): r for r in rows}
    for point in points:
        row = by_setting[point["draft"] or "", point["k"], point["batch_size"]]
        assert float(row["speedup"]) == point["speedup"]
        assert [float(row["speedup_lo"]), float(row["speedup_hi"])] == point["speedup_ci"]
        figures = point["metrics"]
        for name in (
            "decode_tokens_per_second",
            "mean_acceptance_length",
            "broadcast_ms",
            "round_ms",
        ):
            assert float(row[name]) == figures[name]
        assert float(row["ttft_p99_ms"]) == figures["ttft_ms"]["p99"]
        assert float(row["tpot_p50_ms"]) == figures["tpot_ms"]["p50"]
        assert int(float(row["num_drafts"])) == figures["num_drafts"]


def test_csv_by_position_and_category(sweep: Content) -> None:
    (point,) = [p for p in sweep_points() if (p["draft"], p["k"], p["batch_size"]) == (OTHER, 4, 8)]

    def chosen(name: str) -> list[dict[str, str]]:
        rows = csv_rows(sweep, name)
        return [r for r in rows if (r["draft"], r["k"], r["batch_size"]) == (OTHER, "4", "8")]

    positions = chosen("acceptance.csv")
    assert [int(r["position"]) for r in positions] == [1, 2, 3, 4]
    for key in ("acceptance_rate", "conditional_acceptance_rate"):
        assert [float(r[key]) for r in positions] == point["metrics"][f"{key}_per_pos"]
    for row in chosen("categories.csv"):
        figures = point["per_category"][row["category"]]
        assert float(row["mean_acceptance_length"]) == figures["mean_acceptance_length"]


def test_csv_rows_name_their_request_rate(tmp_path: Path) -> None:
    """Points that differ in nothing else are told apart, and no limit is not a batch of 0."""
    points = [
        point | {"request_rate": rate, "batch_size": None}
        for rate in (4.0, "inf")
        for point in sweep_points(ks=(0, 2), batch_sizes=(1,), drafts=ONE_DRAFT)
    ]
    write_folder(tmp_path, points)
    content = read(tmp_path)
    for name, keys in (
        ("points.csv", ()),
        ("acceptance.csv", ("position",)),
        ("categories.csv", ("category",)),
    ):
        rows = csv_rows(content, name)
        assert {(r["request_rate"], r["batch_size"]) for r in rows} == {("4.0", ""), ("inf", "")}
        named = [tuple(r[key] for key in ("request_rate", "k", *keys)) for r in rows]
        assert len(set(named)) == len(named), name
    count = max(p["metrics"]["num_prompts"] for p in points)
    assert f" {count} requests of question.jsonl " in content.setup


def test_conclusions_count_and_name_what_they_are_about(tmp_path: Path) -> None:
    """A prediction without an interval was not tested by one, and pairs of arms at two batch sizes
    are told apart."""
    points = sweep_points(ks=(0, 2, 4), batch_sizes=(1, 8))
    errors = {1: [-0.02, 0.01], 8: None}
    for point in points:
        if point["k"]:
            ends = [-0.03, -0.01] if point["k"] == 4 and point["batch_size"] == 1 else None
            point["prediction"] = {
                **dict.fromkeys(("mean_acceptance_length", "iid_alpha"), 0.5),
                **{"method": "replay", "is_exact": True, "iid_mean_acceptance_length": 2.0},
                **dict.fromkeys(("mean_acceptance_length_error", "iid_error", "analytic_alpha")),
                **{"speedup": 1.5, "speedup_error": -0.02},
                "speedup_error_ci": ends or errors[point["batch_size"]],
            }
    write_folder(tmp_path, points)
    file = tmp_path / "summary.json"
    summary = json.loads(file.read_text())
    summary["comparisons"] += [one | {"batch_size": 8} for one in summary["comparisons"]]
    file.write_text(json.dumps(summary))
    content = read(tmp_path)
    assert "2 of 4 with an interval are off by more than their" in conclusion(
        "predictions", content
    )
    told = conclusion("comparisons", content)
    assert [f"at batch size {size}" in told for size in (1, 8)] == [True, True]


def test_page_has_the_figures(sweep: Content) -> None:
    tables = Page(html(sweep)).tables
    header, *rows = tables["table-results"]
    assert header[:5] == ["draft", "batch", "k", "speed-up×", "95 % interval"]
    points = {(p["batch_size"], p["k"], p["draft"]): p for p in sweep_points()}
    names = {"no draft": None, "draft-1b": DRAFT, "draft-300m": OTHER}
    assert len(rows) == len(points)
    for row in rows:
        point = points[int(row[1]), int(row[2]), names[row[0]]]
        low, high = point["speedup_ci"]
        figures = point["metrics"]
        assert row[3:7] == [
            f"{point['speedup']:.2f}",
            f"{low:.2f} – {high:.2f}",
            f"{figures['decode_tokens_per_second']:.1f}",
            f"{figures['mean_acceptance_length']:.2f}",
        ]
    for row in tables["table-rounds"][1:]:
        figures = points[int(row[1]), int(row[2]), names[row[0]]]["metrics"]
        stages = ("draft_ms", "verify_ms", "sample_ms", "round_ms")
        assert row[3:7] == [f"{figures[s]:.3f}" for s in stages]
    for row in tables["table-predictions"][1:]:
        point = points[int(row[1]), int(row[2]), names[row[0]]]
        miss = 100 * (point["predicted_speedup"] / point["speedup"] - 1)
        assert row[3] == f"{point['predicted_speedup']:.3f}"
        assert row[7] == f"{miss:.1f}"
    assert len(tables["table-predictions"]) == 1 + 48
    assert ["gpu", "NVIDIA H200"] in tables["table-environment"]
    assert ["packages.torch", "2.13.0"] in tables["table-environment"]


def test_comparison(comparison: Content) -> None:
    parsed = Page(html(comparison))
    tables = parsed.tables
    points = {
        (str(p["target_tp"]), str(p["draft_tp"] or "–"), str(p["batch_size"])): p
        for p in comparison_points()
    }
    rows = tables["table-results"][1:]
    # A pair that was not run is a line, not a row of dashes.
    assert len(rows) == len(points) and not any(row[1] == "3" for row in rows)
    assert "Not run: target TP 4 with draft TP 3 (3 does not divide 4)." in parsed.text
    assert tables["table-degrees"][1:] == [
        ["4", "1", "2", "4", "draft: 0.31 ms less than with draft TP 1", "250.0"]
    ]
    for row in rows:
        point = points[row[0], row[1], row[2]]
        assert row[4] == f"{point['speedup']:.2f}"
        assert row[-3:] == [
            f"{point['speedup_vs_equal_tp']:.2f}",
            f"{point['target_tp']} x {point['num_blocks']:,}",
            "ok",
        ]
    broadcast = {tuple(row[:3]): row[5] for row in tables["table-rounds"][1:]}
    assert broadcast["4", "2", "1"] == "0.160"
    # The fastest point, not the one with the largest speed-up, which has another plain decoding.
    assert comparison.headline == (
        "The best depends on batch size. At 1: target TP 4 with draft TP 2; at 32: target TP 4 "
        "alone."
    )


# Words


def test_the_answer_is_the_runs_own(sweep: Content) -> None:
    assert sweep.headline == (
        "The recommended k depends on batch size. At 1: k = 3 with draft-1b; at 8: k = 3 with "
        "draft-1b; at 32: k = 1 with draft-1b."
    )
    (point,) = [p for p in sweep_points() if (p["draft"], p["k"], p["batch_size"]) == (DRAFT, 3, 1)]
    low, high = point["speedup_ci"]
    assert sweep.answers[0] == (
        f"Recommended at batch size 1: k = 3 with draft-1b, {point['speedup']:.2f}× the speed of "
        f"plain decoding (95 % interval {low:.2f} to {high:.2f}). It is the fastest. "
        "Statistically tied: k = 4."
    )
    assert sweep.reasons == ["the smallest k that is tied with the fastest"]


def test_recorded_best_wins_over_the_fastest(tmp_path: Path) -> None:
    write_folder(tmp_path, sweep_points(batch_sizes=(1,), drafts=ONE_DRAFT))
    summary = json.loads((tmp_path / "summary.json").read_text())
    best = {"k": 2, "draft": DRAFT, "tied": [2, 3, 4], "reason": "tie"}
    summary |= {"best": best, "best_by_batch_size": {"1": best}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    content = read(tmp_path)
    assert content.headline.startswith("Recommended at batch size 1: k = 2 with draft-1b, ")
    fastest = "It is tied with the fastest, k = 3 with draft-1b at 1.53× (95 % interval 1.47 to "
    assert fastest in content.headline
    assert ", and it proposes less. Also tied: k = 4." in content.headline
    assert content.deployment is not None
    assert content.deployment.recommendation == [content.headline]
    assert content.category_point.startswith("k = 2 with draft-1b, ")


def test_ties_of_several_drafts_are_told(tmp_path: Path) -> None:
    write_folder(tmp_path, sweep_points(batch_sizes=(1,)))
    summary = json.loads((tmp_path / "summary.json").read_text())
    places = [(0, DRAFT), (2, DRAFT), (3, DRAFT), (0, OTHER), (3, OTHER)]
    best = {"k": 2, "draft": DRAFT, "tied": [0, 2, 3], "reason": "tie"}
    best["tied_points"] = [{"k": k, "draft": draft} for k, draft in places]
    summary |= {"best": best, "best_by_batch_size": {"1": best}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    tied = f"k = 0; k = 3 with draft {OTHER}"
    assert "tied with the fastest, k = 3 with draft-1b at 1.70×" in read(tmp_path).headline
    assert f"Also tied: {tied}." in read(tmp_path).headline


def test_no_speculation(tmp_path: Path) -> None:
    slow = sweep_points(ks=(0, 1, 2), batch_sizes=(1, 4), drafts=((DRAFT, 0.1, 3.0),))
    content = read(write_folder(tmp_path, slow))
    assert content.headline == "No speculation: plain decoding is fastest at every batch size."
    assert content.answers[0].startswith(
        "No speculation at batch size 1: plain decoding is fastest. The best with proposals, k = 1 "
        "with draft-1b, is 0.6"
    )
    assert content.deployment is not None and content.deployment.speculative_config is None
    assert content.deployment.command == "vllm serve org/target-8b"
    # The figures of proposals are shown anyway.
    assert content.category_point == "k = 1 with draft-1b, batch size 1."


def test_synthetic_and_dummy_are_said(tmp_path: Path) -> None:
    recipe = json.loads(json.dumps(RECIPE))
    recipe["speculation"]["acceptance"] = "synthetic"
    recipe["draft"]["load_format"] = "dummy"
    content = read(write_folder(tmp_path, sweep_points(batch_sizes=(1,)), recipe=recipe))
    assert "Acceptance was given, not measured" in content.warnings[0]
    assert "The weights are random" in content.warnings[1]
    summary = json.loads((tmp_path / "summary.json").read_text())
    codes = ("acceptance_rule", "random_weights", "random_routers")
    summary["warnings"] = [{"code": one, "message": one, "evidence": {}} for one in codes]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    assert read(tmp_path).warnings == [content.warnings[1], "acceptance_rule", "random_routers"]


# Folders cut short


def test_a_killed_sweep(tmp_path: Path) -> None:
    points = sweep_points(ks=range(5), batch_sizes=(1,), drafts=ONE_DRAFT)
    plain = points[0]["metrics"]["decode_tokens_per_second"]
    for point in points:
        point["speedup"] = point["speedup_ci"] = point["predicted_speedup"] = None
    failed: Record = {"k": 5, "batch_size": 1, "draft": DRAFT, "status": "oom", "reason": "80 GiB"}
    samples = [
        sample_record(k=3, index=i, category=name, accepted_per_round=rounds)
        for i, (name, rounds) in enumerate([("a", [3, 1]), ("a", [2]), ("b", [0, 0])])
    ]
    torn = '{"k": 6, "batch_s'
    folder = write_folder(
        tmp_path, [*points, failed], finished=False, samples=[*samples, {"k": "x"}], torn=torn
    )
    content = read(folder)
    assert content.run.is_partial
    assert "This run is incomplete" in content.warnings[0]
    assert "points.jsonl, line 7 is incomplete" in content.warnings[1]
    assert "samples.jsonl, line 4 is not a record (k is damaged)" in content.warnings[2]
    best = max(points, key=lambda p: p["metrics"]["decode_tokens_per_second"])
    gain = best["metrics"]["decode_tokens_per_second"] / plain
    assert content.headline == (
        f"Fastest at batch size 1: k = {best['k']} with draft-1b, {gain:.2f}× the speed of plain "
        "decoding. This is the fastest point so far; ties were not tested."
    )
    tables = Page(html(content, drawn(content))).tables
    assert tables["table-results"][-1][-1] == "oom: 80 GiB"
    assert best["k"] == 3
    assert {row[0] for row in tables["table-categories"][1:]} == set(best["per_category"])
    assert "table-predictions" not in tables


def test_a_sweep_that_was_killed_after_plain_decoding_claims_no_test(tmp_path: Path) -> None:
    points = sweep_points(ks=(0,), batch_sizes=(1,))
    content = read(write_folder(tmp_path / "one", points, finished=False))
    told = "No point with proposals was measured. This is the fastest point so far; ties"
    assert content.headline == f"Fastest at batch size 1: no speculation. {told} were not tested."
    assert content.deployment is not None and content.deployment.notes == [
        "No recommendation: the run is incomplete. Plain decoding is the fastest so far."
    ]
    for ks in ((0,), (0, 1, 2)):
        points = sweep_points(ks=ks, batch_sizes=(1, 8))
        two = read(write_folder(tmp_path / f"two-{len(ks)}", points, finished=False)).headline
        assert "Recommended" not in two and two.count("ties were not tested.") == 2


def test_a_failed_point_that_was_run_again(tmp_path: Path) -> None:
    points = sweep_points(ks=(0, 2), batch_sizes=(1,), drafts=ONE_DRAFT)
    failed = {"k": 2, "batch_size": 1, "draft": DRAFT, "status": "failed", "reason": "once"}
    content = read(write_folder(tmp_path, [points[0], failed, points[1]], finished=False))
    assert [p.status for p in content.run.points] == ["ok", "ok"]


@pytest.mark.parametrize(
    "points",
    [
        sweep_points(ks=(0,), batch_sizes=(1,)),
        [sweep_point(DRAFT, 3, 1, 0.7, 0.9, 4.2)],
        [{"k": 3, "batch_size": 1, "draft": DRAFT, "status": "failed", "reason": "it broke"}],
        comparison_points(target_tps=(1,), batch_sizes=(1,))[:1],
        comparison_points(target_tps=(1,), batch_sizes=(1,))[1:],
    ],
    ids="k=0-only one-point failed plain-tp one-tp".split(),
)
def test_small_and_odd_folders(points: list[Any], tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", points, finished=False)
    if len(points) == 1:
        document = {"schema": "specdec.sweep-k/1", "points": points, "best": None}
        (folder / "summary.json").write_text(json.dumps(document))
    content = read(folder)
    files = write_report(content, tmp_path / "out", ("html", "csv", "md", "vllm"))
    parsed = Page((tmp_path / "out" / "report.html").read_text())
    assert content.headline in parsed.text
    assert len(parsed.tables["table-results"]) == 1 + len(content.run.points)
    assert all(file.stat().st_size for file in files)
    if points and points[0].get("reason"):
        assert "failed: it broke" in parsed.text
        assert content.headline == "No point was measured."


@pytest.mark.parametrize("has_summary", [False, True])
@pytest.mark.parametrize(
    ("points", "told"),
    [
        ([], "no point of this run is finished yet"),
        ([{"status": "ok"}, {"k": "3", "batch_size": True, "metrics": [1]}], "is not a record"),
        ([{"k": 2, "batch_size": 1, "draft": 5, "metrics": {"ttft_ms": 3}}], "is not a record"),
    ],
)
def test_a_run_without_a_point_is_refused(
    points: list[Any], told: str, has_summary: bool, tmp_path: Path
) -> None:
    folder = write_folder(tmp_path / "run", points, finished=False)
    if has_summary:
        document = {"schema": "specdec.sweep-k/1", "points": points, "best": None}
        (folder / "summary.json").write_text(json.dumps(document))
    with pytest.raises(UsageError, match=f"run has no measured point: .*{told}") as found:
        read_folder(folder)
    assert found.value.hint == f"go on with --resume -o {folder}"
    (folder / "samples.jsonl").write_text("{}\n")
    (folder / "settings.json").write_text(json.dumps({"version": VERSION, "settings": {"ks": [0]}}))
    with pytest.raises(UsageError) as found:
        read_folder(folder)
    assert "`specdec merge" in found.value.hint


def test_what_is_no_run_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "generated", [])
    document = {"schema": "specdec.generate/1"}
    (tmp_path / "generated" / "summary.json").write_text(json.dumps(document))
    for name, words in [
        ("missing", "no such folder"),
        ("file", "is a file"),
        ("empty", "neither points.jsonl nor summary.json"),
        ("generated", "holds the results of generate"),
    ]:
        with pytest.raises(UsageError, match=words):
            read_folder(tmp_path / name)


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, sweep_points(batch_sizes=(1,)))
    (folder / "recipe.yaml").write_text("target: [unclosed")
    (folder / "environment.json").write_bytes(b"\xff\xfe")
    (folder / "summary.json").write_text("[" * 100_000)
    with (folder / "points.jsonl").open("a") as file:
        file.write('5\n{"k": \n')
    content = read(folder)
    said = " ".join(content.warnings)
    for words in ["recipe.yaml is damaged", "environment.json is damaged", "summary.json is dam"]:
        assert words in said
    assert "points.jsonl, line 18 is not a record" in said and "line 19 is not a record" in said
    assert len(content.run.points) == 17


@pytest.mark.parametrize("name", ["points.jsonl", "summary.json"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("speedup", 10**400),
        ("speedup_ci", [1, 10**400]),
        ("speedup_ci", [1.0]),
        ("metrics.round_ms", 10**400),
        ("metrics.num_drafts", -1),
        ("metrics.ttft_ms", 3),
        ("per_category.qa.num_prompts", "16"),
        ("draft", 5),
    ],
)
def test_a_damaged_point_is_left_out_and_named(
    key: str, value: object, name: str, tmp_path: Path
) -> None:
    """The same holds for an infinite number: no point is shown with only some figures."""
    points = sweep_points(ks=(0, 1, 2), batch_sizes=(1,), drafts=ONE_DRAFT)
    *outer, last = key.split(".")
    inner = points[1]
    for part in outer:
        inner = inner[part]
    inner[last] = value
    content = read(write_folder(tmp_path, points, finished=name == "summary.json"))
    where = "summary.json, point 2" if name == "summary.json" else "points.jsonl, line 2"
    assert f"{where} is not a record ({key} is damaged): left out" in content.warnings
    assert [p.k for p in content.run.points] == [0, 2]


def test_metrics_of_another_k_are_left_out(tmp_path: Path) -> None:
    points = sweep_points(ks=(0, 1, 2), batch_sizes=(1,), drafts=ONE_DRAFT)
    points[2]["metrics"]["acceptance_rate_per_pos"] = [0.5]
    content = read(write_folder(tmp_path, points, finished=False))
    why = "its metrics do not have one value for each of k positions"
    told = f"points.jsonl, line 3 is not a record ({why}): left out"
    assert told in content.warnings and [p.k for p in content.run.points] == [0, 1]


def test_what_is_not_finite_is_none(tmp_path: Path) -> None:
    """Files have null for such numbers too."""
    points = sweep_points(ks=(0, 1), batch_sizes=(1,), drafts=ONE_DRAFT)
    points[1] |= {"predicted_speedup": float("nan"), "speedup_ci": [1.0, float("inf")]}
    content = read(write_folder(tmp_path, points, finished=False))
    assert content.run.points[1].predicted_speedup is content.run.points[1].speedup_ci is None
    assert content.run.points[1].speedup is not None


# Plots


def test_plots_are_pictures_of_what_there_is(sweep: Content, comparison: Content) -> None:
    named = {plot.name: plot for plot in drawn(sweep)}
    names = ["speedup", "break_even", "comparisons", "acceptance", "rounds", "categories"]
    assert list(named) == [*names, "predictions"]
    assert "draft-1b, k = " in named["comparisons"].svg and "writing" in named["comparisons"].svg
    assert "k = 3 with draft-1b, batch size 1" in named["categories"].svg
    assert "coding (n = 16)" in named["categories"].svg
    assert ">broadcast<" not in named["rounds"].svg, "a stage that did not take place"
    # Captions say what to conclude.
    for name, words in [
        ("speedup", sweep.headline),
        ("break_even", "k = 3 with draft-1b at batch size 1: it needs 25 % of its proposals"),
        ("comparisons", "draft-1b, k = 3 is 1.08× as fast as draft-300m, k = 3."),
        ("acceptance", "With k = 8 with draft-1b the first proposal is accepted in 78 % of rounds"),
        ("categories", "Fastest on coding (2.10×), slowest on writing (1.29×)."),
    ]:
        assert words in named[name].caption
    assert "% of it verify." in named["rounds"].caption
    table = sweep.tables["break_even"]
    assert table is not None and len(table.rows) == 48 and table.rows[7][-2:] == ("never",) * 2
    pictures = drawn(comparison, has_pixels=True)
    assert [plot.name for plot in pictures] == ["speedup", "speeds", "acceptance", "rounds"]
    for plot in pictures:
        assert plot.files["png"].startswith(b"\x89PNG")
        assert plot.svg.startswith("<svg") and "currentColor" in plot.svg
    speed = pictures[0].svg
    for words in ("speed-up over k = 0 (×)", "draft TP (ranks)", "batch size 32", "target TP 4"):
        assert words in speed


def test_acceptance_is_drawn_at_the_longest_proposal(tmp_path: Path) -> None:
    content = read(write_folder(tmp_path, sweep_points((0, 1, 3), (1, 8))))
    figure = pytest.importorskip("matplotlib.figure").Figure()
    assert draw_acceptance(figure, content.run)
    assert [round(x) for x in figure.axes[0].lines[0].get_xdata()] == [1, 2, 3]


def test_error_bars_reach_to_the_ends_of_the_interval() -> None:
    assert reach(3.0, (2.0, 7.0)) == [[1.0], [4.0]]
    assert reach(1.0, (2.0, 7.0)) == [[0.0], [6.0]]


def test_experts_are_drawn_where_they_were_counted(tmp_path: Path) -> None:
    points = sweep_points((0, 1, 3), (1, 8))
    for point in points:
        tokens = point["batch_size"] * (point["k"] + 1)
        point["metrics"]["distinct_experts"] = 128 * (1 - (1 - 8 / 128) ** tokens)
    random = RECIPE | {"target": RECIPE["target"] | {"load_format": "dummy"}}
    content = read(write_folder(tmp_path, points, recipe=random))
    named = {plot.name: plot for plot in plots(content, (), svg=False)}
    assert "The weights are random, so experts are chosen evenly" in named["experts"].caption
    figure = pytest.importorskip("matplotlib.figure").Figure()
    assert draw_experts(figure, content.run)
    times, _, _, counts = figure.axes
    assert (times.get_ylabel(), counts.get_ylabel()) == (
        "verify time (ms)",
        "distinct experts a layer",
    )
    slowest = max(point["metrics"]["verify_ms"] for point in points)
    assert times.get_ylim()[0] == 0 and slowest < times.get_ylim()[1] < 1.2 * slowest
    widths, experts = counts.lines[0].get_data()
    assert list(widths) == [1, 2, 4] and experts[0] == pytest.approx(51.6, abs=0.05)
    table = content.tables["rounds"]
    assert table is not None and table.columns[-1].title == "experts"
    assert {f"{row[-1]:.1f}" for row in table.rows if row[1] == 1} == {"8.0", "15.5", "29.1"}
    assert float(csv_rows(content, "points.csv")[0]["distinct_experts"]) == 8.0


def test_pages_plots_do_not_share_ids(sweep: Content) -> None:
    tags = Page(html(sweep, drawn(sweep))).tags
    ids = [attrs["id"] for _, attrs in tags if "id" in attrs]
    assert len(ids) == len(set(ids)) > 100
    links = {v[1:] for _, attrs in tags for k, v in attrs.items() if k == "xlink:href" and v}
    assert links and links <= set(ids)


def test_without_matplotlib(
    sweep: Content, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    with pytest.raises(SetupError, match="plots need the package matplotlib"):
        write_report(sweep, tmp_path, ("html",))
    files = write_report(sweep, tmp_path, ("csv", "md", "vllm"))
    assert {file.name for file in files} >= {"points.csv", "report.md", "vllm.json"}


# The page stands alone, and nothing in a folder can act


def test_the_page_needs_nothing(sweep: Content) -> None:
    text = html(sweep, drawn(sweep))
    parsed = Page(text)
    assert not {"script", "link", "iframe", "img", "object", "form"} & {t for t, _ in parsed.tags}
    for _, attrs in parsed.tags:
        for name, value in attrs.items():
            if name in ("href", "xlink:href", "src", "action"):
                assert str(value).startswith("#")
            assert not name.startswith("on")
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text and "@media print" in text


HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "</title></svg></style><svg onload=alert(1)>",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "[red]markup[/red]",
    "\x1b[31m\x1b]0;t\x07\x9b2J",
    "$\\frac{1}{0}$ \\alpha $",
    "|cell|`code`](http://x)![p](http://y)",
    "\u202eevil\u2066\ud800",
    "=cmd|' /C calc'!A0",
    "+1+1",
    "@SUM(1)",
    "-2",
    "```\n# heading",
]


def test_hostile_text_is_inert(tmp_path: Path, sweep: Content) -> None:
    points = sweep_points(
        ks=(0, 1, 2), batch_sizes=(1,), drafts=[(text, 0.7, 0.5) for text in HOSTILE]
    )
    best = points[1]
    figures = best["per_category"]["qa"]
    best["per_category"] = {**dict.fromkeys(HOSTILE, figures)}
    points += [
        {"k": 3, "batch_size": 1, "draft": text, "status": "failed", "reason": text}
        for text in HOSTILE
    ]
    everything = " ".join(HOSTILE)
    recipe = json.loads(json.dumps(RECIPE))
    recipe["target"]["model"] = recipe["data"]["path"] = everything
    recipe["sampling"]["temperature"] = 0.7
    folder = write_folder(tmp_path / "run", points, recipe=recipe)
    known = {text: text for text in HOSTILE} | {"gpu": everything, "{{ 6 * 7 }}": "{{ 6 * 7 }}"}
    (folder / "environment.json").write_text(json.dumps(known))
    summary = json.loads((folder / "summary.json").read_text())
    chosen = {key: best[key] for key in ("k", "draft")}
    summary["best_by_batch_size"] = {"1": {**chosen, "tied": [], "reason": everything}}
    summary["best_by_batch_size"]["1"]["tied_points"] = [{"k": 1, "draft": t} for t in HOSTILE]
    (folder / "summary.json").write_text(json.dumps(summary))
    content = read(folder)
    assert content.category_point and content.tables["categories"].rows
    write_report(content, tmp_path / "out", ("html", "csv", "md", "vllm"))
    texts = {path.name: path.read_text() for path in (tmp_path / "out").iterdir()}
    assert len(texts) == 7
    for text in texts.values():
        assert not set("\x1b\x07\x9b\u202e\u2066") & set(text)

    parsed = Page(texts["report.html"])
    expected = {tag for tag, _ in Page(html(sweep, drawn(sweep))).tags}
    assert {tag for tag, _ in parsed.tags} <= expected
    assert not any(name.startswith("on") for _, attrs in parsed.tags for name in attrs)
    assert ["{{ 6 * 7 }}", "{{ 6 * 7 }}"] in parsed.tables["table-environment"]
    assert len(parsed.tables["table-results"]) == 1 + len(points)

    for name in ("points.csv", "acceptance.csv", "categories.csv", "comparisons.csv"):
        for row in csv.reader(io.StringIO(texts[name])):
            for value in row:
                is_number = value.lstrip("-").replace(".", "").replace("e-", "").isdigit()
                is_formula = value.startswith(("=", "+", "-", "@", "\t", "\r"))
                assert not is_formula or (is_number and value != "-2")

    fence = ""
    for line in texts["report.md"].splitlines():
        if not fence and line.startswith("```"):
            fence = line.rstrip("abcdefghijklmnopqrstuvwxyz")
        elif line == fence:
            fence = ""
        elif not fence:
            assert "<" not in line.replace("\\<", "") and "# heading" not in line[:12]
            assert "](http" not in line.replace("\\](", "")
    rows = [line for line in texts["report.md"].splitlines() if "failed: " in line]
    assert {row.replace("\\|", "").count("|") for row in rows} == {11}
    assert json.loads(texts["vllm.json"])["speculative_config"]["model"] == HOSTILE[0]


# Markdown


def test_markdown(sweep: Content) -> None:
    text = markdown(sweep, drawn(sweep), "plots/")
    assert text.startswith("# specdec sweep-k: ")
    assert "](plots/speedup.png)" in text
    rows = [line for line in text.splitlines() if line.startswith("| draft-1b | 1 | 3 |")]
    (point,) = [p for p in sweep_points() if (p["draft"], p["k"], p["batch_size"]) == (DRAFT, 3, 1)]
    assert f" {point['speedup']:.2f} |" in rows[0]
    compared = [line for line in text.splitlines() if "| draft-300m, k = " in line]
    assert [line.split(" | ")[-1] for line in compared] == ["differ |"]
    assert "](plots/comparisons.png)" in text
    pairs = sweep.tables["category_pairs"]
    assert pairs is not None and (1.01, "0.97 – 1.04", "tied") in [row[-3:] for row in pairs.rows]
    # The same number of cells in every row of a table.
    header = next(line for line in text.splitlines() if line.startswith("| draft | batch"))
    assert {row.count("|") for row in rows[:1]} == {header.count("|")}


def test_markdown_links_to_pictures_that_are_written(
    sweep: Content, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "plots", lambda *_, **__: [Plot("speedup", "", "", "", {})])
    for formats, links in ((("html", "md"), 0), (("png", "md"), 1)):
        write_report(sweep, tmp_path, formats)
        assert (tmp_path / "report.md").read_text().count("](plots/speedup.png)") == links
    assert write._encoded("a\ud800") == b"a\\ud800"  # a file's name may hold it


# vLLM


def test_vllm_config(sweep: Content) -> None:
    found = sweep.deployment
    assert (
        found is not None and found.speculative_config is not None and found.rehearsal is not None
    )
    assert found.speculative_config == {
        "method": "draft_model",
        "model": DRAFT,
        "num_speculative_tokens": 3,
        "draft_tensor_parallel_size": 1,
        "num_speculative_tokens_per_batch_size": [[1, 31, 3], [32, 32, 1]],
    }
    (point,) = [p for p in sweep_points() if (p["draft"], p["k"], p["batch_size"]) == (DRAFT, 3, 1)]
    rates = found.rehearsal["synthetic_acceptance_rates"]
    assert rates == point["metrics"]["acceptance_rate_per_pos"]
    assert found.rehearsal["rejection_sample_method"] == "synthetic"
    command = shlex.split(found.command)
    assert command[:3] == ["vllm", "serve", "org/target-8b"]
    assert (
        json.loads(command[command.index("--speculative-config") + 1]) == found.speculative_config
    )
    assert any("vocabulary" in note for note in found.notes)


@pytest.mark.parametrize("in_fp8", [("target",), ("draft",), ("target", "draft")], ids=str)
def test_servers_quantise_what_was_measured_in_fp8(in_fp8: tuple[str, ...], tmp_path: Path) -> None:
    recipe = json.loads(json.dumps(RECIPE))
    for role in in_fp8:
        recipe[role]["weights"] = "fp8"
    recipe["cache"] = {"dtype": "fp8"}
    found = read(write_folder(tmp_path, sweep_points(), recipe=recipe)).deployment
    assert found is not None and found.speculative_config is not None
    assert found.sglang_command is not None
    of_draft = "fp8" if "draft" in in_fp8 else "unquant"
    assert found.speculative_config.get("quantization") == ("fp8" if "draft" in in_fp8 else None)
    assert f"--speculative-draft-model-quantization {of_draft}" in found.sglang_command
    for command in (found.command, found.sglang_command):
        assert ("--quantization fp8" in command) == ("target" in in_fp8)
        assert "--kv-cache-dtype fp8_e4m3" in command


def test_vllm_of_another_draft_tp(comparison: Content) -> None:
    found = comparison.deployment
    assert found is not None and found.speculative_config is not None
    assert found.speculative_config["draft_tensor_parallel_size"] == 4
    assert "--tensor-parallel-size 4" in found.command
    assert found.notes[0].startswith("Measured with draft TP 2 under target TP 4. vLLM refuses")


def test_vllm_ngram_and_sampling(tmp_path: Path) -> None:
    recipe = json.loads(json.dumps(RECIPE))
    recipe["speculation"] = {"method": "ngram", "ngram_max": 4, "ngram_min": 2}
    recipe["draft"] = None
    points = sweep_points(ks=(0, 2), batch_sizes=(1,), drafts=(("ngram", 0.7, 0.1),))
    found = read(write_folder(tmp_path / "a", points, recipe=recipe)).deployment
    assert found is not None
    assert found.speculative_config == {
        "method": "ngram",
        "num_speculative_tokens": 2,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
    }
    beside_drafts = read(write_folder(tmp_path / "c", points)).deployment
    assert beside_drafts is not None and beside_drafts.speculative_config is not None
    assert (
        beside_drafts.speculative_config["method"] == "ngram"
        and "model" not in beside_drafts.speculative_config
    )
    plugged = sweep_points(ks=(0, 2), batch_sizes=(1,), drafts=(("echo", 0.7, 0.1),))
    recipe["speculation"] = {"method": "echo"}
    unknown = read(write_folder(tmp_path / "d", plugged, recipe=recipe)).deployment
    assert unknown is not None and unknown.speculative_config is None
    assert unknown.notes == ["vLLM has no method echo: this k cannot be put into its config."]
    recipe = json.loads(json.dumps(RECIPE))
    recipe["sampling"]["temperature"] = 0.8
    recipe["draft"]["revision"] = "main"
    points = sweep_points(ks=(0, 2), batch_sizes=(1,), drafts=ONE_DRAFT)
    found = read(write_folder(tmp_path / "b", points, recipe=recipe)).deployment
    assert found is not None and found.speculative_config is not None
    assert found.speculative_config["draft_sample_method"] == "probabilistic"
    assert found.speculative_config["revision"] == "main"


def test_vllm_head(tmp_path: Path) -> None:
    """The method of a recipe's head, and in a sweep of several drafts that of the best one."""
    recipe = json.loads(json.dumps(RECIPE))
    recipe["speculation"]["method"] = "eagle3"
    points = sweep_points(ks=(0, 2), batch_sizes=(1,), drafts=ONE_DRAFT)
    alone = read(write_folder(tmp_path / "a", points, recipe=recipe)).deployment
    assert alone is not None and (config := alone.speculative_config) is not None
    assert (config["method"], config["model"]) == ("eagle3", DRAFT)
    assert config["draft_tensor_parallel_size"] == 1
    chosen = "speculation.eagle3_layers"
    assert chosen not in " ".join(alone.notes)
    recipe["speculation"]["eagle3_layers"] = [1, 2, 3]
    other = read(write_folder(tmp_path / "c", points, recipe=recipe)).deployment
    assert other is not None and chosen in " ".join(other.notes)
    folder = write_folder(tmp_path / "b", sweep_points(ks=(0, 2), batch_sizes=(1,)))
    summary = json.loads((folder / "summary.json").read_text())
    sections = [{"model": DRAFT, "method": "eagle3"}, {"model": OTHER}]
    summary["sweep"] = {"recipe": {"drafts": sections}}
    (folder / "summary.json").write_text(json.dumps(summary))
    beside = read(folder)
    assert beside.run.method_of(OTHER) == "draft_model"
    assert beside.deployment is not None and beside.deployment.speculative_config is not None
    assert beside.deployment.speculative_config["method"] == "eagle3"


def test_rounds_that_proposed_are_a_column_where_many_did_not(tmp_path: Path) -> None:
    points = sweep_points(ks=(0, 2), batch_sizes=(1,), drafts=(("ngram", 0.7, 0.1),))
    for share, name in ((0, "a"), (3, "b")):
        metrics = points[1]["metrics"]
        metrics["num_rounds_without_proposal"] = share * metrics["num_drafts"]
        table = read(write_folder(tmp_path / name, points)).tables["results"]
        titles = [column.title for column in table.columns]
        assert ("proposing" in titles) == bool(share)
        assert all(len(row) == len(titles) for row in table.rows)
    place = titles.index("proposing")
    assert [row[place] for row in table.rows] == [None, 25.0]
    assert table.columns[place].unit == "% of rounds" and titles[place + 2] == "accepted"


def test_what_was_predicted_is_recommended_as_such(tmp_path: Path) -> None:
    """The run's recommendation is kept, although its point was not measured."""
    points = sweep_points(ks=(0, 1, 2, 4), batch_sizes=(1,), drafts=ONE_DRAFT)
    (point,) = [p for p in points if p["k"] == 2]
    point |= {"status": "skipped", "reason": "predicted, not measured", "metrics": None}
    point |= {"speedup": None, "speedup_ci": None, "predicted_speedup": 2.345}
    names = ("speedup", "speedup_error", "mean_acceptance_length_error", "iid_error")
    point["prediction"] = dict.fromkeys((*names, "analytic_alpha")) | {
        "method": "replay",
        "is_exact": True,
        "mean_acceptance_length": 2.5,
        "iid_alpha": 0.5,
        "iid_mean_acceptance_length": 1.5,
    }
    write_folder(tmp_path, points)
    best = {"k": 2, "draft": DRAFT, "tied": [2], "reason": "predicted: k = 2 is the fastest"}
    summary = json.loads((tmp_path / "summary.json").read_text())
    summary |= {"best": best, "best_by_batch_size": {"1": best}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    content = read(tmp_path)
    assert content.headline == (
        "Recommended at batch size 1: k = 2 with draft-1b, predicted to be 2.35× the speed of "
        "plain decoding. It is the fastest."
    )
    found = content.deployment
    assert (
        found is not None and found.speculative_config is not None and found.rehearsal is not None
    )
    assert found.speculative_config["num_speculative_tokens"] == 2
    assert found.rehearsal["synthetic_acceptance_length"] == 2.5
    assert any("predicted and not measured" in note for note in found.notes)
    assert content.category_point.startswith("k = ")  # of one that was measured
    assert dict(content.card)["Gain"] == "predicted to be 2.35×"
    assert "recorded acceptance, which gives exact rounds but not exact times" in html(content)
    point["prediction"]["is_exact"] = False
    assert "in this text" in html(read(write_folder(tmp_path / "sampled", points)))


@pytest.mark.parametrize("gain", [0.97, 1.02])
def test_predicted_points_are_among_the_best_with_proposals(gain: float, tmp_path: Path) -> None:
    """The largest k is the only one that was measured; it is slow."""
    points = sweep_points(ks=(0, 1, 4), batch_sizes=(1,), drafts=ONE_DRAFT)
    for point in points:
        if point["k"] == 4:
            point |= {"speedup": 0.8, "speedup_ci": [0.78, 0.82], "predicted_speedup": 0.8}
        if point["k"] == 1:
            point |= {"status": "skipped", "metrics": None, "speedup": None, "speedup_ci": None}
            point |= {"reason": "predicted, not measured", "predicted_speedup": gain}
            point["prediction"] = dict.fromkeys(
                ("speedup_error", "mean_acceptance_length_error", "iid_error", "analytic_alpha")
            ) | {"method": "replay", "is_exact": True, "mean_acceptance_length": 1.5}
            point["prediction"] |= {"iid_alpha": 0.5, "iid_mean_acceptance_length": 1.5}
            point["prediction"] |= {"speedup": gain, "speedup_ci": [gain - 0.02, gain + 0.01]}
    write_folder(tmp_path, points)
    best = {"k": 0, "draft": None, "tied": [0], "reason": "its words", "verdict": "none"}
    summary = json.loads((tmp_path / "summary.json").read_text())
    summary |= {"best": best, "best_by_batch_size": {"1": best}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    content = read(tmp_path)
    told = f"{gain:.2f}× (95 % interval {gain - 0.02:.2f} to {gain + 0.01:.2f})"
    why = "nothing is faster than plain decoding beyond chance"
    if gain < 1:
        why = "plain decoding is fastest"
    assert content.headline == (
        f"No speculation at batch size 1: {why}. The best with proposals, k = 1 with draft-1b, is "
        f"predicted to be {told}."
    )
    card = dict(content.card)
    assert card["Fastest with proposals"] == "k = 1 with draft-1b, batch size 1"
    assert card["Gain"] == f"predicted to be {told}"


def test_the_fastest_is_the_one_that_the_run_recorded(tmp_path: Path) -> None:
    """It compares predictions with predictions, also at a k that was measured, and another k may
    have been faster there."""
    points = sweep_points(ks=(0, 1, 4), batch_sizes=(1,), drafts=ONE_DRAFT)
    points[1] |= {"speedup": 1.10, "speedup_ci": [0.9, 1.3]}
    points[2] |= {"speedup": 1.12, "speedup_ci": [0.9, 1.3]}
    write_folder(tmp_path, points)
    best = {"k": 0, "draft": None, "tied": [0, 1, 4], "reason": "x", "verdict": "inconclusive"}
    best["fastest"] = {"k": 1, "draft": points[1]["draft"], "speedup": 1.15}
    summary = json.loads((tmp_path / "summary.json").read_text())
    summary |= {"best": best, "best_by_batch_size": {"1": best}}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    card = dict(read(tmp_path).card)
    assert card["Fastest with proposals"] == "k = 1 with draft-1b, batch size 1"


def test_what_is_faster_by_chance_is_not_called_slower(tmp_path: Path) -> None:
    for sizes in [(1,), (1, 8)]:
        folder = tmp_path / str(len(sizes))
        write_folder(folder, sweep_points(ks=(0, 1), batch_sizes=sizes, drafts=ONE_DRAFT))
        summary = json.loads((folder / "summary.json").read_text())
        best = {"k": 0, "draft": None, "tied": [0, 1], "reason": "not faster beyond chance"}
        summary |= {"best": best, "best_by_batch_size": {str(size): best for size in sizes}}
        (folder / "summary.json").write_text(json.dumps(summary))
        content = read(folder)
        assert "nothing is faster than plain decoding beyond chance" in content.headline
        assert "plain decoding is fastest" not in html(content)
        assert content.deployment is not None and content.deployment.speculative_config is None
        assert "beyond chance" in content.deployment.notes[0]


def test_the_runs_own_warnings_are_told(tmp_path: Path) -> None:
    write_folder(tmp_path, sweep_points(ks=(0, 1), batch_sizes=(1,), drafts=ONE_DRAFT))
    summary = json.loads((tmp_path / "summary.json").read_text())
    told = "3 points lack prompts"
    summary["warnings"] = [{"code": "x", "message": told, "evidence": {}}, {"code": "y"}]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    damaged = "summary.json, warning 2 is not a record (it has no message): left out"
    assert read(tmp_path).warnings == [told, damaged]


def test_counts_are_whole_numbers(sweep: Content) -> None:
    for name in ("points.csv", "categories.csv"):
        for row in csv_rows(sweep, name):
            assert all(v.isdigit() for key, v in row.items() if key.startswith("num_")), row


def test_an_unfinished_run_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "samples.jsonl").write_text('{"k": 0}\n{"k": 1')
    for settings, words in [({"ks": [0, 1]}, f"specdec merge {folder} -o NEW"), ({}, "--resume")]:
        (folder / "settings.json").write_text(
            json.dumps({"version": VERSION, "settings": settings})
        )
        with pytest.raises(UsageError, match="no point of this run is finished") as caught:
            read_folder(folder)
        assert words in (caught.value.hint or "")
    assert "merge" not in (caught.value.hint or "")
    partial = write_folder(
        tmp_path / "partial",
        sweep_points(ks=(0, 1), batch_sizes=(1, 8), drafts=ONE_DRAFT)[:2],
        finished=False,
        samples=[sample_record(k=1, batch_size=8, accepted_per_round=[1])],
    )
    content = read(partial)
    assert "specdec merge" in content.warnings[0]
    assert content.deployment is not None
    assert any("The run is incomplete" in note for note in content.deployment.notes)


def test_latencies_are_those_of_their_titles(sweep: Content) -> None:
    table, point = sweep.tables["latencies"], sweep.run.points[-1]
    assert table is not None and point.metrics is not None
    row = dict(zip([column.title for column in table.columns], table.rows[-1], strict=True))
    assert row["first token p90"] == point.metrics.ttft_ms.p90
    assert row["per token p50"] == point.metrics.tpot_ms.p50 != point.metrics.ttft_ms.p50


def test_what_a_first_token_waits_for(sweep: Content, tmp_path: Path) -> None:
    assert not sweep.tables["first_tokens"].rows, "no prompt has them"
    points = sweep_points(ks=(0, 3), batch_sizes=(1,), drafts=ONE_DRAFT)
    spent = {"queue": 5.5, "target_prefill": 11.5, "draft_prefill": 2.5, "first_round": 4.5}
    points[1]["metrics"]["ttft_parts_ms"] = spent
    content = read(write_folder(tmp_path, points))
    header, *rows = Page(html(content)).tables["table-first_tokens"]
    assert header[3:] == [
        f"{name}ms"
        for name in ("first token", "target's prefill", "draft's prefill", "first round")
    ] + ["queued beforems"]
    assert [row[2:] for row in rows] == [["3", "19.0", "11.5", "2.5", "4.5", "5.5"]]
    assert "## The first token" in markdown(content, [], "")
    plain, row = csv_rows(content, "points.csv")
    assert {part: float(row[f"ttft_{part}_ms"]) for part in spent} == spent
    assert plain["ttft_queue_ms"] == "" and "ttft_queue_ms" not in csv_rows(sweep, "points.csv")[0]


def test_rates_for_vllm_never_rise(tmp_path: Path) -> None:
    """In rounds of several lengths a later place may be accepted more often than an earlier one."""
    points = sweep_points(ks=(0, 3), batch_sizes=(1,), drafts=ONE_DRAFT)
    points[1]["metrics"]["acceptance_rate_per_pos"] = [0.8, 0.6, 0.7]
    found = read(write_folder(tmp_path, points)).deployment
    assert found is not None and found.rehearsal is not None
    assert found.rehearsal["synthetic_acceptance_rates"] == [0.8, 0.6, 0.6]


def test_a_draft_with_a_baseline_of_its_own_is_held_against_it(tmp_path: Path) -> None:
    """Earlier versions measured plain decoding beside each draft."""
    points = sweep_points(ks=(0, 2), batch_sizes=(1,))
    plain, *others = points
    second = json.loads(json.dumps(plain))
    second["metrics"]["decode_tokens_per_second"] *= 2
    points = [plain | {"draft": DRAFT}, second | {"draft": OTHER}, *others]
    run = read(write_folder(tmp_path, points)).run
    for draft in (DRAFT, OTHER):
        (point,) = [p for p in run.points if (p.draft, p.k) == (draft, 2)]
        base = baseline_of(run.points, point)
        assert base is not None and base.draft == draft
