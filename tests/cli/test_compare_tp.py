"""`specdec compare-tp`: the document, the folder, failing pairs and interruptions.

Ranks take seconds to start, so few comparisons are run and each serves several tests. Commands and
agents are forks of this process here; tests/launch starts some as users do.
"""

import json
import os
import re
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.commands.compare_tp import degrees_of
from specdec_cli.demo import demo_path
from specdec_cli.recipe import load_recipe
from specdec_cli.text import digest
from tests.cli.generate_helpers import Result, generate
from tests.cli.sweep_helpers import gain, specdec
from tests.launch.forks import over_forks
from tests.launch.helpers import marked, start, wait_until_gone
from tests.mtp_pair import STARTS, save_mtp

pytestmark = pytest.mark.dist

QUICK = ["--device", "cpu", "--max-new-tokens", "8", "--set", "run.warmup=0"]
COMPARE = ["compare-tp", "demo", *QUICK, "--set", "run.repeats=1", "--limit", "2"]
CONTRACT = {
    "target_tp",
    "draft_tp",
    "batch_size",
    "status",
    "metrics",
    "broadcast_ms",
    "num_blocks",
    "blocks_per_rank",
    "speedup",
    "speedup_vs_equal_tp",
}

Capture = pytest.CaptureFixture[str]


def records(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def last_samples(folder: Path) -> list[dict[str, Any]]:
    """Samples in order; the last one counts if a repeated pair left two for a prompt."""
    names = ("target_tp", "draft_tp", "batch_size", "k", "index")
    found = {tuple(s[n] for n in names): s for s in records(folder, "samples.jsonl")}
    return [found[place] for place in sorted(found)]


def by_place(points: Sequence[dict[str, Any]]) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {(p["target_tp"], p["draft_tp"], p["batch_size"]): p for p in points}


DEGREES = ["--target-tp", "1,2", "--draft-tp", "1,2", "--batch-size", "1,2", "--batches", "1"]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A comparison of target TP 1, 2 and draft TP 1, 2 at two batch sizes; one pair fails."""
    folder = tmp_path_factory.mktemp("compare") / "run"
    # Rank 1 has a part of the draft in only one of the pairs.
    faulty = {"PLANTED_FAULT": "raise:draft:1"}
    return folder, over_forks(*COMPARE, *DEGREES, "-o", folder, "--json", **faulty)


@pytest.fixture(scope="module")
def whole(broken: tuple[Path, Result]) -> tuple[Path, Result]:
    """The same comparison, resumed and finished."""
    folder, _ = broken
    result = over_forks(*COMPARE, *DEGREES, "-o", folder, "--resume", "--json")
    assert result.code == 0, result.err
    return folder, result


def test_a_failing_pair_is_a_row(broken: tuple[Path, Result]) -> None:
    _, result = broken
    assert result.code == 3, result.err
    points = by_place(result.document["points"])
    # The third round fails and batch size 1 takes two, so its samples are kept.
    assert points[2, 2, 1]["status"] == "ok"
    failed = points[2, 2, 2]
    assert failed["status"] == "failed" and failed["metrics"] is None
    assert failed["reason"] == "rank 1: ArithmeticError: the planted error"
    assert points[2, 1, 2]["status"] == points[2, None, 2]["status"] == "ok"
    assert points[2, 1, 2]["speedup_vs_equal_tp"] is None
    assert "target TP 2, draft TP 2, batch size 2: failed: rank 1: ArithmeticErr" in result.err


def test_modules_in_the_target_have_its_degree(tmp_path: Path) -> None:
    target = save_mtp(tmp_path / "target", steps=0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in STARTS[:2]))
    recipe = tmp_path / "mtp.yaml"
    recipe.write_text(f"target: {{model: {target}}}\nspeculation: {{method: mtp}}\n")
    own = ["--dataset", prompts, "-k", "1", "--batch-size", "2", "--set", "run.repeats=1", "--json"]
    result = over_forks("compare-tp", recipe, *QUICK, "--target-tp", "1,2", *own)
    assert result.code == 0, result.err
    points = by_place(result.document["points"])
    assert points[2, 1, 2]["status"] == points[1, 2, 2]["status"] == "skipped"
    assert points[2, 1, 2]["reason"] == "a draft in the target's checkpoint has target TP 2"
    measured = [points[place] for place in ((1, None, 2), (1, 1, 2), (2, None, 2), (2, 2, 2))]
    assert all(point["status"] == "ok" for point in measured)
    assert len({point["tokens_sha256"] for point in measured}) == 1, "the same text everywhere"
    assert points[2, 2, 2]["metrics"]["num_draft_tokens"] > 0
    assert result.document["comparison"]["draft"] == "mtp"


def test_resume_runs_what_failed_only(
    broken: tuple[Path, Result], whole: tuple[Path, Result]
) -> None:
    before, after = (by_place(r.document["points"]) for _, r in (broken, whole))
    same = ("metrics", "blocks_per_rank", "tokens_sha256")
    for place in ((1, 1, 1), (1, 1, 2), (2, 1, 1), (2, 1, 2)):
        assert [after[place][n] for n in same] == [before[place][n] for n in same]
    assert after[2, 2, 1]["metrics"] == before[2, 2, 1]["metrics"]
    lines = [line for line in whole[1].err.splitlines() if "tokens/s" in line]
    # One pair reports k = 0 and k at one batch size. The others report nothing again.
    assert len(lines) == 2 and lines[1].startswith("target TP 2, draft TP 2, batch size 2: ")


def test_document(whole: tuple[Path, Result]) -> None:
    folder, result = whole
    document = result.document
    points = by_place(document["points"])
    degrees = [(1, None), (1, 1), (1, 2), (2, None), (2, 1), (2, 2)]
    assert set(points) == {(*pair, b) for pair in degrees for b in (1, 2)}
    assert len(points) == len(document["points"])
    for (target_tp, draft_tp, batch_size), point in points.items():
        assert point.keys() >= CONTRACT
        if target_tp == 1 and draft_tp == 2:
            assert point["status"] == "skipped" and point["metrics"] is None
            assert point["reason"] == "draft TP 2 does not divide target TP 1"
            continue
        metrics = point["metrics"]
        assert point["status"] == "ok" and metrics["num_prompts"] == batch_size
        assert point["broadcast_ms"] == metrics["broadcast_ms"]
        assert target_tp == 1 or point["broadcast_ms"] > 0.05
        assert len(point["blocks_per_rank"]) == target_tp
        assert 0 < point["num_blocks"] <= min(point["blocks_per_rank"])
        assert metrics["k"] == point["k"] == (0 if draft_tp is None else 4)
        assert point["speedup"] == 1.0 or draft_tp is not None
    assert json.loads((folder / "summary.json").read_text()) == document


def test_what_is_kept_is_a_recipe_that_runs(whole: tuple[Path, Result]) -> None:
    folder, result = whole
    kept = load_recipe(str(folder / "recipe.yaml"))
    assert kept.model_dump(mode="json") == result.document["recipe"]
    assert kept.draft is not None and kept.run.batch_size == 1
    assert (kept.target.tensor_parallel_size, kept.draft.tensor_parallel_size) == (1, 1)


def test_the_rank_without_the_draft_has_room_for_more(whole: tuple[Path, Result]) -> None:
    points = by_place(whole[1].document["points"])
    with_draft, without = points[2, 1, 1]["blocks_per_rank"]
    # The draft has its part of the demo pair's KV bytes, and one of two ranks holds none.
    assert without > 1.2 * with_draft


def test_speedups_follow_from_the_samples(whole: tuple[Path, Result]) -> None:
    folder, result = whole
    points, samples = by_place(result.document["points"]), last_samples(folder)

    def speed(pair: tuple[int, int], batch_size: int, k: int) -> float:
        own = [
            s
            for s in samples
            if (s["target_tp"], s["draft_tp"], s["batch_size"], s["k"]) == (*pair, batch_size, k)
        ]
        assert [s["index"] for s in own] == list(range(batch_size))
        # Plain decoding's prefill decides each first token, in no round's time.
        assert [s.get("num_tokens_from_prefill", 0) for s in own] == [int(k == 0)] * batch_size
        tokens = sum(len(s["token_ids"]) - int(k == 0) for s in own)
        return tokens / sum(sum(s["decode_seconds"]) for s in own)

    for pair in ((1, 1), (2, 1), (2, 2)):
        for batch_size in (1, 2):
            point = points[*pair, batch_size]
            fast = speed(pair, batch_size, 4)
            assert gain(point) == pytest.approx(fast / speed(pair, batch_size, 0))
            equal = speed((pair[0], pair[0]), batch_size, 4)
            assert point["speedup_vs_equal_tp"] == pytest.approx(fast / equal)
    best = max((p for p in points.values() if p["status"] == "ok" and p["k"]), key=_speed)
    overall = result.document["best_by_batch_size"][str(best["batch_size"])]
    assert (overall["target_tp"], overall["draft_tp"]) == (best["target_tp"], best["draft_tp"])
    assert result.document["best"] == result.document["best_by_batch_size"]["1"]


def _speed(point: dict[str, Any]) -> float:
    return float(point["metrics"]["decode_tokens_per_second"])


def test_every_pair_writes_what_generate_writes(
    whole: tuple[Path, Result], capsys: Capture
) -> None:
    folder, result = whole
    alone = generate(capsys, "demo", *QUICK, "-k", "0", "--limit", "2", "--json", "-q")
    expected = [o["token_ids"] for o in alone.outputs]
    samples = last_samples(folder)
    assert len(samples) == 3 * 2 * (1 + 2)
    assert all(s["token_ids"] == expected[s["index"]] for s in samples)
    assert result.document["tokens"] == {
        "compared": True,
        "must_be_identical": True,
        "identical": True,
        "diverging": [],
    }


def test_folder_and_report(whole: tuple[Path, Result], capsys: Capture) -> None:
    folder, result = whole
    last = by_place(records(folder, "points.jsonl"))
    assert last == by_place(result.document["points"])
    found = specdec(capsys, "report", folder, "-o", folder.parent / "report", "--json")
    assert found.code == 0 and found.document["kind"] == "compare-tp"
    assert not found.document["is_partial"]
    files = {Path(name).name for name in found.document["files"]}
    assert {"report.html", "points.csv", "rounds.png"} <= files
    assert (folder / "plots" / "rounds.png").stat().st_size > 1000


@pytest.mark.usefixtures("no_pixels")
def test_a_finished_comparison_starts_nothing_on_resume(
    whole: tuple[Path, Result], capsys: Capture
) -> None:
    folder, _ = whole
    again = [*COMPARE, *DEGREES, "-o", str(folder), "--resume"]
    before = {name: (folder / name).read_bytes() for name in ("samples.jsonl", "points.jsonl")}
    table = specdec(capsys, *again)
    assert table.code == 0 and re.search("at target TP 2 the (best|fastest) draft TP is", table.out)
    assert before == {name: (folder / name).read_bytes() for name in before}
    alone = specdec(capsys, "compare-tp", "--resume", "-o", folder)
    assert (alone.code, alone.out) == (0, table.out), alone.err
    summary, text = folder / "summary.json", (folder / "summary.json").read_text()
    where = json.loads(text)["environment"]
    summary.write_text(json.dumps(json.loads(text) | {"environment": where | {"cpu_count": 99}}))
    document = specdec(capsys, *again, "--json").document  # keeps the original environment
    assert document["environment"]["cpu_count"] == 99
    assert json.loads(summary.read_text()) == document
    summary.write_text(text)
    planned = specdec(capsys, "compare-tp", "--resume", "-o", folder, "--dry-run", "--json")
    assert planned.document["num_samples"] == planned.document["seconds"] == 0
    assert "target TP 2, draft TP 1: measured\n" in planned.document["text"]
    other = specdec(capsys, *again, "-k", "2")
    assert other.code == 2 and "num_speculative_tokens is 4 there and 2 now" in other.err
    fewer = specdec(capsys, *again, "--target-tp", "1")
    assert fewer.code == 2 and "--target-tp is 1,2 there and 1 now" in fewer.err


def test_a_document_has_the_settings_of_its_folder(
    whole: tuple[Path, Result], tmp_path: Path, capsys: Capture
) -> None:
    """The target had another name when the comparison began, such as a relative path."""
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    found = json.loads((folder / "settings.json").read_text())
    found["settings"]["recipe"]["target"]["model"] = "earlier-name"
    found["hash"] = digest(found["settings"])
    (folder / "settings.json").write_text(json.dumps(found))
    result = specdec(capsys, "compare-tp", "--resume", "-o", folder, "--json")
    assert result.code == 0, result.err
    told = found["settings"] | {"settings_hash": found["hash"]}
    assert result.document["comparison"] == told


@pytest.mark.slow
def test_resume_after_a_killed_parent(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    sizes = ["--target-tp", "1", "--draft-tp", "1", "--batch-size", "1,2"]
    # Batch size 2 takes seconds and writes its samples only after the last repeat.
    asked = [*COMPARE, *sizes, "-o", folder, "--set", "run.repeats=6"]
    environ = marked()
    parent = start(["-m", "specdec_cli", *map(str, asked)], environ)
    deadline = time.monotonic() + 120
    path = folder / "samples.jsonl"
    while not path.exists() or path.read_bytes().count(b"\n") < 4:
        assert time.monotonic() < deadline and parent.poll() is None
        time.sleep(0.01)
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate(timeout=60)
    assert wait_until_gone(environ, 10) == []
    kept = [s for s in records(folder, "samples.jsonl") if s["batch_size"] == 1]
    assert len(kept) == 4 and not (folder / "summary.json").exists()

    where = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(where | {"cpu_count": 99}))
    result = over_forks(*asked, "--resume", "--json")
    assert result.code == 0, result.err
    assert {p["status"] for p in result.document["points"]} == {"ok"}
    samples = records(folder, "samples.jsonl")
    assert [s for s in samples if s["batch_size"] == 1] == kept  # none is measured again
    # Two worlds; one that other work disturbed writes its facts again, with a warning.
    assert len({facts["load_seconds"] for facts in records(folder, "pairs.jsonl")}) == 2
    said = f"samples are from two environments (cpu_count was 99 and is {where['cpu_count']}): "
    (told,) = [one for one in result.document["warnings"] if one["code"] == "environment_changed"]
    assert told["message"].startswith(said) and "measure again" in told["message"]
    assert f"warning: {told['message']}\n" in result.err


@pytest.mark.slow  # sweeps tell of them by the same function, in test_sweep_k.py
def test_prompts_that_cannot_run_are_told(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"prompt": "x = 1"}) + "\n" + json.dumps({"prompt": "y " * 3000}))
    result = over_forks(*COMPARE, "--dataset", data, "--json")
    told = "not every prompt could run; these are left out: prompt 1: the prompt has"
    assert result.code == 3 and result.document["points"][0]["status"] == "ok"
    assert told in result.document["warnings"][-1]["message"] and told in result.err


@pytest.mark.slow  # sweeps say it by the same function, in test_sweep_k.py
def test_where_no_pair_can_be_measured_the_result_has_an_error(tmp_path: Path) -> None:
    draft = shutil.copytree(demo_path("demo:draft"), tmp_path / "draft")
    with open(draft / "model.safetensors", "r+b") as file:
        file.truncate(5000)
    result = over_forks(*COMPARE, "--draft", draft, "--json", "-o", tmp_path / "run")
    document = result.document
    assert result.code == 5 and {p["status"] for p in document["points"]} == {"failed"}
    assert document["error"]["code"] == 5
    assert "no point could be measured: " in document["error"]["message"]
    assert result.err.count("error: no point could be measured") == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == document


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--target-tp", "1", "--draft-tp", "2"], 2, "draft TP 2 does not divide target TP 1"),
        (["--target-tp", "0"], 2, "--target-tp: expected numbers such as 1,8, got '0'"),
        (["--target-tp", "3"], 2, "no legal pair: "),
        (["-k", "0"], 2, "k = 0 does not use the draft"),
        (["--set", "speculation.method=ngram"], 2, "compare-tp needs a draft model"),
        (["--set", "speculation.method=ngram"], 2, "--set speculation.method=draft_model"),
        (["--device", "cuda:0"], 2, "cuda:0 is a single device"),
        (["--resume"], 2, "--resume needs the comparison's folder"),
    ],
)
def test_refused(options: list[str], code: int, message: str, capsys: Capture) -> None:
    result = specdec(capsys, *COMPARE, *options)
    assert result.code == code, result.err
    assert message in result.err and "Traceback" not in result.err and result.out == ""


def test_ranks_are_not_to_be_started_by_hand(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_hand = specdec(capsys, "compare-tp-ranks", "1", "cpu", "10")
    assert by_hand.code == 2 and "run specdec compare-tp" in by_hand.err
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    inside = specdec(capsys, *COMPARE)
    assert inside.code == 2 and "torchrun started this one" in inside.err


def test_a_key_that_no_choice_reads_is_warned_of(capsys: Capture) -> None:
    key = "speculation.synthetic_acceptance_length"
    told = f"warning: {key} has no effect: speculation.acceptance is rejection"
    given = (*COMPARE, *DEGREES, "--dry-run", "--json", "--set", f"{key}=2")
    assert told in specdec(capsys, *given).err.splitlines()
    given = (*given, "--set", "speculation.acceptance=synthetic")
    assert told not in specdec(capsys, *given).err


def test_dry_run_starts_nothing(capsys: Capture) -> None:
    result = specdec(capsys, *COMPARE, *DEGREES, "--dry-run", "--json")
    assert result.code == 0
    pairs = {(p["target_tp"], p["draft_tp"]): p["status"] for p in result.document["pairs"]}
    assert pairs == {(1, 1): "ok", (1, 2): "skipped", (2, 1): "ok", (2, 2): "ok"}
    assert result.document["num_samples"] == 3 * 2 * (1 + 2)
    low, high = result.document["seconds_range"]
    assert 0 < low < result.document["seconds"] < high
    lines = result.document["text"].splitlines()
    assert re.match(r"time: about \d+ s, usually right within a factor of 2; ", lines[-1])


def test_drafts_have_the_degrees_that_divide_those_of_the_target() -> None:
    assert degrees_of("4,2", None, 1) == ([2, 4], [1, 2, 4])
    assert degrees_of(None, None, 6) == ([6], [1, 2, 3, 6])
    assert degrees_of(None, "2", 4) == ([4], [2])
