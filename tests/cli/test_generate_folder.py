"""`specdec generate -o DIR`: the run folder's content, also after failures."""

import json
import os
import re
import signal
import time
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from specdec_cli.experiment.folders.run_folder import RunFolder
from specdec_cli.recipe import load_recipe
from tests.cli.generate_helpers import (
    DEMO,
    PROMPTS,
    Result,
    Run,
    forked,
    prompt_options,
    specdec,
)
from tests.cli.sweep_helpers import samples

pytestmark = pytest.mark.usefixtures("small_demo")

SHORT = ("--max-new-tokens", "6", "-k", "2")
SAMPLE_KEYS = [
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
    *("proposed_per_round", "rounds_without_proposal", "num_preemptions", "max_output_tokens"),
    *("decode_seconds", "round_share", "stage_ms", "ttft_ms", "tpot_ms", "ttft_parts_ms"),
    "peak_memory_bytes",
]


def refused(result: Result, code: int, message: str) -> None:
    assert (result.code, result.out) == (code, "")
    assert re.match(f"error: .*{message}", result.err)
    assert len(re.findall("^error: ", result.err, re.M)) == 1 and "Traceback" not in result.err


def test_folder(run: Run, tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    lines = [{"prompt": p, "category": f"c{i}"} for i, p in enumerate(PROMPTS)]
    prompts.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    folder = tmp_path / "new" / "run"
    options = ("--temperature", "0.7", "--seed", "5", "--batch-size", "2", *SHORT)
    result = run("--prompt-file", prompts, *options, "--json", "-o", folder)
    assert result.code == 0
    written = {"recipe.yaml", "environment.json", "settings.json"}
    written |= {"samples.jsonl", "points.jsonl", "summary.json"}
    assert {path.name for path in folder.iterdir()} == written

    document = result.document
    assert json.loads((folder / "summary.json").read_text()) == document
    assert json.loads((folder / "environment.json").read_text()) == document["environment"]
    point = json.loads((folder / "points.jsonl").read_text())
    assert (point["draft"], point["k"], point["batch_size"]) == ("demo:draft", 2, 2)
    assert point["status"] == "ok" and point["metrics"] == document["metrics"]
    assert point["speedup"] is None
    found = sorted(samples(folder), key=lambda sample: str(sample["index"]))
    for sample, output in zip(found, result.outputs, strict=True):
        assert list(sample) == SAMPLE_KEYS
        assert (sample["draft"], sample["k"], sample["batch_size"]) == ("demo:draft", 2, 2)
        assert sample["seconds"] == [output["seconds"]] and output["seconds"] > 0
        for key in ("category", "token_ids", "prompt_token_ids", "accepted_per_round"):
            assert sample[key] == output[key]

    recipe = folder / "recipe.yaml"
    assert load_recipe(str(recipe)).model_dump(mode="json") == document["recipe"]
    again = run(recipe, "--json")
    assert [o["token_ids"] for o in again.outputs] == [o["token_ids"] for o in result.outputs]


def test_prompts_that_no_file_holds_are_kept(run: Run, tmp_path: Path) -> None:
    result = run(*prompt_options(*PROMPTS, "\u00dcni \U0001f600"), *SHORT, "--json", "-o", tmp_path)
    assert result.document["recipe"]["data"]["path"] == str(tmp_path / "prompts.jsonl")
    again = run(tmp_path / "recipe.yaml", "--json")
    assert again.document["recipe"] == result.document["recipe"]
    for key in ("prompt", "token_ids"):
        assert [o[key] for o in again.outputs] == [o[key] for o in result.outputs]


def test_the_recipe_runs_again_from_another_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").symlink_to(DEMO / "target")
    (tmp_path / "p.txt").write_text("def f(x):\n")
    (tmp_path / "r.yaml").write_text("target: {model: model}\ndata: {path: p.txt}\n")
    monkeypatch.chdir(tmp_path)
    result = run("r.yaml", *SHORT, "--json", "-o", "run")
    assert result.document["recipe"]["target"]["model"] == "model"  # the name as given
    monkeypatch.chdir("/")
    again = run(tmp_path / "run" / "recipe.yaml", "--json")
    assert again.outputs[0]["token_ids"] == result.outputs[0]["token_ids"]


def test_an_empty_name_is_not_the_current_folder(run: Run) -> None:
    refused(
        run("--prompt", "x", "-o", ""), 2, "Invalid value for '-o' / '--output': the name is empty"
    )


def test_a_prompt_that_failed_has_its_line(run: Run, tmp_path: Path) -> None:
    prompts = prompt_options("def " * 40, "x")
    limit = ("--set", "cache.max_model_len=20")
    assert run(*prompts, *limit, *SHORT, "-o", tmp_path).code == 3
    reasons = {sample["index"]: sample["finish_reason"] for sample in samples(tmp_path)}
    assert reasons == {0: "error", 1: "length"}
    point = json.loads((tmp_path / "points.jsonl").read_text())
    assert point["status"] == "ok" and point["metrics"]["num_prompts"] == 1


def test_a_single_prompt_that_cannot_run_leaves_the_folder_free(run: Run, tmp_path: Path) -> None:
    alone = ("--prompt", "def " * 40, *SHORT, "-o", tmp_path)
    refused(run(*alone, "--num-blocks", "3"), 2, "the prompt cannot run: needs 3 KV blocks")
    assert run(*alone).code == 0
    assert [sample["finish_reason"] for sample in samples(tmp_path)] == ["length"]


def test_a_point_without_a_prompt_that_could_run_says_why(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("def " * 40)
    limit = ("--set", "cache.max_model_len=20")
    folder = tmp_path / "run"
    assert run("--prompt-file", tmp_path / "p.txt", *limit, *SHORT, "-o", folder).code == 3
    (sample,) = samples(folder)
    point = json.loads((folder / "points.jsonl").read_text())
    assert (point["status"], point["metrics"]) == ("failed", None)
    assert point["reason"] == f"no prompt could run: {sample['error']}"


def test_no_secret_is_written_or_printed(tmp_path: Path) -> None:
    secrets = {
        "HF_TOKEN": "hf_planted0token",
        "WANDB_API_KEY": "planted1key",
        "HTTPS_PROXY": "http://someone:planted2password@proxy.example:3128",
        "PASSWORD": "planted3",
        "USER": "planted4user",
    }
    folder = tmp_path / "run"
    result = specdec("generate", "--prompt", "x", *SHORT, "-v", "--json", "-o", folder, **secrets)
    assert result.code == 0
    everything = result.out + result.err
    everything += "".join(path.read_text() for path in folder.iterdir())
    assert "planted" not in everything


def test_what_is_written_is_on_the_disk_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process loses nothing without fsync, but a machine that loses power does."""
    synced: set[tuple[int, int]] = set()

    def state(file: int | Path) -> tuple[int, int]:
        return os.stat(file).st_ino, os.stat(file).st_size

    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(state(file)), fsync(file)))
    folder = RunFolder(tmp_path)
    for number in range(2):
        folder.append("samples.jsonl", {"index": 2 * number}, {"index": 2 * number + 1})
        assert state(tmp_path / "samples.jsonl") in synced
    folder.write("summary.json", "{}\n")
    assert state(tmp_path / "summary.json") in synced
    assert os.stat(tmp_path).st_ino in {
        number for number, _ in synced
    }  # the folder, which holds the names
    folder.close()


def test_a_users_own_files_are_left_alone(run: Run, tmp_path: Path) -> None:
    names = ("prompts.jsonl", "settings.json", "summary.json", "environment.json", "servers.json")
    for name in (*names, "report.html", "plots", "memory.png"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("mine")
        refused(
            run("--prompt", "x", *SHORT, "-o", folder),
            2,
            f"{re.escape(str(folder / name))} was not written by a run, and would be overwritten",
        )
        assert [f.name for f in folder.iterdir()] == [name]
        assert (folder / name).read_text() == "mine"


def test_folder_that_cannot_be_made(run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        result = run("--prompt", "x", *SHORT, "-o", folder)
        refused(result, 5, f"cannot create the folder {re.escape(str(folder))}: ")
    assert (tmp_path / "file").read_text() == "mine"
    long = tmp_path / ("n" * 300)  # whatever the source of prompts
    refused(run("--prompt", "x", *SHORT, "-o", long), 5, "cannot create the folder .*: File name")
    refused(run(*SHORT, "-o", long), 5, "cannot create the folder .*: File name too long")


def test_folder_that_cannot_be_written(run: Run) -> None:
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("no /proc: the one folder that not even root can write to")
    refused(run("--prompt", "x", *SHORT, "-o", "/proc/self"), 5, "cannot write /proc/self/recipe")


@pytest.mark.parametrize(
    "name", ["samples.jsonl", "points.jsonl", "replay.jsonl", "curve.jsonl", "pairs.jsonl"]
)
def test_earlier_results_are_left_alone(name: str, run: Run, tmp_path: Path) -> None:
    kept = {"recipe.yaml": "target: x\n", "summary.json": "{}", name: '{"k": 1}\n'}
    for file, text in kept.items():
        (tmp_path / file).write_text(text)
    result = run("--prompt", "x", *SHORT, "-o", tmp_path)
    refused(result, 2, f"{re.escape(str(tmp_path))} holds the results of an earlier run")
    assert "hint: name another folder with -o" in result.err
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == kept


def test_a_run_that_wrote_nothing_may_be_repeated(run: Run, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").touch()
    assert run("--prompt", "x", *SHORT, "-o", tmp_path).code == 0
    assert len(samples(tmp_path)) == 1
    for name in ("samples.jsonl", "points.jsonl", "settings.json"):  # interrupted before these
        (tmp_path / name).unlink()
    assert run("--prompt", "x", *SHORT, "-o", tmp_path).code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_full_disk(flags: tuple[str, ...], run: Run, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").symlink_to("/dev/full")
    result = run("--prompt", "x", *SHORT, "-o", tmp_path, *flags)
    assert result.code == 5
    where = re.escape(str(tmp_path / "samples.jsonl"))
    assert re.fullmatch(f"error: cannot write {where}: No space left on device\n", result.err)
    if flags:
        assert result.document["error"]["code"] == 5
    else:
        assert result.out == ""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)],
    ids=["INT", "TERM"],
)
def test_signals_keep_what_is_done(number: signal.Signals, code: int, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    options = ("--set", "data.limit=200", "--max-new-tokens", "16", "--batch-size", "2")
    records = folder / "samples.jsonl"
    deadline = time.monotonic() + 90
    with open(os.devnull) as empty, TemporaryFile("w+") as told, TemporaryFile("w+") as said:
        streams = (empty.fileno(), told.fileno(), said.fileno())
        child = forked(["generate", *options, "-o", folder], streams, {})
        while not (records.is_file() and records.read_text().count("\n") >= 3):
            assert os.waitpid(child, os.WNOHANG) == (0, 0) and time.monotonic() < deadline
            time.sleep(0.02)
        os.kill(child, number)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
        told.seek(0)
        said.seek(0)
        out, err = told.read(), said.read()
    done = samples(folder)
    told = f"{folder} keeps {len(done)} prompts\n"
    told += f"resume with: specdec generate --resume -o {folder}\n"
    assert re.fullmatch(re.escape(told) + "error: (interrupted|terminated)\n", err)
    assert 3 <= len(done) < 200 and all(sample["token_ids"] for sample in done)
    assert not (folder / "summary.json").exists()
    # The printed text is whole too: a prefix of the prompts in their order.
    headings = re.findall(r"^==> prompt (\d+) <==$", out, re.M)
    assert headings == [str(i) for i in range(len(headings))] and headings
