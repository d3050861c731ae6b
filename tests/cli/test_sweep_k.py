"""`specdec sweep-k`: the document, the folder and interruptions."""

import io
import json
import os
import re
import shutil
import signal
import sys
import time
import weakref
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.live_render import LiveRender
from rich.table import Table

from specdec_cli import demo
from specdec_cli.commands.status import write_pictures
from specdec_cli.demo import demo_path
from specdec_cli.engine.loop import Engine
from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.conclusions import Best
from specdec_cli.experiment.folders.records import Key, Point
from specdec_cli.experiment.folders.records import Sample as Record
from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.experiment.machine import MachineWatch
from specdec_cli.experiment.measure import Watcher
from specdec_cli.report.folder import read_folder
from specdec_cli.terminal.render import progress_bar
from specdec_cli.terminal.sweep import _first_token_line
from specdec_cli.terminal.watching import SweepLines, SweepTable, watcher
from tests.cli.generate_helpers import Result, on_terminal, prompt_options
from tests.cli.sweep_helpers import (
    Sample,
    gain,
    lost_or_torn,
    samples,
    specdec,
    stopped_sweep,
    sweep_process,
    without_times,
)
from tests.cli.without_torch import without_torch
from tests.report_helpers import sample_record
from tests.support import tiny_config

# Short prompts: reading the bundled ones would take longer than all rounds.
PROMPTS = Path(__file__).parents[1] / "short_prompts.jsonl"
QUICK = ["--device", "cpu", "--max-new-tokens", "8", "--set", "run.warmup=0"]
QUICK += ["--set", f"data.path={PROMPTS}"]
ONCE = ["--set", "run.repeats=1"]
SWEEP = ["sweep-k", "demo", *QUICK, "--set", "run.repeats=2", "--k", "0-2", "--limit", "4"]
TWO_DRAFTS = ["--draft", "demo:draft", "--draft", "demo:draft-distilled"]
BOTH_SYNTHETIC = ["--synthetic-acceptance-rates", "0.5", "--synthetic-acceptance-length", "2"]
CONTRACT = {
    "k",
    "batch_size",
    "draft",
    "status",
    "metrics",
    "speedup",
    "speedup_ci",
    "predicted_speedup",
    "mean_acceptance_length_ci",
    "per_category",
}
SAMPLE = [
    "draft",
    "k",
    "batch_size",
    "index",
    "category",
    "prompt_token_ids",
    "token_ids",
    "finish_reason",
    "accepted_per_round",
    "seconds",
]

SAMPLED = ["--temperature", "0.8"]

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.usefixtures("small_demo", "no_pictures")


@pytest.fixture(scope="module")
def whole(
    small_demo: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """A finished sweep: its folder and document."""
    from specdec_cli.app import main

    folder = tmp_path_factory.mktemp("sweep") / "run"
    assert main([*SWEEP, "-q", "-o", str(folder)]) == 0
    return folder, json.loads((folder / "summary.json").read_text())


def refused(result: Result, code: int, message: str) -> None:
    assert result.code == code, result.err
    assert message in result.err and "Traceback" not in result.err and result.out == ""


def test_document(whole: tuple[Path, dict[str, Any]]) -> None:
    folder, document = whole
    points = document["points"]
    assert [(p["draft"], p["batch_size"], p["k"]) for p in points] == [
        (None, 1, 0),
        ("demo:draft", 1, 1),
        ("demo:draft", 1, 2),
    ]
    for point in points:
        assert point.keys() >= CONTRACT
        metrics = point["metrics"]
        assert point["status"] == "ok" and metrics["num_prompts"] == 4
        low, high = point["speedup_ci"] or [gain(point)] * 2
        assert low - 1e-9 <= gain(point) <= high + 1e-9
        even = point["break_even"]
        if even is not None:  # the speed-up is how far a round's tokens are beyond what it costs
            ratio = metrics["tokens_per_round"] / even["tokens_per_round"]
            assert ratio == pytest.approx(gain(point)) and not even["is_predicted"]
        low, high = point["mean_acceptance_length_ci"]
        assert low - 1e-9 <= metrics["mean_acceptance_length"] <= high + 1e-9
        assert set(point["per_category"]) == {"data"}
        assert metrics["draft_ms"] + metrics["verify_ms"] <= metrics["round_ms"]
        assert {"mean", "p50", "p90", "p99"} == set(metrics["ttft_ms"])
    assert points[0]["speedup"] == 1.0 and points[0]["metrics"]["mean_acceptance_length"] == 1.0
    assert points[0]["metrics"]["num_drafts"] == 0
    assert document["best"].keys() >= {"k", "draft", "tied", "reason"}
    assert document["best_by_batch_size"] == {"1": document["best"]}
    lines = (folder / "points.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == points
    for point in points:  # greedy: the replay is exact
        prediction = point["prediction"]
        assert prediction["is_exact"] and prediction["method"] == "replay"
        measured = point["metrics"]["mean_acceptance_length"]
        assert prediction["mean_acceptance_length"] == pytest.approx(measured, abs=1e-12)


def test_samples(whole: tuple[Path, dict[str, Any]]) -> None:
    found = samples(whole[0])
    assert len({(s["k"], s["index"]) for s in found}) == len(found) == 12
    texts: dict[int, list[int]] = {}
    for sample in found:
        assert list(sample)[: len(SAMPLE)] == SAMPLE
        assert len(sample["seconds"]) == 2 and min(sample["seconds"]) > 0
        assert texts.setdefault(sample["index"], sample["token_ids"]) == sample["token_ids"]
        # Every token is a round's own or an accepted proposal, except at the end.
        rounds = len(sample["accepted_per_round"]) + sample["rounds_without_proposal"]
        assert rounds + sum(sample["accepted_per_round"]) == len(sample["token_ids"])
        stages = sum(sum(ms) for ms in sample["stage_ms"].values()) / 1e3
        assert 0 < stages <= sum(sample["decode_seconds"])


def test_records_of_a_point_name_it_alike(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: Capture
) -> None:
    """At k = 0 no file names a draft, so that samples can be joined to points; earlier folders
    named a single arm's."""
    places = {(p["draft"], p["k"], p["batch_size"]) for p in whole[1]["points"]}
    for name in ("points.jsonl", "samples.jsonl", "curve.jsonl"):
        lines = map(json.loads, (whole[0] / name).read_text().splitlines())
        assert {(one["draft"], one["k"], one["batch_size"]) for one in lines} == places, name
    assert {(c["draft"], c["k"], c["batch_size"]) for c in whole[1]["time_curve"]} == places
    folder = shutil.copytree(whole[0], tmp_path / "run")
    for name in ("samples.jsonl", "curve.jsonl"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace('"draft": null', '"draft": "demo:draft"'))
    resumed = specdec(capsys, "sweep-k", "--resume", "-o", folder, "--json")
    assert resumed.code == 0 and resumed.document["points"] == whole[1]["points"]


def test_points_follow_from_samples(whole: tuple[Path, dict[str, Any]]) -> None:
    found = samples(whole[0])

    def seconds(k: int) -> float:
        # Of two repeats that disagree the faster one counts.
        repeats = (s["decode_seconds"] for s in found if s["k"] == k)
        return sum(fmean(t for t in both if t <= 1.5 * min(both)) for both in repeats)

    # Plain decoding's prefill decides the first token of each of the four prompts.
    early = dict.fromkeys(range(3), 0)
    for sample in found:
        early[sample["k"]] += sample.get("num_tokens_from_prefill", 0)
    assert early == {0: 4, 1: 0, 2: 0}
    tokens = sum(len(s["token_ids"]) for s in found if s["k"] == 0)
    for point in whole[1]["points"]:
        metrics, k = point["metrics"], point["k"]
        assert metrics["decode_seconds"] == pytest.approx(seconds(k))
        share_of_rounds = (tokens - early[0]) / (tokens - early[k])
        assert gain(point) == pytest.approx(seconds(0) / seconds(k) / share_of_rounds)
        own = [s for s in found if s["k"] == k]
        assert metrics["num_drafts"] == sum(len(s["accepted_per_round"]) for s in own)
        without = sum(s["rounds_without_proposal"] for s in own)
        assert metrics["num_rounds"] == metrics["num_drafts"] + without - early[k]


def test_json_and_table(capsys: Capture) -> None:
    options = [*SWEEP, *ONCE, "--limit", "2", "--k", "1", "--batch-size", "1,2"]
    result = specdec(capsys, *options, "--json")
    document = json.loads(result.out)
    assert result.code == 0 and [p["k"] for p in document["points"]] == [0, 1, 0, 1]
    assert set(document["best_by_batch_size"]) == {"1", "2"}
    for name, k in (("no draft", 0), ("demo:draft", 1)):  # one line per point
        assert result.err.count(f"{name}, batch 2, k={k}: ") == 1
    result = specdec(capsys, *options, "-q")
    assert result.code == 0 and "tokens a round" in result.out and "batch size 2: " in result.out
    line = r"first token, means: .* at k = 0 \(target's prefill .*\)"
    assert all(re.search(f"batch size {size}: {line}", result.out) for size in (1, 2))
    # Which of two prompts' points is the fastest is chance; k = 1 is shown where it is.
    points = [Point.model_validate(point) for point in document["points"]]
    best = Best(k=1, draft=points[1].draft, tied=[1], reason="")
    of_draft = _first_token_line(points, 2, best, with_draft=False)
    its_parts = r"at k = 1 \(.*draft's prefill .*first round .*\)"
    assert of_draft is not None and re.fullmatch(rf"{line}; .* {its_parts}", of_draft)
    # Without a warm-up a first run may be so slow that others look impossibly fast.
    # Beside other work a warning says that it took the processor.
    chance = re.compile("is impossible|other work took the processor|were ready to run on")
    told = [line for line in result.err.splitlines() if not chance.search(line)]
    assert told == [
        "warning: the first 2 prompts are from 1 of 4 categories (data): pass --sample stratified",
        "warning: 2 prompts are too few for intervals (--limit, --dataset)",
    ]


def test_live_table() -> None:
    result = on_terminal("sweep-k", "demo", *QUICK, *ONCE, "--k", "1", "--limit", "2")
    assert result.code == 0, result.out
    assert "measuring" in result.out and "x k = 0" in result.out
    for name, k in (("no draft", 0), ("demo:draft", 1)):  # a finished point leaves a line
        assert f"{name}, batch 1, k={k}: " in result.out


def test_live_speeds_are_over_the_prompts_that_both_had() -> None:
    view = SweepTable(9)
    for k, index, seconds in ((0, 0, 1.0), (0, 1, 3.0), (2, 0, 0.5), (2, 5, 9.0)):
        record = sample_record(k=k, index=index, batch_size=4, decode_seconds=[seconds])
        view.sample(Key("d", 4, k), Record.model_validate(record))
    table = view._render().renderables[1]
    assert isinstance(table, Table)
    cells = {str(c.header): [str(cell) for cell in c.cells] for c in table.columns}
    assert (cells["draft"], cells["batch"], cells["k"]) == (["–", "d"], ["4", "4"], ["0", "2"])
    assert cells["x k = 0"] == ["1.00", "2.00"], "not 4, the ratio of all that was written"


@pytest.mark.parametrize(("width", "latest"), [(40, 24), (80, 24), (80, 2)])
def test_a_live_table_on_a_small_terminal(
    width: int, latest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time left and the latest row stay in sight, and names of drafts are whole."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("LINES", "24")
    view = SweepTable(90)
    view._progress.update(view._task, description="measuring")
    draft = "demo:smollm2-draft-of-many-steps-one"
    for k in (*(k for k in range(1, 41) if k != latest), latest):
        record = sample_record(k=k, index=0, batch_size=4, decode_seconds=[1.0])
        view.sample(Key(draft, 4, k), Record.model_validate(record))
    out = io.StringIO()
    Console(file=out, width=width, height=24).print(LiveRender(view._render()))
    first, _, *lines = out.getvalue().splitlines()
    assert first.startswith("measuring") and lines[-1].strip() != "..."
    assert draft in "".join(line.split()[0] for line in lines)
    table = view._render().renderables[1]
    assert isinstance(table, Table)
    shown = next([int(str(k)) for k in c.cells] for c in table.columns if c.header == "k")
    assert latest in shown and shown == list(range(shown[0], shown[-1] + 1))
    assert 20 <= len(lines) <= 22, "as many rows as fit"


@pytest.mark.parametrize(
    ("term", "shown"), [("xterm", SweepTable), ("dumb", SweepLines), ("unknown", SweepLines)]
)
def test_a_terminal_that_cannot_redraw_gets_lines(
    term: str, shown: type[Watcher], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    view = watcher(9, quiet=False)
    view.close()
    assert type(view) is shown and progress_bar().disable == (shown is SweepLines)


# Greedy sweeps of one sequence are resumed after signals, below.
@pytest.mark.parametrize(
    "options",
    [pytest.param(["--batch-size", "1"], marks=pytest.mark.slow), ["--batch-size", "3", *SAMPLED]],
)
def test_resumed_is_whole(
    capsys: Capture, caplog: pytest.LogCaptureFixture, tmp_path: Path, options: list[str]
) -> None:
    """A record cut in its middle is written again; whole records are not."""
    cut = tmp_path / "run"
    assert specdec(capsys, *SWEEP, *ONCE, *options, "-q", "-o", cut).code == 0
    expected = samples(cut)
    lines = (cut / "samples.jsonl").read_text().splitlines(keepends=True)
    (cut / "samples.jsonl").write_text("".join(lines[:5]) + lines[5][:40])
    (cut / "points.jsonl").unlink()
    assert specdec(capsys, *SWEEP, *ONCE, *options, "-o", cut, "--resume").code == 0
    assert "removed 40 bytes" in caplog.text
    assert (cut / "samples.jsonl").read_text().startswith("".join(lines[:5]))
    assert without_times(samples(cut)) == without_times(expected)
    assert len((cut / "points.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize("arms", [["ngram", "demo:draft"], ["demo:draft", "ngram"]])
def test_resume_alone_takes_what_the_folder_says(
    arms: list[str], capsys: Capture, tmp_path: Path
) -> None:
    """Recipe, prompts, arms with their methods, k, batch sizes and shard; other options have to be
    those of the folder."""
    given = prompt_options("def f(x):\n", "import os\n", "x = 1\n")
    drafts = [word for name in arms for word in ("--draft", name)]
    options = [*QUICK[:-2], *ONCE, *SAMPLED, "--k", "2", "--batch-size", "2,1", "--shard", "0/2"]
    options += [*drafts, "--set", "draft.dtype=float32", "--set", "draft.weights=dequantise"]
    folder, go_on = tmp_path / "run", ["sweep-k", "--resume", "-o", tmp_path / "run", "-q"]
    assert specdec(capsys, "sweep-k", *given, *options, "-o", folder).code == 0
    expected, settings = samples(folder), (folder / "settings.json").read_text()
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    assert {s["draft"] for s in expected} == {None, "ngram", "demo:draft"} and len(lines) == 12
    for cut, more in ((5, []), (7, [*drafts, "--k", "0,2"])):
        (folder / "samples.jsonl").write_text("".join(lines[:cut]))
        resumed = specdec(capsys, *go_on, *more)
        assert resumed.code == 0, resumed.err
        assert without_times(samples(folder)) == without_times(expected)
        assert (folder / "settings.json").read_text() == settings
    for change, key in (
        (["--k", "0-3"], "--k is 0,2 there and 0,1,2,3 now"),
        (["--shard", "0/1"], "--shard is 0/2 there and none now"),
        (["--batch-size", "1"], "--batch-size is 2,1 there and 1 now"),
        (["--temperature", "0"], "sampling.temperature is 0.8 there and 0.0 now"),
        (
            ["--draft", arms[0]],
            f"--draft is {','.join(arms)} there and {arms[0]} now",
        ),
    ):
        refused(
            specdec(capsys, *go_on, *change), 2, "contains a sweep with different settings: " + key
        )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--temperature", "0.5"], "sampling.temperature is 0.0 there and 0.5 now"),
        (["--set", "run.seed=9"], "run.seed is 0 there and 9 now"),
        (["--limit", "1"], "the number of prompts is 4 there and 1 now"),
        (["--draft", "ngram"], "--draft is "),
        (["--batch-size", "2"], "--batch-size is 1 there and 2 now"),
        (["--dtype", "bfloat16"], "dtype is "),
    ],
)
def test_what_was_typed_is_named_before_other_settings_that_differ(
    capsys: Capture, whole: tuple[Path, dict[str, Any]], change: list[str], told: str
) -> None:
    """A bare recipe differs from the folder's in much else."""
    result = specdec(capsys, "sweep-k", "demo-ngram", *change, "-o", whole[0], "--resume", "-q")
    refused(result, 2, "contains a sweep with different settings: ")
    found = result.err.partition("different settings: ")[2].partition("\n")[0]
    first, _, others = found.partition("; others: ")
    assert told in first and len(others.split(", ")) == 4, found
    assert first.partition(" is ")[0] not in others.split(", ")


def test_resuming_what_is_done_measures_nothing(
    capsys: Capture, whole: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_cli.backends.native.build", None)
    before = {path.name: path.read_bytes() for path in whole[0].glob("*.jsonl")}
    result = specdec(capsys, *SWEEP, "-o", whole[0], "--resume", "--json")
    assert result.code == 0 and json.loads(result.out)["points"] == whole[1]["points"]
    assert json.loads(result.out)["measuring"] == whole[1]["measuring"]
    assert before == {path.name: path.read_bytes() for path in whole[0].glob("*.jsonl")}


def test_tokens_that_differ_between_points(
    capsys: Capture, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    assert whole[1]["tokens"] == {
        "compared": True,
        "must_be_identical": True,
        "identical": True,
        "diverging": [],
    }
    folder = shutil.copytree(whole[0], tmp_path / "run")
    kept = samples(folder)
    (changed,) = (s for s in kept if (s["k"], s["index"]) == (2, 3))
    changed["token_ids"][-1] ^= 1
    (folder / "samples.jsonl").write_text("".join(json.dumps(s) + "\n" for s in kept))
    result = specdec(capsys, *SWEEP, "-o", folder, "--resume", "--json", "--check-lossless")
    assert result.code == 4
    found, check = (json.loads(result.out)[name] for name in ("tokens", "lossless_check"))
    assert (check["passed"], check["num_compared"], check["num_diverging"]) == (False, 8, 1)
    (parted,) = check["diverging"]
    assert (parted["k"], parted["index"], parted["position"]) == (2, 3, 7) and parted["gap"] > 0
    assert "warning: not lossless: 1 of 8 texts diverge in float32" in result.err
    assert found["identical"] is False
    assert [(d["k"], d["num_diverging"], d["first"]) for d in found["diverging"]] == [(2, 1, 3)]
    message = "must be the same in float32: 1 of 4 prompts at draft demo:draft, batch size 1, k = 2"
    assert message in result.err
    assert json.loads((folder / "summary.json").read_text())["tokens"] == found
    printed = specdec(capsys, *SWEEP, "-o", folder, "--resume")
    assert printed.code == 4 and message in " ".join(printed.out.split())
    kept_check = json.loads((folder / "summary.json").read_text())["lossless_check"]
    assert kept_check == check, "a command without the option keeps what was found"


@pytest.mark.parametrize(
    "change, key",
    [
        (["--seed", "3"], "run.seed is 0 there and 3 now"),
        (["--k", "0-3"], "--k is 0,1,2 there and 0,1,2,3 now"),
        (["--max-new-tokens", "9"], "sampling.max_new_tokens is 8 there and 9 now"),
        (["--limit", "3"], "the number of prompts is 4 there and 3 now"),
        (["--draft", "demo:draft-distilled"], "--draft"),
        (["--batch-size", "2"], "--batch-size is 1 there and 2 now"),
        (["--shard", "0/2"], "--shard is none there and 0/2 now"),
    ],
)
def test_resume_refuses_other_settings(
    capsys: Capture, whole: tuple[Path, dict[str, Any]], change: list[str], key: str
) -> None:
    result = specdec(capsys, *SWEEP, *change, "-o", whole[0], "--resume")
    refused(result, 2, "contains a sweep with different settings: ")
    assert key in result.err.replace(", ", ",")


def changed_weights(folder: Path) -> Path:
    """A copy of the model with another last weight, which only the file's last bytes show."""
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    return folder


def test_samples_of_two_models_are_not_mixed(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    for place in (here, elsewhere):
        for name in ("target", "draft"):
            shutil.copytree(demo_path(f"demo:{name}"), place / name)
        (place / "draft").rename(place / "a draft")
    changed_weights(elsewhere / "target")
    options = [*SWEEP, *ONCE, "--k", "0-1", "--limit", "2", "-q", "--target", "target"]
    monkeypatch.chdir(here)
    run = ["-o", tmp_path / "run", "--resume"]
    assert specdec(capsys, *options, "--draft", "a draft", *run).code == 0
    absolute = [*options, "--target", f"{here / 'target'}/"]
    assert specdec(capsys, *absolute, "--draft", "a draft", *run).code == 0
    result = specdec(capsys, *absolute, "--draft", here / "a draft", *run)
    refused(result, 2, "records use its name: pass --draft 'a draft'")
    monkeypatch.chdir(elsewhere)
    message = 'target.model: different weights than in the folder ("target")'
    refused(specdec(capsys, *options, "--draft", "a draft", *run), 2, message)
    monkeypatch.chdir(here)
    alone = specdec(capsys, "sweep-k", *run)
    assert alone.code == 0, "a draft keeps its name: " + alone.err

    # A shard of the same models elsewhere, of another target, and of replaced weights.
    shards = [tmp_path / name for name in ("0", "1", "other")]
    drafts = ["a draft", here / "a draft", "a draft"]
    for number, (shard, place) in enumerate(zip(shards, (here, here, elsewhere), strict=True)):
        monkeypatch.chdir(place)
        part = ["--draft", drafts[number], "--shard", f"{min(number, 1)}/2", "-o", shard]
        assert specdec(capsys, *options, *part).code == 0
    merged = tmp_path / "merged"
    assert specdec(capsys, "merge", *shards[:2], "-o", merged).code == 0
    found = samples(merged)
    assert {s["draft"] for s in found if s["k"]} == {"a draft"} and len(found) == 4
    result = specdec(capsys, "merge", shards[0], shards[2], "-o", tmp_path / "none")
    refused(result, 2, "target.model: the weights differ ('target')")
    monkeypatch.chdir(here)
    changed_weights(here / "a draft")
    message = 'draft.model: different weights than in the folder ("a draft")'
    refused(specdec(capsys, *options, "--draft", "a draft", *run), 2, message)


def test_a_draft_whose_context_ends_early_is_told(capsys: Capture, tmp_path: Path) -> None:
    short = shutil.copytree(demo_path("demo:draft"), tmp_path / "short")
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 3}))
    said = "the draft's context holds 3 tokens, beyond which it proposes nothing: 4 of 4 prompts"
    for command in (SWEEP, ["compare-tp", *SWEEP[1:-4], "--limit", "4"]):
        result = specdec(capsys, *command, "--draft", short, "--dry-run", "--json")
        found = [one for one in json.loads(result.out)["warnings"] if said in one["message"]]
        assert result.code == 0 and len(found) == 1 and result.err.count(said) == 1
    both = [*SWEEP, "--draft", "demo:draft", "--draft", short, "--shard", "0/2", "--dry-run"]
    assert f"warning: {short}: {said}" in specdec(capsys, *both).err


def test_merging_needs_no_torch(whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    assert without_torch("merge", whole[0], "-o", tmp_path / "merged") == 0


def test_shards_merge_into_the_whole(capsys: Capture, tmp_path: Path) -> None:
    options = [*SWEEP, *ONCE, *SAMPLED, "-q"]
    assert specdec(capsys, *options, "-o", tmp_path / "whole").code == 0
    shards = [tmp_path / "0", tmp_path / "1"]
    for place, folder in enumerate(shards):
        assert specdec(capsys, *options, "--shard", f"{place}/2", "-o", folder).code == 0
        assert {s["index"] % 2 for s in samples(folder)} == {place}
    merged = tmp_path / "merged"
    result = specdec(capsys, "merge", *shards, "-o", merged, "--json")
    assert result.code == 0
    assert without_times(samples(merged)) == without_times(samples(tmp_path / "whole"))
    document = json.loads(result.out)
    assert document == json.loads((merged / "summary.json").read_text())
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    parts = [len((f / "curve.jsonl").read_text().splitlines()) for f in (*shards, merged)]
    assert parts[0] + parts[1] == parts[2], "every shard's parts of the time curve count"
    for ours, theirs in zip(document["points"], whole["points"], strict=True):
        for name in ("num_drafts", "acceptance_histogram", "num_output_tokens", "num_rounds"):
            assert ours["metrics"][name] == theirs["metrics"][name]
        assert ours["mean_acceptance_length_ci"] == theirs["mean_acceptance_length_ci"]
        name = "mean_acceptance_length"
        assert ours["prediction"][name] == pytest.approx(theirs["prediction"][name])
    # The merged folder is a sweep like any other.
    again = specdec(capsys, *options, "-o", merged, "--resume", "--json")
    assert again.code == 0 and len(samples(merged)) == 12

    refused(
        specdec(capsys, "merge", shards[0], shards[0], "-o", tmp_path / "x"), 2, "merge each shard"
    )
    alone = specdec(capsys, "merge", shards[0], "-o", tmp_path / "half", "-q")
    assert alone.code == 3 and "3 points lack prompts: at most 2 of 4" in alone.err
    assert "warning: shard 1/2 is missing: merge it too\n" in alone.err
    other = tmp_path / "other"
    assert specdec(capsys, *options, "--seed", "9", "--shard", "1/2", "-o", other).code == 0
    refused(
        specdec(capsys, "merge", shards[0], other, "-o", tmp_path / "y"), 2, "run.seed is 9 and 0"
    )
    refused(specdec(capsys, "merge", tmp_path, "-o", tmp_path / "z"), 2, "not a folder of a sweep")


def test_folders_that_were_moved(capsys: Capture, tmp_path: Path) -> None:
    """Prompts of the command line are in the folder, and found wherever it is."""
    given = ["--prompt", "def f(x):\n", "--prompt", "import os\n"]
    quick = QUICK[:-2]  # without its data
    options = [*quick, *ONCE, "--k", "0,1", "-q", "--json"]
    there, here = tmp_path / "there", tmp_path / "here"
    for place in range(2):
        part = ["--shard", f"{place}/2", "-o", there / str(place)]
        assert specdec(capsys, "sweep-k", "demo", *given, *options, *part).code == 0
    there.rename(here)
    there.mkdir()
    (there / "0").mkdir()
    (there / "0" / "prompts.jsonl").write_text('{"prompt": "of another run"}\n')
    merged = tmp_path / "merged"
    result = specdec(capsys, "merge", here / "0", here / "1", "-o", merged, "--json")
    assert result.code == 0
    own = str(merged / "prompts.jsonl")
    assert json.loads((merged / "summary.json").read_text())["recipe"]["data"]["path"] == own
    shutil.rmtree(here)
    moved = merged.rename(tmp_path / "moved")
    resumed = specdec(capsys, "sweep-k", moved / "recipe.yaml", *options, "--resume", "-o", moved)
    assert resumed.code == 0, resumed.err
    assert len(samples(moved)) == 4
    again = specdec(capsys, "sweep-k", moved / "recipe.yaml", *options, "--dry-run")
    assert again.document["sweep"]["prompts"] == resumed.document["sweep"]["prompts"]


def test_a_slurm_task_takes_its_share(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ID", "7"), ("COUNT", "3"), ("MIN", "3"), ("STEP", "2")):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    result = specdec(capsys, *SWEEP, "--dry-run", "--json")
    assert json.loads(result.out)["sweep"]["shard"] == [2, 3]
    monkeypatch.setenv("SLURM_ARRAY_TASK_STEP", "0")
    refused(specdec(capsys, *SWEEP, "--dry-run"), 2, "is 7, which is not a shard of an array of 3")


def test_a_task_that_is_submitted_again_keeps_the_shard_of_its_folder(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of the four tasks failed, and only these are submitted again."""

    def array(task: str, count: str, first: str) -> None:
        for name, value in (("ID", task), ("COUNT", count), ("MIN", first), ("STEP", "1")):
            monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)

    folder, told = tmp_path / "big-1", "from the Slurm array's task"
    options = [*SWEEP, *ONCE, "--k", "0", "-o", folder, "--resume"]
    array("1", "4", "0")
    began = specdec(capsys, *options)
    assert began.code == 0 and f"shard 1/4, {told}" in began.err
    (line,) = (folder / "samples.jsonl").read_text().splitlines()
    for count, first in (("2", "1"), ("1", "1"), ("1", "0")):
        array("1", count, first)
        (folder / "samples.jsonl").write_text("")
        for again in (options, ["sweep-k", "--resume", "-o", folder]):
            resumed = specdec(capsys, *again)
            assert resumed.code == 0 and told not in resumed.err, resumed.err
            assert [s["index"] for s in samples(folder)] == [json.loads(line)["index"]] == [1]
            assert "the only task" not in resumed.err
    refused(specdec(capsys, *options, "--shard", "0/2"), 2, "--shard is 1/4 there and 0/2 now")


def test_a_whole_sweep_stays_whole_in_a_slurm_array(
    capsys: Capture,
    whole: tuple[Path, dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("ID", "1"), ("COUNT", "2"), ("MIN", "0"), ("STEP", "1")):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    resumed = specdec(capsys, *SWEEP, "-o", whole[0], "--resume")
    assert resumed.code == 0, resumed.err


@pytest.mark.parametrize(("task", "is_told"), [("2", True), ("0", False)])
def test_a_lone_task_of_a_slurm_array_is_told_that_it_takes_all_prompts(
    task: str, is_told: bool, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("ID", task), ("COUNT", "1"), ("MIN", task), ("STEP", "1")):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", value)
    result = specdec(capsys, *SWEEP, "--dry-run", "--json", "-q")
    assert result.document["sweep"]["shard"] is None
    told = (
        "warning: this is the only task of its Slurm array, so it takes all prompts: pass --shard"
    )
    assert (told in result.err) == is_told
    assert "only task" not in specdec(capsys, *SWEEP, "--dry-run", "-q", "--shard", "2/4").err


def test_dry_run_loads_no_weights(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec_cli.backends.native.build", None)
    result = specdec(capsys, *SWEEP, "--dry-run", "-o", tmp_path / "run", "--json")
    document = json.loads(result.out)
    assert result.code == 0 and document["num_samples"] == 12
    assert [p["draft"] for p in document["points"]] == [None, "demo:draft", "demo:draft"]
    assert not (tmp_path / "run").exists()
    low, high = document["seconds_range"]
    assert 0 < low < document["seconds"] < high
    found = specdec(capsys, *SWEEP, "--dry-run", "--pairs")
    told = found.out
    assert "points: 3, samples: 12" in told
    assert "warning: --pairs has no effect with a single draft\n" in found.err
    assert re.search(r"^time: about \d+ s, usually right within a factor of 2; ", told, re.M)
    assert "--minutes" not in told
    longer = specdec(capsys, *SWEEP, "--dry-run", "--repeats", "100000").out
    assert "\n--minutes 30 would take " in longer


def test_a_point_that_runs_out_of_memory_is_a_point(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Engine.run

    def fails(self: Engine, requests: Any, k: int, *rest: Any) -> Any:
        if k == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        if k == 2:
            raise RuntimeError("the device is gone")
        return run(self, requests, k, *rest)

    monkeypatch.setattr(Engine, "run", fails)
    folder = tmp_path / "run"
    result = specdec(capsys, *SWEEP, *ONCE, "--k", "0-3", "-o", folder, "--json")
    assert result.code == 3
    document = json.loads(result.out)
    found = {p["k"]: (p["status"], p.get("reason")) for p in document["points"]}
    assert found == {
        0: ("ok", None),
        1: ("oom", "CUDA out of memory. Tried to allocate 2.00 GiB"),
        2: ("failed", "RuntimeError: the device is gone"),
        3: ("ok", None),
    }
    assert document["points"][1]["metrics"] is None and gain(document["points"][3])
    monkeypatch.undo()  # the device is back
    again = specdec(capsys, *SWEEP, *ONCE, "--k", "0-3", "-o", folder, "--json", "--resume")
    assert again.code == 0
    assert [p["status"] for p in json.loads(again.out)["points"]] == ["ok"] * 4


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        ([torch.OutOfMemoryError("CUDA out of memory"), MemoryError("out of memory")], 5),
        ([RuntimeError("the device is gone")], 1),
        ([torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("the device is gone")], 1),
    ],
    ids=["memory", "run", "both"],
)
def test_a_sweep_without_any_point_ends_as_what_stopped_them(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, raised: list[Exception], code: int
) -> None:
    def fails(self: Engine, requests: Any, k: int, *rest: Any) -> Any:
        raise raised[k % len(raised)]

    monkeypatch.setattr(Engine, "run", fails)
    result = specdec(capsys, *SWEEP, *ONCE, "--json", "-q")
    assert result.code == result.document["error"]["code"] == code


def test_an_interrupted_sweep_keeps_what_disturbed_it(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, runs = Engine.run, list[int]()

    def interrupted(self: Engine, requests: Any, k: int, *rest: Any) -> Any:
        runs.append(k)
        if len(runs) > 4:
            raise KeyboardInterrupt
        return run(self, requests, k, *rest)

    options = [*SWEEP, *ONCE, "--json", "-q", "-o", tmp_path / "run"]
    load = Notice("cpu_load", "5.0 processes were ready to run on 2 processors")
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "run", interrupted)
        patch.setattr(MachineWatch, "notices", lambda _: [load])
        assert specdec(capsys, *options).code == 130
    whole = specdec(capsys, *options, "--resume", "--strict")
    assert whole.code == 3 and "cpu_load" in [one["code"] for one in whole.document["warnings"]]
    assert whole.document["best"]["verdict"] == "inconclusive"


def test_resuming_what_fails_again_opens_nothing_else(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions of every batch size need the texts of the largest k, which fails again."""
    run, runs = Engine.run, list[tuple[int, int]]()

    def fails(self: Engine, requests: Any, k: int, *rest: Any) -> Any:
        runs.append((self.batch_size, k))
        if (self.batch_size, k) == (1, 2):
            raise MemoryError("no more")
        return run(self, requests, k, *rest)

    monkeypatch.setattr(Engine, "run", fails)
    folder = tmp_path / "run"
    sizes = ["--batch-size", "1,2", "--set", "run.warmup=1", "--limit", "2"]
    options = [*SWEEP, *ONCE, *sizes, "-q", "--json", "-o", folder]
    first = specdec(capsys, *options)
    assert first.code == 3 and first.document["measuring"]["rounds"] > 0
    where = first.document["environment"] | {"cpu_count": 99}
    for document in (first.document | {"environment": where}, first.document["environment"]):
        name = "summary.json" if "points" in document else "environment.json"
        (folder / name).write_text(json.dumps(document))
    runs.clear()
    again = specdec(capsys, *options, "--resume")
    assert again.code == 3 and again.document["points"] == first.document["points"]
    assert {batch_size for batch_size, _ in runs} == {1}  # the batch size of the failed point
    for name, expected in (("measuring", first.document["measuring"]), ("environment", where)):
        assert again.document[name] == expected
        assert json.loads((folder / "summary.json").read_text())[name] == expected
    # A new record removes the summary, but not its content.
    (folder / "curve.jsonl").unlink()
    again = specdec(capsys, *options, "--resume")
    assert again.document["measuring"] == first.document["measuring"]
    assert again.document["environment"] == where
    monkeypatch.undo()  # there is memory again
    whole = specdec(capsys, *options, "--resume")
    assert whole.code == 0 and whole.document["measuring"] != first.document["measuring"]
    assert all(p["predicted_speedup"] for p in whole.document["points"])


def test_rounds_are_captured_once_a_point(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each k is captured once, in any order; a batch size is freed before the next is measured."""
    from specdec_cli.engine import graphs
    from specdec_cli.experiment.sweep import runner, sweep_records

    captured: list[tuple[int, int]] = []
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    most = 0

    class Counted(graphs.Rounds):
        def __init__(self, *arguments: Any) -> None:
            nonlocal most
            super().__init__(*arguments)
            captured.append((self.ks[-1], self.num_slots))
            alive.add(self)
            most = max(most, len(alive))

    late, cost = 0.0, runner.Sweep._cost

    def slow_cost(*arguments: Any) -> None:
        nonlocal late
        late += 1000.0
        cost(*arguments)

    clock = SimpleNamespace(
        perf_counter=lambda: time.perf_counter() + late, process_time=time.process_time
    )
    monkeypatch.setattr(sweep_records, "time", clock)
    monkeypatch.setattr(runner.Sweep, "_cost", slow_cost)
    monkeypatch.setattr(graphs, "Rounds", Counted)
    result = specdec(capsys, *SWEEP, *ONCE, "--batch-size", "4,2", "--json")
    assert result.code == 0
    measuring = json.loads(result.out)["measuring"]["measuring"]
    assert 0 < measuring < 1000 <= late, "the time curve does not count as measuring"
    slots = graphs.slot_counts(4) + graphs.slot_counts(2)
    assert sorted(captured) == sorted((k, n) for k in range(3) for n in slots)
    assert most == 3 * len(graphs.slot_counts(4))


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [(MemoryError("no more"), 5, "no more"), (KeyError("gone"), 1, "KeyError: 'gone'")],
)
def test_nothing_is_left(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, reason: str
) -> None:
    def fails(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(Engine, "run", fails)
    result = specdec(capsys, *SWEEP, "--json")
    document = json.loads(result.out)
    assert result.code == code
    assert document["best"]["k"] is None and "could be compared" in document["best"]["reason"]
    assert {p["reason"] for p in document["points"]} == {reason}


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [(MemoryError("no more"), 5, "no more"), (KeyError("gone"), 1, "KeyError: 'gone'")],
)
def test_points_that_fail_after_their_first_samples(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int, reason: str
) -> None:
    """Every point fails, even with samples from before the failure."""
    run = Engine.run

    def fails(self: Engine, requests: Any, *rest: Any) -> Any:
        if any(request.index for request in requests):
            raise error
        return run(self, requests, *rest)

    monkeypatch.setattr(Engine, "run", fails)
    result = specdec(capsys, *SWEEP, *ONCE, "--json")
    assert result.code == result.document["error"]["code"] == code
    assert {p["reason"] for p in result.document["points"]} == {reason}


def test_the_disk_is_full(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sweep fails, not a point; written records stay."""
    (tmp_path / "samples.jsonl").symlink_to("/dev/full")
    refused(specdec(capsys, *SWEEP, "-q", "-o", tmp_path), 5, "No space left on device")


def test_a_prompt_that_cannot_run(capsys: Capture, tmp_path: Path) -> None:
    """The first of three prompts cannot run, so the time curve has only that prompt."""
    prompts = tmp_path / "p.jsonl"
    lines = [{"prompt": "x " * 300}, {"prompt": "def f(x):"}, {"prompt": "import os"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = ["--dataset", prompts, "--k", "1", "--set", "cache.max_model_len=64", "--json"]
    result = specdec(capsys, "sweep-k", "demo", *QUICK, *ONCE, *options, "-o", tmp_path / "run")
    assert result.code == 3
    errors = [s for s in samples(tmp_path / "run") if s["finish_reason"] == "error"]
    assert [s["index"] for s in errors] == [0, 0] and "exceeds" in errors[0]["error"]
    for point in json.loads(result.out)["points"]:
        assert point["status"] == "ok" and gain(point) > 0
        assert point["predicted_speedup"] is None
    said = "not every prompt could run; these are left out: prompt 0: the prompt has 301"
    assert f"warning: {said}" in result.err
    merged = specdec(capsys, "merge", tmp_path / "run", "-o", tmp_path / "new", "-q")
    assert merged.code == 3 and f"warning: {said}" in merged.err
    assert any(said in one["message"] for one in result.document["warnings"])


def test_no_prompt_can_run(capsys: Capture, tmp_path: Path) -> None:
    """The prompts fail, not the run, as if only some could not run."""
    short = ["--set", "cache.max_model_len=4", "--limit", "2"]
    result = specdec(capsys, *SWEEP, *ONCE, *short, "--json", "-o", tmp_path / "run")
    assert result.code == 3 and "error" not in result.document
    assert result.document["best"]["k"] is None
    assert re.search(r"left out: prompt 0: .* \(and 1 more prompt\)$", result.err, re.M)
    for point in result.document["points"]:
        assert point["status"] == "failed" and point["reason"].startswith("no prompt could run: ")
    merged = specdec(capsys, "merge", tmp_path / "run", "-o", tmp_path / "new", "-q")
    assert merged.code == 3 and "pt has 7 tokens; with at least…" in merged.out


def test_a_second_dataset_is_refused(capsys: Capture) -> None:
    twice = ["--dataset", "demo:prompts", "--dataset", "demo:prompts"]
    refused(specdec(capsys, *SWEEP, *twice), 2, "--dataset was given 2 times")


def test_where_no_point_can_be_measured_the_result_has_an_error(
    capsys: Capture, tmp_path: Path
) -> None:
    drafts = [shutil.copytree(demo_path("demo:draft"), tmp_path / name) for name in "ab"]
    for size, draft in enumerate(drafts, start=5000):
        with open(draft / "model.safetensors", "r+b") as file:
            file.truncate(size)
    chosen = [argument for draft in drafts for argument in ("--draft", str(draft))]
    arguments = [*SWEEP, *chosen, "--json", "-q", "-o", tmp_path / "run"]
    result = specdec(capsys, *arguments)
    document = result.document
    # Same exit code as for a single damaged draft: no run took place that could have failed.
    assert result.code == 5 and {p["status"] for p in document["points"]} == {"failed"}
    assert document["error"]["code"] == 5 and document["error"]["hint"]
    assert "no point could be measured: cannot read the weights" in document["error"]["message"]
    assert result.err.count("error: no point could be measured") == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == document


def test_several_drafts_load_the_target_once(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_cli.engine import build
    from specdec_cli.models import description

    loaded: list[str] = []
    load = build.load
    for module in (build, description):
        monkeypatch.setattr(
            module, "load", lambda d, *rest: loaded.append(d.spec.role) or load(d, *rest)
        )
    drafts = ["--draft", "demo:draft", "--draft", "demo:draft-distilled"]
    options = [*ONCE, *drafts, "--k", "2", "--check-lossless"]
    result = specdec(capsys, *SWEEP, *options, *SAMPLED, "--json")
    assert loaded == ["target", "draft", "draft"]
    points = json.loads(result.out)["points"]
    assert [(p["draft"], p["k"]) for p in points] == [
        (None, 0), ("demo:draft", 2), ("demo:draft-distilled", 2)
    ]  # fmt: skip
    lengths = [p["metrics"]["mean_acceptance_length"] for p in points]
    assert lengths[0] == 1.0 and lengths[1] != lengths[2] > 1.0
    assert [p["speedup"] for p in points[:1]] == [1.0] and all(map(gain, points))
    # Sampled text is not compared; greedy text of the same engines is.
    document = json.loads(result.out)
    check = document["lossless_check"]
    assert result.code == 0 and document["tokens"]["compared"] is False
    assert (check["num_prompts"], check["num_compared"], check["passed"]) == (4, 8, True)


def test_a_cache_in_fp8(
    capsys: Capture, whole: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes the text, which is told once, and is the same with every draft and without."""
    monkeypatch.setattr(demo, "FOLDER", Path(demo.__file__).parent)  # the head's own target
    options = [*ONCE, "--draft", "demo:draft", "--draft", "demo:eagle3", "--k", "2"]
    options += ["--limit", "2", "--check-lossless", "--set", "cache.dtype=fp8", "--json"]
    result = specdec(capsys, "sweep-k", "demo", *QUICK, *options)
    assert result.code == 0, result.err
    document = json.loads(result.out)
    check = document["lossless_check"]
    assert (check["num_compared"], check["passed"]) == (4, True)
    (told,) = [w["message"] for w in document["warnings"] if w["code"] == "rounded_cache"]
    assert "runs of the same cache.dtype" in told
    assert result.err.count("the cache holds keys and values in fp8") == 1
    assert document["environment"]["target_kv_cache"] == "float8_e4m3fn, scales of 1"
    assert "target_kv_cache" not in whole[1]["environment"]


def test_predict_only(capsys: Capture, whole: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    result = specdec(capsys, *SWEEP, "--predict-only", "--json", "-o", tmp_path / "run")
    points = json.loads(result.out)["points"]
    assert result.code == 0
    assert [p["status"] for p in points] == ["ok", "skipped", "ok"]
    assert {s["k"] for s in samples(tmp_path / "run")} == {0, 2}
    measured = whole[1]["points"][1]["metrics"]["mean_acceptance_length"]
    assert points[1]["prediction"]["mean_acceptance_length"] == pytest.approx(measured)
    assert points[1]["predicted_speedup"] > 0
    even = points[1]["break_even"]
    assert even["is_predicted"] and even["tokens_per_round"] > 0
    assert points[0]["break_even"] is None


@pytest.mark.parametrize("whose", ["target", "draft"])
def test_texts_that_reach_the_end_of_a_context_are_replayed_exactly(
    capsys: Capture, tmp_path: Path, whose: str
) -> None:
    """The last rounds propose fewer tokens, or none."""
    (tmp_path / "p.txt").write_text("def f(x):\n")
    options = [*QUICK, *ONCE, "--set", "sampling.ignore_eos=true", "--k", "1-3", "--json"]
    options += ["--dataset", tmp_path / "p.txt"]
    if whose == "target":
        options += ["--set", "cache.max_model_len=10"]
    else:
        short = shutil.copytree(demo_path("demo:draft"), tmp_path / "short")
        config = json.loads((short / "config.json").read_text())
        (short / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 10}))
        options += ["--draft", short]
    result = specdec(capsys, "sweep-k", "demo", *options)
    assert result.code == 0, result.err
    metrics = [point["metrics"] for point in result.document["points"]]
    assert {m["num_output_tokens"] < 8 for m in metrics} == {whose == "target"}
    for point, found in zip(result.document["points"], metrics, strict=True):
        replayed = point["prediction"]["mean_acceptance_length"]
        assert replayed == pytest.approx(found["mean_acceptance_length"], abs=1e-12)
    assert any(m["num_drafts"] and m["num_rounds_without_proposal"] for m in metrics)


def test_a_point_that_failed_in_a_shard_has_failed_in_the_whole(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other shards' samples alone are not the requested sweep."""
    run = Engine.run

    def fails(self: Engine, requests: Any, k: int, *rest: Any) -> Any:
        if k == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(self, requests, k, *rest)

    monkeypatch.setattr(Engine, "run", fails)
    options = ["--limit", "2", "--shard", "0/2", "-q", "-o", tmp_path / "first"]
    assert specdec(capsys, *SWEEP, *ONCE, *options).code == 3
    result = specdec(capsys, "merge", tmp_path / "first", "-o", tmp_path / "new", "--json", "-q")
    found = [(p["k"], p["status"], p.get("reason")) for p in result.document["points"]]
    assert result.code == 3
    assert found == [(0, "ok", None), (1, "oom", "first: CUDA out of memory"), (2, "ok", None)]


def test_what_if(capsys: Capture) -> None:
    options = [*ONCE, "--k", "0-3", "--limit", "2", "--max-new-tokens", "12", "--json"]
    rates = specdec(capsys, *SWEEP, *options, "--synthetic-acceptance-rates", "1,1,0")
    points = json.loads(rates.out)["points"]
    lengths = [p["metrics"]["acceptance_rate_per_pos"] for p in points]
    assert rates.code == 0 and lengths[2] == [1.0, 1.0] and lengths[3][2] == 0.0
    for point in points:  # synthetic acceptance is replayed draw for draw
        measured = point["metrics"]["mean_acceptance_length"]
        assert point["prediction"]["is_exact"]
        assert point["prediction"]["mean_acceptance_length"] == pytest.approx(measured, abs=1e-12)
    assert "synthetic" in rates.err
    # The length is for the recipe's k, 4: one rate for all positions and every k.
    length = specdec(capsys, *SWEEP, *options, "--synthetic-acceptance-length", "5")
    assert [
        p["metrics"]["draft_acceptance_rate"] for p in json.loads(length.out)["points"][1:]
    ] == [1.0] * 3
    few = specdec(capsys, *SWEEP, *options, "--synthetic-acceptance-rates", "0.5")
    assert few.code == 2 and "(3) rates, has 1" in few.err


def test_random_weights_are_warned_about(capsys: Capture) -> None:
    dummy = ["--set", "target.load_format=dummy", "--set", "draft.load_format=dummy"]
    assert "the weights are random" in specdec(capsys, *SWEEP, *dummy, "--dry-run").err
    length = ["--synthetic-acceptance-length", "2"]
    given = specdec(capsys, *SWEEP, *dummy, *length, "--dry-run")
    assert given.code == 0 and "the weights are random" not in given.out


def test_distinct_experts(tmp_path: Path, capsys: Capture) -> None:
    """One token reads the 2 experts that it chooses in each layer; several read more, of 4."""
    tiny_config("mixtral").save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt_token_ids": [3 + i, 50, 7, 3 + i, 50, 7]}) for i in range(2)]
    prompts.write_text("\n".join(lines))
    sets = [f"target.model={tmp_path / 'model'}", "target.load_format=dummy", "run.warmup=0"]
    sets += ["speculation.method=ngram", f"data.path={prompts}", "run.repeats=2"]
    options = [part for key in sets for part in ("--set", key)]
    folder = tmp_path / "run"
    result = specdec(
        capsys, "sweep-k", "demo-ngram", "--device", "cpu", "--max-new-tokens", "8", "--k", "0,3",
        *options, "--json", "-o", folder,
    )  # fmt: skip
    document = json.loads(result.out)
    (told,) = [w["message"] for w in document["warnings"] if w["code"] == "random_routers"]
    assert "routers" in told and "target.load_format: auto" in told
    by_k: dict[int, list[Sample]] = {0: [], 3: []}
    for sample in samples(folder):
        assert len(sample["distinct_experts"]) == 2
        by_k[sample["k"]].append(sample)
    assert all(sample["distinct_experts"] == [2.0, 2.0] for sample in by_k[0])
    assert all(2.0 < min(sample["distinct_experts"]) <= 4.0 for sample in by_k[3])
    rounds = sum(sample["round_share"][0] for sample in by_k[3])
    counts = [s["distinct_experts"][0] * s["round_share"][0] for s in by_k[3]]
    plain, wide = (point["metrics"]["distinct_experts"] for point in document["points"])
    assert plain == 2.0 and wide == pytest.approx(sum(counts) / rounds)
    # The curve has one part, on the first prompt.
    plain, wide = (entry["distinct_experts"] for entry in document["time_curve"])
    first = next(sample for sample in by_k[3] if sample["index"] == 0)
    assert plain == 2.0 and wide == pytest.approx(first["distinct_experts"][0])


def test_ngram(capsys: Capture) -> None:
    result = specdec(
        capsys, "sweep-k", "demo-ngram", *QUICK, *ONCE, "--k", "0-3", "--limit", "3", "--json"
    )
    points = json.loads(result.out)["points"]
    assert result.code == 0 and [p["draft"] for p in points] == [None] + ["ngram"] * 3
    for point in points:
        measured = point["metrics"]["mean_acceptance_length"]
        assert point["prediction"]["mean_acceptance_length"] == pytest.approx(measured, abs=1e-12)


def test_ngrams_beside_a_draft(capsys: Capture, tmp_path: Path) -> None:
    drafts = ["--draft", "demo:draft", "--draft-tp", "1", "--draft", "ngram"]
    result = specdec(
        capsys, "sweep-k", "demo", *QUICK, *ONCE, *drafts, "--k", "0,2", "--limit", "3", "--json",
        *("-o", tmp_path / "run"),
    )  # fmt: skip
    points = json.loads(result.out)["points"]
    assert result.code == 0, result.err
    arms = [(None, 0), ("demo:draft", 2), ("ngram", 2)]
    assert [(p["draft"], p["k"]) for p in points] == arms
    accepted = {p["draft"]: p["metrics"]["num_accepted_tokens"] for p in points if p["k"]}
    assert accepted["demo:draft"] > accepted["ngram"] >= 0
    before = samples(tmp_path / "run")
    resumed = specdec(
        capsys, "sweep-k", tmp_path / "run" / "recipe.yaml", *QUICK, *ONCE, *drafts, "--k", "0,2",
        "--limit", "3", "--json", "--resume", "-o", tmp_path / "run",
    )  # fmt: skip
    assert resumed.code == 0, resumed.err
    assert samples(tmp_path / "run") == before
    # A prompt goes through all points before the next one comes, in changing orders.
    by_prompt = [[(s["draft"], s["k"]) for s in before[i : i + 3]] for i in (0, 3, 6)]
    assert [s["index"] for s in before] == [0] * 3 + [1] * 3 + [2] * 3
    assert all(sorted(turn, key=str) == sorted(arms, key=str) for turn in by_prompt)
    assert len({tuple(turn) for turn in by_prompt}) > 1


def test_arms_that_do_not_fit_together_take_turns(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts and the one baseline are those of arms that stay loaded."""
    from specdec_cli.backends import native

    options = [*SWEEP, *ONCE, "--draft", "demo:draft", "--draft", "ngram", "--k", "2", "--json"]
    whole = specdec(capsys, *options, "-q", "-o", tmp_path / "whole")
    built: list[str | None] = []
    build = native.build

    def counted(plan: Any, *rest: Any) -> Any:
        built.append(plan.recipe.proposer)
        return build(plan, *rest)

    monkeypatch.setattr(native, "build", counted)
    monkeypatch.setattr(native, "build_beside", lambda *_: None)
    result = specdec(capsys, *options, "-o", tmp_path / "run")
    assert result.code == whole.code == 0, result.err
    ours, theirs = samples(tmp_path / "run"), samples(tmp_path / "whole")
    assert without_times(ours) == without_times(theirs)
    # Four passes over one prompt each, after the attempt to keep the first arm loaded.
    assert built[0] == "demo:draft" and sorted(map(str, built[1:])) == sorted(
        ["demo:draft", "ngram"] * 4
    )
    assert built[1:3] != built[3:5] or built[3:5] != built[5:7]
    codes = [warning["code"] for warning in result.document["warnings"]]
    assert "arms_alternate" in codes and "do not fit in memory together" in result.err


@pytest.mark.parametrize(
    "options, code, message",
    [
        (["--k", "8-0"], 2, "--k: 8-0 falls"),
        (["--k", "a"], 2, "--k: expected numbers such as 0-8"),
        (["--k", "0-2000"], 2, "--k: 0-2000 is more than 1024"),
        (["--k", "99999"], 2, "--k: 99999 is more than 1024"),
        (["--shard", "2/2"], 2, "shards are counted from 0: 0/2 to 1/2"),
        (["--shard", "x"], 2, "--shard: expected I/N"),
        (["--shard", "7/9"], 2, "shard 7/9 has no prompts: the sweep has only 4"),
        (["--batch-size", "0"], 2, "--batch-size: expected numbers such as 1,8"),
        (["--batch-size", "65537"], 2, "--batch-size: expected numbers such as 1,8"),
        (["--resume"], 2, "--resume needs the sweep's folder"),
        (["--dataset", "nowhere.jsonl"], 2, "nowhere.jsonl"),
        (["--limit", "0"], 2, "--limit"),
        (["--draft", "demo:draft", "--draft", "demo:draft"], 2, "is given twice"),
        (["--set", "draft=null"], 2, "no proposals: the recipe has no draft"),
        (["--set", "speculation.method=none"], 2, "no proposals: speculation.method is none"),
        ([*TWO_DRAFTS, "--set", "speculation.method=ngram"], 2, "--draft: speculation.method is"),
        (["--synthetic-acceptance-rates", "0.5,x"], 2, "--synthetic-acceptance-rates"),
        ([*BOTH_SYNTHETIC, "--k", "1"], 2, "and --synthetic-acceptance-length exclude"),
        (["--draft", "no/such-model"], 5, "no/such-model"),
    ],
)
def test_errors(capsys: Capture, options: list[str], code: int, message: str) -> None:
    refused(specdec(capsys, *SWEEP, *options), code, message)


def test_texts_that_the_context_cuts_are_told(capsys: Capture, tmp_path: Path) -> None:
    """The longest prompts leave less room than is asked for, at every k."""
    asked = ("--max-new-tokens", "6", "--ignore-eos", "--k", "1", "--json")
    whole = specdec(capsys, *SWEEP, *asked, "-o", str(tmp_path / "whole"))
    lengths = [len(s["prompt_token_ids"]) for s in samples(tmp_path / "whole") if s["k"] == 0]
    assert "context_full" not in [w["code"] for w in json.loads(whole.out)["warnings"]]
    room = ("--set", f"cache.max_model_len={max(lengths) + 3}")
    found = specdec(capsys, *SWEEP, *asked, *room, "-o", str(tmp_path / "cut"))
    (told,) = (w for w in json.loads(found.out)["warnings"] if w["code"] == "context_full")
    cut = sum(n > max(lengths) - 3 for n in lengths)
    assert told["evidence"]["samples"] == 2 * cut and told["evidence"]["k"] == 0
    assert "the context was full" in told["message"] and told["message"] in found.err


@pytest.mark.parametrize("kind", ["copy", "link", "spelling"])
def test_one_draft_under_two_names_is_refused(
    capsys: Capture, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(demo_path("demo:draft"), "draft")
    Path("link").symlink_to("draft")
    names = {"copy": ["demo:draft", "draft"], "spelling": ["draft", "./draft/"]}
    names |= {"link": ["draft", "link"]}
    one, other = names[kind]
    told = f"--draft: {one} and {other} are one draft: their configs and weights are equal"
    refused(specdec(capsys, *SWEEP, "--draft", one, "--draft", other), 2, told)


@pytest.mark.parametrize(
    "number, code",
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)],
)
def test_signals_keep_what_is_finished(
    capsys: Capture, whole: tuple[Path, dict[str, Any]], tmp_path: Path, number: int, code: int
) -> None:
    folder = tmp_path / "run"
    ended, told = stopped_sweep([*SWEEP, "-q", "-o", folder], 0.02, number, after=4)
    assert ended == code and 4 <= len(told) < 12
    assert lost_or_torn(folder, told) == (0, 0)
    # The signal may come between a record and the word that it is written.
    assert len(samples(folder)) - len(told) in (0, 1)
    assert specdec(capsys, *SWEEP, "-o", folder, "--resume", "-q").code == 0
    assert without_times(samples(folder)) == without_times(samples(whole[0]))


def test_a_spec_bench_file_end_to_end(capsys: Capture, tmp_path: Path) -> None:
    """Questions with several turns and categories, from the file to the report."""
    kinds = ["writing", "coding", "math"]
    path, folder = tmp_path / "question.jsonl", tmp_path / "run"
    rows = [
        {
            "question_id": 81 + i,
            "category": kinds[i % 3],
            "turns": [f"def step_{i}(values):\n    total = 0\n", "Now explain it."],
            "reference": ["none"],
        }
        for i in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ["--dataset", path, "--k", "0,2", *ONCE, "--batch-size", "1,2"]
    result = specdec(capsys, "sweep-k", "demo", *QUICK, *asked, "-o", folder, "--json")
    assert result.code == 0, result.err
    points = result.document["points"]
    assert {(p["k"], p["batch_size"]) for p in points} == {(0, 1), (2, 1), (0, 2), (2, 2)}
    for point in points:
        assert point["status"] == "ok" and sorted(point["per_category"]) == sorted(kinds)
        each = [c["num_prompts"] for c in point["per_category"].values()]
        assert each == [2, 2, 2] and point["metrics"]["num_prompts"] == 6
    assert {s["category"] for s in samples(folder)} == set(kinds)
    assert specdec(capsys, "report", folder, "--format", "html").code == 0
    page = (folder / "report.html").read_text()
    assert all(f">{kind}<" in page for kind in kinds)


def test_two_sweeps_do_not_write_to_one_folder(capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with sweep_process([*SWEEP, "-q", "-o", folder]) as (child, pipe):
        assert os.read(pipe, 1)  # a record is written
        os.kill(child, signal.SIGSTOP)
        before = (folder / "samples.jsonl").read_bytes()
        for options in (["--resume"], []):
            result = specdec(capsys, *SWEEP, "-o", folder, *options)
            refused(result, 2, f"{folder}: another process is writing there")
        assert (folder / "samples.jsonl").read_bytes() == before
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert specdec(capsys, *SWEEP, "-o", folder, "--resume", "-q").code == 0
    assert len(samples(folder)) == 12


def test_kill_9_loses_nothing(
    capsys: Capture, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """A short version of scripts/proofs/kills.py with its 200 kills."""
    folder = tmp_path / "run"
    told: list[Sample] = []
    for kill in range(4):
        options = [*SWEEP, "-q", "-o", folder, "--resume"]
        ended, safe = stopped_sweep(options, 0.013 * kill, signal.SIGKILL, after=1)
        told += safe
        assert ended == -signal.SIGKILL
        assert lost_or_torn(folder, told) == (0, 0)
    assert len({json.dumps(key) for key in told}) == len(told)  # none was measured twice
    assert specdec(capsys, *SWEEP, "-o", folder, "--resume", "-q").code == 0
    assert without_times(samples(folder)) == without_times(samples(whole[0]))


def test_pictures_are_part_of_the_folder(
    whole: tuple[Path, dict[str, Any]],
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("specdec_cli.commands.status.write_pictures", write_pictures)
    assert specdec(capsys, "merge", whole[0], "-o", tmp_path / "new", "-q").code == 0
    for folder in (whole[0], tmp_path / "new"):  # its plots were drawn before the patch
        assert "Speed-up over plain decoding" in (folder / "report.html").read_text()
        assert (folder / "plots" / "speedup.png").read_bytes().startswith(b"\x89PNG")


CURVE_LINE = '{"draft": "demo:draft", "k": 1, "batch_size": 1, "part": 0, "rounds": '
CURVE_REST = (
    '9, "sequence_rounds": 9, "decode_seconds": 1, "draft_ms": 1, "verify_ms": 1, "sample_ms": 1, '
    '"broadcast_ms": '
)
SAMPLE_LINE = '{"draft": "demo:draft", "k": 1, "batch_size": 1, "index": 9}'


@pytest.mark.parametrize(
    "name, line, problem",
    [
        ("samples.jsonl", "{}", "it has no draft"),
        ("samples.jsonl", SAMPLE_LINE, "it has no category"),
        ("curve.jsonl", '{"draft": "demo:draft", "k": 1, "batch_size": "1"}', "batch_size is dam"),
        ("curve.jsonl", CURVE_LINE + "9" * 400 + "}", "rounds is damaged"),
        ("curve.jsonl", CURVE_LINE + CURVE_REST + '"9"}', "broadcast_ms is damaged"),
        ("replay.jsonl", '{"draft": 5}', "draft is damaged"),
        ("replay.jsonl", '{"draft": "demo:draft", "index": 0, "limit": 1.5}', "limit is damaged"),
        ("points.jsonl", '{"draft": "x", "k": 0, "batch_size": 1, "status": "ok"}', "draft is x"),
        ("points.jsonl", "null", ""),
        pytest.param("points.jsonl", "[" * 100_000, "", id="deep"),
    ],
)
def test_a_damaged_record_is_refused_by_its_line(
    capsys: Capture,
    whole: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    name: str,
    line: str,
    problem: str,
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "run")
    lines = (folder / name).read_text().splitlines()
    (folder / name).write_text("\n".join([*lines, line, ""]))
    for command in ([*SWEEP, "--resume"], ["merge", folder]):
        end = ["-o", folder if "--resume" in command else tmp_path / "new"]
        result = specdec(capsys, *command, *end)
        refused(result, 5, f"{folder / name}:{len(lines) + 1}: not a record")
        assert problem in result.err and "damaged or edited" in result.err


def test_later_records_outlive_the_summary(
    whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The report of a killed resumed sweep covers the later records too."""
    path = shutil.copytree(whole[0], tmp_path / "run")
    point = json.loads((path / "points.jsonl").read_text().splitlines()[-1])
    folder = RunFolder.reopen(path)
    assert not read_folder(path).is_partial
    folder.append("points.jsonl", point | {"speedup": 7.0})
    folder.close()
    run = read_folder(path)
    assert run.is_partial and 7.0 in [found.number("speedup") for found in run.points]


def test_an_edited_sample_is_refused(
    capsys: Capture, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "run")
    first, *rest = samples(folder)
    for change, problem in [
        ({"k": 7}, "its k is 7"),
        ({"batch_size": 3}, "its batch_size is 3"),
        ({"draft": "a\nb"}, r"its draft is a\nb"),
        ({"accepted_per_round": [1]}, "differ in length"),
        ({"accepted_per_round": [1], "proposed_per_round": [0]}, "accepted more than it"),
        ({"stage_ms": {"draft": 1.0}}, "stage_ms.draft is damaged"),
        ({"seconds": "1"}, "seconds is damaged"),
        ({"token_ids": [1, None]}, "token_ids is damaged"),
        ({"index": 77}, "its index is 77, of "),
        ({"finish_reason": "banana"}, "its finish_reason is banana"),
        ({"decode_seconds": []}, "decode_seconds does not have "),
        ({"seconds": [], "decode_seconds": [], "round_share": []}, "seconds does not have "),
        ({"round_share": [-5.0] * len(first["round_share"])}, "round_share is damaged"),
        ({"stage_ms": {"draft": [1e308] * 2}}, "stage_ms.draft is damaged"),
        ({"num_tokens_from_prefill": 10**6}, "num_tokens_from_prefill exceeds"),
    ]:
        text = "".join(json.dumps(one) + "\n" for one in [first | change, *rest])
        (folder / "samples.jsonl").write_text(text)
        refused(specdec(capsys, "merge", folder, "-o", tmp_path / "new"), 5, problem)


@pytest.mark.parametrize(
    "text, code, message",
    [
        ("", 5, "cannot read"),
        pytest.param("[" * 100_000, 5, "cannot read", id="deep"),
        ("[]", 5, "no settings"),
        ('{"version": 1, "settings": {"ks": 1}}', 5, "no settings of a sweep"),
        ('{"version": 1, "settings": {"target_tps": [1]}}', 2, "belongs to another command"),
    ],
)
def test_damaged_settings(
    capsys: Capture,
    whole: tuple[Path, dict[str, Any]],
    tmp_path: Path,
    text: str,
    code: int,
    message: str,
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "run")
    (folder / "settings.json").write_text(text)
    refused(specdec(capsys, *SWEEP, "--resume", "-o", folder), code, message)
    refused(specdec(capsys, "merge", folder, "-o", tmp_path / "new"), code, message)
    settings = json.loads((whole[0] / "settings.json").read_text())
    damage = [("ks", ["a"]), ("batch_sizes", []), ("prompts", {}), ("recipe", {})]
    damage += [
        ("ks", [0, 1, 2, 9]),
        ("predict_only", "x"),
        ("device", "other"),
    ]  # does not match its hash
    for key, value in damage:
        changed = settings | {"settings": settings["settings"] | {key: value}}
        (folder / "settings.json").write_text(json.dumps(changed))
        refused(
            specdec(capsys, "merge", folder, "-o", tmp_path / "new"), 5, "no settings of a sweep"
        )


def test_merge_takes_folders_of_sweeps(
    capsys: Capture, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    file = whole[0] / "points.jsonl"
    refused(specdec(capsys, "merge", file, "-o", tmp_path / "new"), 2, "is not a folder of a sweep")
    folder = shutil.copytree(whole[0], tmp_path / "run")
    for text in ("[1]", "[" * 100_000):
        (folder / "environment.json").write_text(text)
        result = specdec(capsys, "merge", folder, "-o", tmp_path / "new")
        refused(result, 5, "not a run's environment")
        assert specdec(capsys, *SWEEP, "-q", "-o", folder, "--resume").code == 0


def test_another_environment_is_told_wherever_its_samples_go(
    capsys: Capture, whole: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = shutil.copytree(whole[0], tmp_path / "run")
    where = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps(where | {"cpu_count": 99}))
    resume = [*SWEEP, "-q", "--resume", "-o", folder]
    assert "environments" not in specdec(capsys, *resume).err  # nothing is left to measure
    assert json.loads((folder / "summary.json").read_text())["environment"] == where
    lines = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    (folder / "samples.jsonl").write_text("".join(lines[:-1]))
    (folder / "recipe.yaml").unlink()
    said = f"samples are from two environments (cpu_count was 99 and is {where['cpu_count']}"
    assert f"warning: {said}" in specdec(capsys, *resume).err
    merged = specdec(capsys, "merge", folder, "-o", tmp_path / "new", "--json")
    for document in ((folder / "summary.json").read_text(), merged.out):
        told = [one["message"] for one in json.loads(document)["warnings"]]
        assert any(one.startswith(said) and "measure again" in one for one in told)
    assert (folder / "recipe.yaml").read_text() == (whole[0] / "recipe.yaml").read_text()


def test_other_categories_are_another_dataset(capsys: Capture, tmp_path: Path) -> None:
    """Name and prompts are the same; one prompt gives no interval."""
    path, folder = tmp_path / "prompts.jsonl", tmp_path / "run"
    options = ["--dataset", path, "--limit", "1", "--max-new-tokens", "2", *ONCE, "-o", folder]
    path.write_text('{"prompt": "def f(x):", "category": "old"}\n')
    result = specdec(capsys, *SWEEP, *options, "-q", "--json")
    assert result.code == 0 and "1 prompt is too few" in result.err
    reason = result.document["best"]["reason"]
    assert "over 1 prompt" in reason and "1 prompts" not in reason and "tied" not in reason
    path.write_text('{"prompt": "def f(x):", "category": "new"}\n')
    refused(specdec(capsys, *SWEEP, *options, "--resume"), 2, "prompts.categories differs: ")


def test_a_closed_stderr_is_no_failure(
    whole: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from specdec_cli.app import main

    folder = shutil.copytree(whole[0], tmp_path / "run")
    (folder / "curve.jsonl").unlink()  # something is left to measure, and to warn of
    monkeypatch.setattr(sys, "stderr", None)
    assert main([*SWEEP, "--resume", "-o", str(folder)]) == 0
    assert sys.stderr is None


def test_a_reader_that_has_gone_is_not_told_to_resume(
    capsys: Capture, whole: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any, **__: object) -> None:
        raise SystemExit(1)  # as rich does

    monkeypatch.setattr("specdec_cli.commands.sweep_run.print_results", broken)
    result = specdec(capsys, *SWEEP, "-q", "--resume", "-o", whole[0])
    assert result.code == 1 and "resume" not in result.err
