"""Runs side by side: ratios are over the prompts that both have, paired by their token ids."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.app import main
from specdec_cli.experiment.load.goodput import ratio_interval
from specdec_cli.experiment.statistics import stats
from specdec_cli.report.cells import rows_of
from specdec_cli.report.drawings.rows import draw_runs
from specdec_cli.report.run_tables import run_tables
from specdec_cli.report.runs import Ratio, SideBySide, side_by_side
from tests.report_helpers import (
    DRAFT,
    RECIPE,
    comparison_points,
    sample_record,
    sweep_points,
    write_folder,
)

TIMES = [1.0, 1.3, 0.8, 1.1, 0.9, 1.2]  # seconds of plain decoding, by prompt


def folder(path: Path, factor: float, first: int = 0, **recipe: Mapping[str, Any] | None) -> Path:
    """A run whose rounds take `factor` times as long; its prompts are those from `first` on."""
    points = sweep_points(ks=(0, 2), batch_sizes=(1,), drafts=((DRAFT, 0.78, 0.95),))
    for point in points:
        point["metrics"]["decode_tokens_per_second"] /= factor
    samples = []
    for k, gain in ((0, 1.0), (2, 2.0)):
        for i, seconds in enumerate(TIMES[first:]):
            spent = factor * seconds / gain * (1 + 0.01 * i * k)
            rounds = [2] * 4 if k else []
            samples.append(
                sample_record(
                    draft=DRAFT if k else None,
                    k=k,
                    index=i,
                    prompt_token_ids=[first + i],
                    accepted_per_round=rounds,
                    decode_seconds=[spent],
                    token_ids=[1] * 11 + [2 if factor == 3.0 and i == 1 else 1],
                )
            )
    return write_folder(path, points, recipe=RECIPE | recipe, samples=samples)


def against_first(whole: SideBySide) -> dict[tuple[str, int], Ratio]:
    pairs = [(one, whole.against_first(one)) for one in whole.shown]
    return {(one.run, one.point.k): ratio for one, ratio in pairs if ratio is not None}


def test_common_prompts_are_paired_whatever_their_index(tmp_path: Path) -> None:
    first = folder(tmp_path / "a", 1.0)
    slow = folder(tmp_path / "b", 3.0, first=2, target={"model": "org/target-8b", "dtype": "x"})
    whole = side_by_side([first, slow])
    assert side_by_side([slow, first]).headline == whole.headline, "the faster one is first"
    ratios = against_first(whole)
    assert ratios.keys() == {("b", 0), ("b", 2)}
    plain = ratios["b", 0]
    assert (plain.num_prompts, plain.num_diverging) == (4, 1)  # the second of its prompts
    assert plain.speed_ratio == pytest.approx(1 / 3) and plain.verdict == "no interval"  # alike
    # The same prompts' speeds, which the position in a run does not change.
    speeds = []
    for run, start in ((slow, 2), (first, 0)):
        lines = map(json.loads, (run / "samples.jsonl").read_text().splitlines())
        own = {s["prompt_token_ids"][0]: s["decode_seconds"][0] for s in lines if s["k"] == 2}
        speeds.append(stats.speed([12.0] * 4, [own[i] for i in range(2, 6)]))
        assert min(own) == start
    expected = speeds[0].over(speeds[1])
    assert ratios["b", 2].speed_ratio == pytest.approx(expected.value)
    assert ratios["b", 2].speed_ratio_ci == pytest.approx(stats.interval(expected))
    (pair,) = whole.pairs
    assert [side.run for side in pair[:2]] == ["a", "b"]
    told = f"a (k = 2 with draft-1b) is {1 / expected.value:.2f}× as fast as b"
    assert whole.headline.startswith(told)
    assert whole.differences["target.dtype"] == ["–", "x"]
    assert "speculation.method" not in whole.differences
    assert rows_of({"a": {"b": {"c": 1}}}) == [("a.b.c", "1")]
    # The picture has the ratio and its interval.
    figure = pytest.importorskip("matplotlib.figure").Figure()
    assert draw_runs(figure, whole)
    (axis,) = figure.axes
    row = next(i for i, t in enumerate(axis.get_yticklabels()) if "k = 2" in t.get_text())
    (bar,) = axis.containers
    (((low, _), (high, at)),) = bar.lines[2][0].get_segments()
    assert (low, high, at) == pytest.approx((*ratios["b", 2].speed_ratio_ci, row))


def test_runs_without_a_common_prompt_are_shown_without_a_ratio(tmp_path: Path) -> None:
    whole = side_by_side([folder(tmp_path / "a", 1.0)] * 2)
    assert whole.names[0] != whole.names[1]  # one folder twice
    other = folder(tmp_path / "c", 1.1, first=5)
    samples = (
        (other / "samples.jsonl")
        .read_text()
        .replace('"prompt_token_ids": [5]', '"prompt_token_ids": [77]')
    )
    (other / "samples.jsonl").write_text(samples)
    whole = side_by_side([tmp_path / "a", other])
    assert against_first(whole) == {}
    assert whole.headline.endswith("have no prompt in common at batch size 1.")


def test_inconclusive_verdicts_are_said_beside_the_comparison(tmp_path: Path) -> None:
    """The fastest point of such a run may be called "no speculation", which nothing has shown."""
    sure, unsure = folder(tmp_path / "a", 1.0), folder(tmp_path / "b", 1.2)
    summary = json.loads((unsure / "summary.json").read_text())
    summary["best_by_batch_size"]["1"]["verdict"] = "inconclusive"
    (unsure / "summary.json").write_text(json.dumps(summary))
    first, *rest = side_by_side([sure, unsure]).answers
    told = "b does not show whether speculation helps at batch size 1: its verdict is inconclusive."
    assert first.startswith("a (k = 2") and rest == [told]
    # Such a run alone has nothing to be compared with, and its verdict is said all the same.
    (sure / "points.jsonl").write_text("")
    (sure / "samples.jsonl").write_text("")
    whole = side_by_side([sure, unsure])
    assert whole.pairs == [] and whole.answers == [whole.headline, told]


def test_the_command_prints_and_writes_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [str(folder(tmp_path / name, factor)) for name, factor in (("a", 1.0), ("b", 1.2))]
    out = tmp_path / "out"
    formats = "html,md,csv,tex"
    assert main(["report", *folders, "-o", str(out), "--format", formats, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["answer"].startswith("a (k = 2 with draft-1b) is measured 1.20× as fast as b")
    (pair,) = document["comparisons"]
    assert (pair["arm"]["run"], pair["num_prompts"], pair["tied"]) == ("a", 6, None)
    names = {file.name for file in out.iterdir()}
    tables = {f"{name}.{kind}" for name in ("runs", "pairs") for kind in ("csv", "tex")}
    assert names == {"report.html", "report.md", *tables}
    assert main(["report", *folders]) == 0
    printed = capsys.readouterr().out
    assert document["answer"] in printed and "Side by side:" in printed
    assert main(["report", *folders, "--format", "vllm"]) == 2
    assert "a vLLM config need exactly one" in capsys.readouterr().err


def test_a_comparison_beside_a_sweep_differs_only_in_what_differs(tmp_path: Path) -> None:
    """The points of a comparison name no draft; a sweep of n-grams has no section of one."""
    sweep = folder(tmp_path / "a", 1.0)
    degrees = {"target_tp": 2, "draft_tp": 1, "draft": DRAFT, "k": 5}
    rounds = {"accepted_per_round": [2] * 4, "decode_seconds": [0.01]}
    drafted = [sample_record(**degrees, **rounds, index=i, prompt_token_ids=[i]) for i in range(6)]
    points = comparison_points((2,), (1,))
    comparison = write_folder(tmp_path / "b", points, samples=drafted)
    whole = side_by_side([sweep, comparison])
    assert not whole.differences.keys() & {"drafts", "draft"}
    document = whole.as_dict()
    (point,) = [point for point in document["points"] if point["run"] == "b"]
    assert degrees.items() <= point.items()
    (pair,) = document["comparisons"]
    assert pair["arm"] == {"run": "a", "draft": DRAFT, "k": 2}
    assert pair["against"] == {"run": "b", **degrees}
    without = folder(tmp_path / "c", 1.0, draft=None)
    differences = side_by_side([without, comparison]).differences
    assert "draft" not in differences
    assert differences["draft.model"] == ["–", RECIPE["draft"]["model"]]


def test_plain_decoding_of_all_pairs_counts_once_for_each_prompt(tmp_path: Path) -> None:
    """Each pair of degrees measures k = 0: its times are repeats, as in the point that is shown."""

    def comparison(path: Path, factors: Mapping[int, float]) -> Path:
        samples = [
            sample_record(
                **{"target_tp": 2, "draft_tp": draft_tp, "draft": None, "index": i},
                prompt_token_ids=[7 if i < 2 else i],  # two prompts with the same tokens
                decode_seconds=[factor * seconds],
            )
            for draft_tp, factor in factors.items()
            for i, seconds in enumerate(TIMES)
        ]
        return write_folder(path, comparison_points((2,), (1,)), samples=samples)

    first = comparison(tmp_path / "a", {1: 1.0, 2: 1.2})
    whole = side_by_side([first, comparison(tmp_path / "b", {1: 1.0, 2: 1.4})])
    plain = against_first(whole)["b", 0]
    assert plain.num_prompts == len(TIMES)
    assert plain.speed_ratio == pytest.approx((1.0 + 1.2) / (1.0 + 1.4))


def loaded(path: Path, slower: float = 1.0, seed: int = 0) -> Path:
    """A run at 4 requests/s, of two prompts in turn. k = 0 is overloaded, k = 4 decodes fastest,
    and k = 2, which answers fastest, is recommended."""
    points = sweep_points(ks=(0, 2, 4), batch_sizes=(1,), drafts=((DRAFT, 0.78, 0.95),))
    samples = []
    for point in points:
        k, took = point["k"], slower * {0: 90.0, 2: 50.0, 4: 60.0}[point["k"]]
        load = {name: None for name in ("slo_attainment", "slo_attainment_ci", "goodput")}
        load |= {"arrivals": "poisson", "seed": seed, "slo": {}, "goodput_ci": None}
        load |= {"offered_rate": 4.0, "achieved_rate": 3.9, "window_seconds": 10.0}
        load |= {"num_requests": 40, "num_failed": 0, "num_unmeasured": 4, "max_in_flight": 3}
        none = {"mean": None, "p50": None, "p90": None, "p99": None}
        load |= {"send_lag_ms": none, "overloaded": k == 0}
        point |= {"request_rate": 4.0, "load": load}
        point["metrics"] |= {"e2el_ms": none | {"mean": took}, "decode_tokens_per_second": 9.0 + k}
        samples += [
            sample_record(
                draft=DRAFT if k else None,
                k=k,
                index=i % 2,
                prompt_token_ids=[i % 2],
                request_rate=4.0,
                request=i,
                due=i / 4,
                accepted_per_round=[2] * 4 if k else [],
                e2el_ms=[took * (1 + 0.1 * (i % 7)) * (1 + 0.01 * (k + i % 3) * (slower - 1))],
            )
            for i in range(40)
        ]
    folder = write_folder(path, points, samples=samples)
    summary = json.loads((folder / "summary.json").read_text())
    best = {"k": 2, "draft": DRAFT, "tied": [2], "reason": "…", "by": "latency", "verdict": "use"}
    summary |= {"best": best, "best_by_batch_size": {}, "best_by_request_rate": {"4": best}}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_runs_at_a_rate_are_compared_by_the_time_of_their_requests(tmp_path: Path) -> None:
    """By what each run recommends, over all requests, and without overloaded points."""
    whole = side_by_side([loaded(tmp_path / "a", 1.5), loaded(tmp_path / "b")])
    assert {(one.point.k, one.is_best) for one in whole.shown} == {(2, True)}
    ((one, other, ratio),) = whole.pairs
    assert (one.run, other.run) == ("b", "a") and ratio is not None
    times = [
        [s.e2el_ms[0] for s in sorted(side.samples.values(), key=lambda s: s.request or 0)]
        for side in (other, one)
    ]
    assert ratio.num_prompts == len(times[0]) == 40
    assert ratio.speed_ratio == pytest.approx(sum(times[0]) / sum(times[1]))
    assert ratio.speed_ratio_ci == pytest.approx(ratio_interval(*times))
    told = "b (k = 2 with draft-1b) is 1.52× as fast as a (k = 2 with draft-1b) by the mean time of"
    assert whole.headline.startswith(f"{told} a request over 40 common requests at 4 requests/s (")
    table = next(table for table in run_tables(whole) if table.name == "runs")
    assert "request" in [column.title for column in table.columns] and "inverse" in table.note
    other_seed = side_by_side([tmp_path / "b", loaded(tmp_path / "c", seed=1)])
    assert other_seed.headline.endswith(
        "no request with the same arrivals in common at 4 requests/s."
    )
