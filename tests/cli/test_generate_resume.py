"""`specdec generate -o DIR --resume`: an interrupted run goes on where it was."""

import json
from pathlib import Path
from typing import Any

import pytest

from specdec_cli import demo
from specdec_cli.backends import native
from specdec_cli.errors import Notice
from specdec_cli.experiment import machine
from specdec_cli.experiment.folders.run_folder import RunFolder
from tests.cli.generate_helpers import PROMPTS, Result, generate, prompt_options

pytestmark = pytest.mark.usefixtures("small_demo")

SHORT = ("--max-new-tokens", "5", "-k", "2", "--batch-size", "2")
GIVEN = [*prompt_options(*PROMPTS, "import sys\n", "x = 1\n"), *SHORT]
TIMES = {"seconds"}

Capture = pytest.CaptureFixture[str]


def killed(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, after: int, *arguments: str | Path
) -> Result:
    """Run generate and kill it while it writes the record after `after` others."""
    append, count = RunFolder.append, 0

    def torn(self: RunFolder, name: str, *records: Any) -> None:
        nonlocal count
        if name == "samples.jsonl" and count == after:
            with (self.path / name).open("a") as file:
                file.write('{"draft": "demo:dr')
            raise KeyboardInterrupt
        count += len(records)
        append(self, name, *records)

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append", torn)
        return generate(capsys, *arguments)


def texts(result: Result) -> list[dict[str, Any]]:
    return [{k: v for k, v in o.items() if k not in TIMES} for o in result.outputs]


@pytest.mark.parametrize("temperature", ["0", "0.8"], ids=["greedy", "sampled"])
def test_a_killed_run_goes_on(
    temperature: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run = [*GIVEN, "--temperature", temperature, "--json"]
    undisturbed = generate(capsys, *run, "-o", whole)
    assert killed(capsys, monkeypatch, 2, *run, "-o", cut).code == 130
    kept = (cut / "samples.jsonl").read_text().split("\n")[:2]
    moved = cut.rename(tmp_path / "moved")  # a folder may be moved meanwhile
    resumed = generate(capsys, *run, "-o", moved, "--resume")
    assert resumed.code == 0
    assert texts(resumed) == texts(undisturbed)
    lines = (moved / "samples.jsonl").read_text().splitlines()
    assert lines[:2] == kept and len(lines) == 5
    assert sorted(json.loads(line)["index"] for line in lines) == [0, 1, 2, 3, 4]
    ours, theirs = resumed.document["metrics"], undisturbed.document["metrics"]
    for name in ("num_prompts", "num_output_tokens", "num_drafts", "acceptance_histogram"):
        assert ours[name] == theirs[name]
    assert ours["decode_seconds"] > 0

    # Where all is done, nothing is loaded and nothing is written twice.
    monkeypatch.setattr("specdec_cli.backends.native.build", None)
    for recipe in ([], [moved / "recipe.yaml"]):
        again = generate(capsys, *recipe, "--json", "-o", moved, "--resume")
        assert again.code == 0 and texts(again) == texts(undisturbed)
    assert (moved / "samples.jsonl").read_text().splitlines() == lines
    assert len((moved / "points.jsonl").read_text().splitlines()) == 1


def test_what_was_measured_under_is_kept(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise and environment are those of the run, not those of the command that finds it whole."""
    noise = Notice("cpu_load", "8 processes were ready to run on 2 processors")
    run: list[str | Path] = [*GIVEN, "--json", "-o", tmp_path]
    with monkeypatch.context() as patch:
        patch.setattr(machine.MachineWatch, "notices", lambda _: [noise])
        patch.setattr(native, "environment", lambda _: {"device": "another"})
        first = generate(capsys, *run)
    environment = tmp_path / "environment.json"
    environment.unlink()  # a resumed run writes it again
    again = generate(capsys, *run, "--resume", "--strict")
    assert (first.code, again.code) == (0, 3) and again.err.count(noise.message) == 1
    assert json.loads(environment.read_text()) == {"device": "another"}
    whole, resumed = first.document, again.document
    for found in (whole, resumed):  # the last sample's may be less than the run's
        assert found["metrics"].pop("peak_memory_bytes") > 1 << 20
    assert resumed == whole
    # An interrupted run keeps the noise of its first part.
    run[-1] = tmp_path / "cut"
    with monkeypatch.context() as patch:
        patch.setattr(machine.MachineWatch, "notices", lambda _: [noise])
        assert killed(capsys, monkeypatch, 2, *run).code == 130
    assert generate(capsys, *run, "--resume", "--strict").code == 3


def test_plain_decoding_names_no_draft_and_goes_on(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier folders named the draft that k = 0 did not use."""
    run = [*GIVEN, "-k", "0"]
    assert killed(capsys, monkeypatch, 2, *run, "-o", tmp_path).code == 130
    lines = (tmp_path / "samples.jsonl").read_text()
    assert lines.count('"draft": null, "k": 0') == 2
    (tmp_path / "samples.jsonl").write_text(lines.replace("null", '"demo:draft"', 1))
    resumed = generate(capsys, *run, "-o", tmp_path, "--resume")
    assert resumed.code == 0, resumed.err
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 5


def test_the_folder_is_enough(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = [*GIVEN, "--temperature", "0.8", "--draft", "ngram"]
    whole = generate(capsys, *run, "--json")
    assert killed(capsys, monkeypatch, 1, *run, "-o", tmp_path).code == 130
    other = generate(capsys, "--resume", "-o", tmp_path, "--seed", "1")
    assert other.code == 2 and "run.seed is 0 there and 1 now" in other.err
    resumed = generate(capsys, "--resume", "-o", tmp_path, "--json")
    assert resumed.code == 0 and texts(resumed) == texts(whole)


def test_an_empty_category_is_none(tmp_path: Path, capsys: Capture) -> None:
    """Prompts beside a file of prompts are kept in the run folder, and read again from there."""
    rows, folder = tmp_path / "rows.csv", tmp_path / "run"
    rows.write_text("prompt,category\nimport os,\nx = 1,b\n")
    run = ("--prompt", "def f(x):", "--prompt-file", rows, *SHORT, "--json", "-o", folder)
    whole = generate(capsys, *run)
    assert [output.get("category") for output in whole.outputs] == [None, None, "b"]
    for again in (run, ("-o", folder, "--json")):
        (folder / "samples.jsonl").write_text("")
        resumed = generate(capsys, *again, "--resume")
        assert resumed.code == 0, resumed.err
        assert texts(resumed) == texts(whole)


@pytest.mark.parametrize("name", ["draft \U0001f642", "dr\x7faft: \u00fc, [1]"])
def test_a_draft_with_an_unusual_name_goes_on(name: str, tmp_path: Path, capsys: Capture) -> None:
    """The name goes through YAML, whose escapes are not those of JSON."""
    draft, folder = tmp_path / name, tmp_path / "run"
    draft.symlink_to(demo.demo_path("demo:draft"))
    whole = generate(capsys, *GIVEN, "--draft", draft, "--json", "-o", folder)
    (folder / "samples.jsonl").write_text("")
    resumed = generate(capsys, "--resume", "-o", folder, "--json")
    assert resumed.code == whole.code == 0, resumed.err
    assert texts(resumed) == texts(whole)


def test_what_cannot_go_on(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = generate(capsys, *GIVEN, "--resume")
    assert (refused.code, refused.err.count("error: ")) == (2, 1) and "-o DIR" in refused.err
    killed(capsys, monkeypatch, 1, *GIVEN, "-o", tmp_path)
    before = (tmp_path / "samples.jsonl").read_text()
    for changed, key in (
        ([*GIVEN, "--seed", "3"], "run.seed is 0 there and 3 now"),
        ([*GIVEN, "--temperature", "0.5"], "sampling.temperature is 0.0 there"),
        (
            [*GIVEN, "--set", "target.weights=dequantise"],
            "target.weights is auto there and dequantise now",
        ),
        ([*GIVEN, "--prompt", "another"], "the number of prompts is 5 there and 6 now"),
        (
            [*prompt_options(*"abcde"), *SHORT],
            "prompts.sha256 differs: the prompts differ from the folder's",
        ),
    ):
        result = generate(capsys, *changed, "-o", tmp_path, "--resume")
        assert result.code == 2 and result.err.count("error: ") == 1
        assert "contains a run with different settings: " + key in result.err
    assert (tmp_path / "samples.jsonl").read_text() == before
    again = generate(capsys, *GIVEN, "-o", tmp_path).err
    assert "holds the results of an earlier run" in again and "(--resume)" in again
    samples = tmp_path / "samples.jsonl"
    samples.write_text(before.replace('"seconds": [', '"seconds": [1.0, ', 1))
    edited = generate(capsys, *GIVEN, "-o", tmp_path, "--resume")
    assert edited.code == 5 and "seconds does not have 1 values, one per repeat" in edited.err
