"""The three commands in turn on the demo target, as small as can be, in this process."""

import json
import math
import re
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from scripts.speculators import commands, evaluate, texts, train
from scripts.speculators.corpus import read_texts, read_wave
from specdec_cli.app import main
from specdec_cli.demo import demo_path

pytestmark = pytest.mark.usefixtures("smaller_demo")

WITHOUT_DEFAULT = {
    *("--target", "--recipe", "--set", "--out", "--prompts", "--avoid", "--texts", "--json"),
    *("--minutes", "--waves", "--steps", "--layers", "--vocabulary", "--start"),
}
PROMPTS = ("--target", "demo:target", "--prompts", "demo:prompts", "--set", "run.device=cpu")


def run(module: object, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments)])
    module.main()  # type: ignore[attr-defined]


@pytest.mark.parametrize("module", [texts, train, evaluate])
def test_help_has_every_default(
    module: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as end:
        run(module, monkeypatch, "--help")
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert "default: " in told and "--minutes" in told
    with_value = re.findall(r"^ +(?:-o OUT, )?(--[a-z-]+) [A-Z/=]+.*(?:\n {8,}.*)*", told, re.M)
    shown = re.findall(r"^ +(--[a-z-]+) [A-Z/]+.*(?:\n {8,}.*)*?default: ", told, re.M)
    assert set(with_value) - set(shown) <= WITHOUT_DEFAULT
    if module is not evaluate:
        assert "on a GPU" in told and "on a CPU" in told


@pytest.mark.parametrize("module", [texts, train, evaluate])
def test_usage_leaves_the_error_in_sight(
    module: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        run(module, monkeypatch, "--out", "x")
    *usage, error = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and "error: " in error
    assert len(usage) <= 2 and "--seed" not in "".join(usage)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--minutes", "-1"), "expected minutes above 0, got -1"),
        (("--minutes", "nan"), "expected minutes above 0, got nan"),
        (("--waves", "0"), "expected a whole number above 0, got 0"),
        (("--waves", "x"), "--waves: invalid count value: 'x'"),
        (("--waves", "1", "--shard", "x"), "expected I/N with I < N, such as 0/3, got x"),
        (("--waves", "1", "--shard", "3/3"), "expected I/N with I < N, such as 0/3, got 3/3"),
        (("--waves", "1", "--set", "foo"), "--set: expected KEY=VALUE, got 'foo'"),
        (("--waves", "1", "--target", "demo:nosuch"), "no bundled model demo:nosuch"),
        (("--waves", "1", "-o", "FILE"), "FILE: File exists"),
    ],
)
def test_mistakes_get_one_line(
    arguments: tuple[str, ...],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    file = tmp_path / "file"
    file.touch()
    given = [str(file) if one == "FILE" else one for one in arguments]
    whole = (*PROMPTS, *(() if "-o" in given else ("--out", tmp_path / "texts")), *given)
    with pytest.raises(SystemExit) as end:
        commands.run(lambda: run(texts, monkeypatch, *whole))
    error = next(one for one in capsys.readouterr().err.splitlines() if "error: " in one)
    assert told.replace("FILE", str(file)) in error
    assert end.value.code == (5 if "demo:nosuch" in told else 2)


def test_sizes_are_those_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    asked = ["command", "draft", "--target", "t", "--texts", "x", "--out", "y", "--device"]
    for device, length in (("cpu", 256), ("cuda", 1792), ("auto", 256)):
        monkeypatch.setattr(sys, "argv", [*asked, device])
        assert train.parse().length == length
    monkeypatch.setattr(sys, "argv", [*asked, "cpu", "--length", "77"])
    assert train.parse().length == 77


@pytest.mark.parametrize(
    ("module", "arguments", "told"),
    [
        (texts, ("--target", "demo:nothing", "--waves", 1), "no bundled model demo:nothing"),
        (train, ("draft", "--target", "demo:target", "--texts", "nowhere"), "has no texts"),
        (train, ("draft", "--target", "nowhere/at/all", "--texts", "x"), "no such model"),
        (train, ("mtp", "--target", "t", "--texts", "x", "--rank", 2), "--rank: the kind mtp does"),
    ],
)
def test_errors_are_one_line(
    module: Any,
    arguments: tuple[object, ...],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["command", *map(str, arguments), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        commands.run(module.main)
    error = capsys.readouterr().err
    assert end.value.code in (2, 5) and "Traceback" not in error
    assert error.startswith("error: ") and told in error.splitlines()[0]


def test_from_a_target_to_a_measured_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out, avoided = tmp_path / "texts", tmp_path / "draft", tmp_path / "avoid.jsonl"
    line = demo_path("demo:prompts").read_text().splitlines()[3]
    avoided.write_text(line + "\n")
    sizes = ("--batch", 16, "--new-tokens", 16, "--waves", 2)
    run(texts, monkeypatch, *PROMPTS, "--out", folder, "--avoid", avoided, *sizes)
    told = capsys.readouterr().out
    assert told.count(" texts (given, temperature ") == 2 and f"2 waves in {folder}, " in told
    waves = [read_wave(folder / f"wave-0000{i}.npz")[1] for i in (0, 1)]
    assert [wave["wave"] for wave in waves] == [0, 1]
    assert 1 <= waves[0]["overlapping"] <= 6 and waves[1]["overlapping"] < 6
    tokenizer = AutoTokenizer.from_pretrained(demo_path("demo:target"))
    unwanted = tokenizer(json.loads(line)["prompt"])["input_ids"]
    kept = [t.ids[: t.start].tolist() for t in read_wave(folder / "wave-00000.npz")[0]]
    assert unwanted not in kept and len(kept) > 10

    tiny = ("--steps", 8, "--length", 128, "--rows", 2, "--held-rows", 1, "--device", "cpu")
    where = ("--target", "demo:target", "--texts", folder, "--out", out)
    run(train, monkeypatch, "draft", *where, *tiny, "--depth", 1)
    log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert f"--draft {out / 'speculator'}" in capsys.readouterr().out.splitlines()[-1]
    assert log[-1]["step"] == 8 and log[-1]["accuracy"][0] > log[0]["accuracy"][0]
    run(train, monkeypatch, "draft", *where, *tiny, "--depth", 1, "--steps", 10)
    record = json.loads((out / "training.json").read_text())
    assert record["step"] == 10 and record["tokens"] == 10 * 2 * 128  # went on from step 8
    with pytest.raises(ValueError, match=f"{out} was trained with depth 1, and not with 2"):
        run(train, monkeypatch, "draft", *where, *tiny, "--depth", 2, "--steps", 12)
    copy = tmp_path / "copy"
    shutil.copytree(demo_path("demo:target"), copy)
    other = ("draft", "--target", copy, *where[2:], *tiny, "--depth", 1, "--steps", 12)
    with pytest.raises(ValueError, match=f"trained with target .*, and not with {copy}: go on"):
        run(train, monkeypatch, *other)

    # Heads that read their own draws, and masks that a checkpoint names.
    blocks = tmp_path / "blocks"
    where = ("--target", "demo:target", "--texts", folder, "--out", blocks)
    tiny = (*tiny, "--anchors", 24, "--depth", 1, "--inner", 64, "--rank", 4, "--block", 4)
    run(train, monkeypatch, "dspark", *where, *tiny)
    run(train, monkeypatch, "dspark", *where, *tiny, "--steps", 16)
    log = [json.loads(line) for line in (blocks / "log.jsonl").read_text().splitlines()]
    assert [found["step"] for found in log] == [0, 8, 8, 16] and len(log[0]["accuracy"]) == 4
    assert log[1]["accuracy"] == log[2]["accuracy"]  # goes on with what was saved
    assert log[0]["accuracy"][0] < log[-1]["accuracy"][0]
    assert log[-1]["loss"] < log[1]["loss"]

    # The README's words for a head of the demo target, with few steps.
    readme = (Path(train.__file__).parent / "README.md").read_text()
    (words,) = re.findall(r"train (eagle3 --target demo:target [^#\n]+?) --texts", readme)
    assert re.search(r"texts --target demo:target --prompts demo:prompts\s", readme)
    head = tmp_path / "head"
    asked = (*words.split(), "--texts", folder, "--out", head, *tiny[:8])
    run(train, monkeypatch, *asked, "--inner", 64, "--links", 2)
    log = [json.loads(line) for line in (head / "log.jsonl").read_text().splitlines()]
    assert sum(log[-1]["accuracy"]) > sum(log[0]["accuracy"]) and len(log[0]["accuracy"]) == 2
    ask = ("generate", "--target", "demo:target", "--prompt", "def f(x):", "--max-new-tokens", "6")
    capsys.readouterr()
    assert main([*ask, "--draft", str(head / "speculator"), "-k", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recipe"]["speculation"]["method"] == "eagle3"
    assert document["outputs"][0]["num_draft_tokens"] >= 2

    # Minutes count from the start of the command: an hour that imports took leaves none.
    monkeypatch.setattr(train, "BEGAN", time.perf_counter() - 3600)
    asked = ("eagle3", *PROMPTS[:2], "--texts", folder, "--out", tmp_path / "late", *tiny[2:8])
    with pytest.raises(ValueError, match="no step was taken in 50 minutes"):
        run(train, monkeypatch, *asked, "--minutes", 50)
    (only,) = map(json.loads, (tmp_path / "late" / "log.jsonl").read_text().splitlines())
    assert only["step"] == 0 and only["done"] > 1

    table = tmp_path / "table.json"
    few = ("--every", 25, "--new-tokens", 16, "--json", table)
    run(evaluate, monkeypatch, out / "speculator", *PROMPTS, *few, "--k", "2")
    run(evaluate, monkeypatch, out / "speculator", *PROMPTS, *few, "--k", "1,2")
    runs = json.loads(table.read_text())["runs"][str(out / "speculator")]
    assert [found["k"] for found in runs] == [2, 1]
    for found in runs:
        assert found["prompts"] == 8 and found["refused"] == 0
        assert 1 < found["tokens_a_round"] < found["k"] + 1
        assert found["interval"][0] < found["tokens_a_round"] < found["interval"][1]
        assert set(found["categories"]) == {"text", "data", "io", "net", "math"}
    assert all("beside_first" not in found for found in runs)
    # Another speculator is set beside the first one's runs in the file.
    run(evaluate, monkeypatch, out / "speculator", "ngram", *PROMPTS, *few, "--k", "2")
    evaluated = json.loads(table.read_text())["runs"]
    ratio = evaluated["ngram"][0]["beside_first"][0]
    assert ratio == pytest.approx(
        evaluated["ngram"][0]["tokens_a_round"] / runs[0]["tokens_a_round"], abs=2e-4
    )
    asked = ("ngram", *PROMPTS, *few, "--k", "2")
    for changed in (("--new-tokens", 17), ("--every", 26), ("--target", copy), ("--set", "a=1")):
        with pytest.raises(ValueError, match=f"table.json has runs with {changed[0]} "):
            run(evaluate, monkeypatch, *asked, *changed)
    assert json.loads(table.read_text())["runs"] == evaluated
    # The last round of a text may propose fewer tokens, so this is close and not equal.
    assert runs[1]["tokens_a_round"] == pytest.approx(1 + runs[1]["accepted"][0], rel=0.05)


def test_prompts_are_the_first_turns_of_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, parts = tmp_path / "chats.jsonl", [{"type": "text", "text": "def f(x):"}]
    system = {"role": "system", "content": "Be brief."}
    chats = [[system, {"role": "user", "content": said}] for said in (parts, "class A:")]
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    given = (*PROMPTS[:2], "--prompts", file, *PROMPTS[4:], "--batch", 2, "--new-tokens", 8)
    run(texts, monkeypatch, *given, "--waves", 1, "--out", tmp_path / "out")
    found = read_wave(tmp_path / "out" / "wave-00000.npz")[0]
    tokenizer = AutoTokenizer.from_pretrained(demo_path("demo:target"))
    wanted = tokenizer(["def f(x):", "class A:"])["input_ids"]
    assert [text.ids[: text.start].tolist() for text in found] == wanted
    file.write_text('{"prompt_token_ids": [1, 2]}\n')
    with pytest.raises(ValueError, match=r"chats\.jsonl has no texts of users"):
        run(texts, monkeypatch, *given, "--waves", 1, "--out", tmp_path / "other")


def test_a_head_of_few_ids_has_the_most_frequent_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More ids than every step's loss has can be kept too."""
    folder, out = tmp_path / "texts", tmp_path / "head"
    sizes = ("--batch", 8, "--new-tokens", 8, "--waves", 1)
    run(texts, monkeypatch, *PROMPTS, "--out", folder, *sizes)
    where = ("--target", "demo:target", "--texts", folder, "--out", out, "--device", "cpu")
    tiny = ("--steps", 1, "--length", 64, "--rows", 1, "--held-rows", 1, "--inner", 64)
    few = ("--links", 1, "--vocabulary", 20, "--often", 10)
    run(train, monkeypatch, "eagle3", *where, *tiny, *few)
    stored = load_file(out / "speculator" / "model.safetensors")
    ids = stored["d2t"] + torch.arange(20)
    kept, _, frame = read_texts(
        folder, json.loads((folder / "frame.json").read_text())["vocab_size"]
    )
    counts = np.bincount(np.concatenate([text.ids for text in kept]), minlength=frame.vocab_size)
    assert len(set(ids.tolist())) == 20 and ids.tolist() == sorted(ids.tolist())
    assert sorted(counts[ids]) == sorted(counts)[-20:]


def test_a_resumed_training_reads_further_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each order is drawn from the seed and the step with which a run goes on."""
    folder, read = tmp_path / "texts", list[list[int]]()
    sizes = ("--batch", 48, "--new-tokens", 16, "--waves", 1)
    run(texts, monkeypatch, *PROMPTS, "--out", folder, *sizes)
    plain = train.Rows.at

    def at(rows: train.Rows, places: torch.Tensor, device: torch.device) -> train.Rows:
        read.append(places.tolist())
        return plain(rows, places, device)

    monkeypatch.setattr(train.Rows, "at", at)
    where = ("--target", "demo:target", "--texts", folder, "--out", tmp_path / "out")
    tiny = ("--length", 64, "--rows", 2, "--held-rows", 1, "--device", "cpu", "--depth", 1)
    runs = []
    for steps in (2, 4):
        read.clear()
        run(train, monkeypatch, "draft", *where, *tiny, "--steps", steps)
        runs.append([places for places in read if len(places) == 2])
    assert len(runs[0]) == len(runs[1]) == 3 and runs[0][0] == runs[1][0]  # the first is prepared
    kept, _, frame = read_texts(
        folder, json.loads((folder / "frame.json").read_text())["vocab_size"]
    )
    count = len(train.packed(train.joined(kept, frame, 64, 0.125, 1), 64))
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1 + 2)).tolist()
    assert count > 8 and runs[1][1:] == [order[:2], order[2:4]]
    assert runs[0][1:] != runs[1][1:]


@pytest.mark.parametrize(("warmup", "done", "share"), [(0, 0.0, 1.0), (200, 0.0, 1 / 200)])
def test_a_warm_up_begins_with_a_step(warmup: int, done: float, share: float) -> None:
    assert train.schedule(done, 0, warmup) == pytest.approx(share)


def test_a_warm_up_takes_a_tenth_of_a_run_at_most() -> None:
    """Although 200 steps would be half of it."""
    shares = [train.schedule(step / 400, step, 200) for step in range(400)]
    cosine = [0.5 * (1 + math.cos(math.pi * step / 400)) for step in range(400)]
    risen = [share / whole for share, whole in zip(shares, cosine, strict=True)]
    assert risen[20] == pytest.approx(0.5) and risen[40:] == pytest.approx([1.0] * 360)
    assert shares.index(max(shares)) == 40


def test_texts_go_on_where_a_run_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = (*PROMPTS, "--batch", 6, "--new-tokens", 8)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(texts, monkeypatch, "--out", whole, *sizes, "--waves", 2)
    run(texts, monkeypatch, "--out", parts, *sizes, "--waves", 1)
    began = (parts / "wave-00000.npz").stat().st_mtime_ns
    run(texts, monkeypatch, "--out", parts, *sizes, "--waves", 2)
    assert (parts / "wave-00000.npz").stat().st_mtime_ns == began
    for name in ("wave-00000.npz", "wave-00001.npz"):
        ours, theirs = (read_wave(folder / name)[0] for folder in (whole, parts))
        assert len(ours) == len(theirs) > 0
        assert all(np.array_equal(a.ids, b.ids) for a, b in zip(ours, theirs, strict=True))
    vocab_size = json.loads((whole / "frame.json").read_text())["vocab_size"]
    with pytest.raises(ValueError, match="name the texts of this target"):
        read_texts(whole, vocab_size + 1)
    kept, held, frame = read_texts(whole, vocab_size)
    assert len(kept) + len(held) == sum(len(read_wave(p)[0]) for p in whole.glob("wave-*"))
    assert len(held) == 2 and frame.between == ()
    other = {"opening": [], "between": [], "ends": [], "vocab_size": vocab_size + 1}
    (whole / "frame.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="texts of another target"):
        run(texts, monkeypatch, "--out", whole, *sizes, "--waves", 2)
    assert json.loads((whole / "frame.json").read_text()) == other, "nothing is written over"
    # Of two prompts the second wave would be the first one's greedy answers again.
    few, again = tmp_path / "few.txt", (*PROMPTS[:2], *PROMPTS[4:], "--batch", 2, "--waves")
    few.write_text("def f(x):\nclass A:\n")
    for waves in (1, 2):
        given = (*again, waves, "--prompts", few, "--new-tokens", 8)
        run(texts, monkeypatch, "--out", tmp_path / "few", *given)
    records = [read_wave(path)[1] for path in sorted((tmp_path / "few").glob("wave-*"))]
    assert [one["temperature"] for one in records] == [0.0, 0.4]
