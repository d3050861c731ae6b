"""EAGLE-3 heads through the command line: naming the folder is enough."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec_cli.report.folder import read_folder
from tests.cli.generate_helpers import Result
from tests.cli.sweep_helpers import specdec
from tests.eagle3 import Head, save_head

SIZES: dict[str, Any] = {
    "hidden": 256,
    "target_hidden": 256,
    "vocab": 4096,
    "draft_vocab": 700,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 32,
    "inner": 192,
    "outputs": (1, 3, 5),
}
QUICK = ["--device", "cpu", "--max-new-tokens", "12", "--limit", "3"]


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for the demo target, which lends it the embedding."""
    folder = tmp_path_factory.mktemp("head")
    lent = ("embed_tokens.weight",)
    return save_head(folder, Head(**SIZES), "model-optimizer", without=lent)


def texts(result: Result) -> list[str]:
    assert result.code == 0, result.err
    return [output["text"] for output in result.outputs]


def test_generate(head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    options = [*QUICK, "--draft", head, "-k", "3", "--json", "-o", folder]
    found = specdec(capsys, "generate", "demo", *options)
    plain = specdec(capsys, "generate", "demo", *QUICK, "-k", "0", "--json")
    assert texts(found) == texts(plain)
    document = found.document
    assert document["recipe"]["speculation"]["method"] == "eagle3"
    assert document["metrics"]["num_draft_tokens"] > 30
    told = document["environment"]
    assert told["draft_features"] == "hidden states 2, 4, 6 of the target"
    assert told["draft_borrows"] == "embed_tokens.weight"
    assert "read as outputs of layers" in told["draft_conventions"]
    assert "read as outputs of layers" in found.err
    again = specdec(capsys, "generate", folder / "recipe.yaml", "--device", "cpu", "--json")
    assert texts(again) == texts(found)
    drafted = specdec(
        capsys, "generate", folder / "recipe.yaml", *QUICK, "--draft", "demo:draft", "--json"
    )
    assert texts(drafted) == texts(plain)
    assert drafted.document["recipe"]["speculation"]["method"] == "draft_model"


def test_a_pickled_head(head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It proposes what it does from safetensors; without the option it is refused."""
    folder = tmp_path / "pickled"
    shutil.copytree(head, folder)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    sets = [*QUICK, "-k", "3", "--json"]
    refused = specdec(capsys, "generate", "demo", *sets, "--draft", folder)
    assert refused.code == 5 and not refused.document.get("outputs")
    error = refused.document["error"]
    told = "has pickled weights only (pytorch_model.bin), which can run code"
    assert error["message"] == f"{folder} {told}"
    assert "--allow-pickle" in error["hint"]
    found = specdec(capsys, "generate", "demo", *sets, "--draft", folder, "--allow-pickle")
    plain = specdec(capsys, "generate", "demo", *sets, "--draft", head)
    assert texts(found) == texts(plain)
    names = ("num_rounds", "num_draft_tokens", "num_accepted_tokens")
    counts = [{n: d.document["metrics"].get(n) for n in names} for d in (found, plain)]
    assert counts[0] == counts[1] and counts[0]["num_draft_tokens"] > 30


def test_the_recipe_s_layers(
    head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = "speculation.eagle3_layers"
    options = [*QUICK, "--draft", head, "-k", "3", "--json"]
    plain = specdec(capsys, "generate", "demo", *QUICK, "-k", "0", "--json")
    found = specdec(capsys, "generate", "demo", *options, "--set", f"{key}=[1, 4, 7]")
    assert texts(found) == texts(plain)
    assert found.document["recipe"]["speculation"]["eagle3_layers"] == [1, 4, 7]
    told = found.document["environment"]
    assert told["draft_features"] == "hidden states 1, 4, 7 of the target"
    assert "which names [1, 3, 5] as outputs of layers" in told["draft_conventions"]
    assert f"{key}: in place of the config's" in found.err
    counted = ["--set", "speculation.eagle3_counting=inputs"]
    read = specdec(capsys, "generate", "demo", *options, *counted).document["environment"]
    assert read["draft_features"] == "hidden states 1, 3, 5 of the target"
    for wrong in ("[1, 4]", "[1, 4, 8]", "[4, 1, 7]"):
        refused = specdec(capsys, "generate", "demo", *options, "--set", f"{key}={wrong}")
        assert refused.code == 2
        message = refused.document["error"]["message"]
        assert key in message and "\n" not in message


def test_synthetic_acceptance(head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = ["--set", "speculation.acceptance=synthetic"]
    rates += ["--set", "speculation.synthetic_acceptance_rates=[1.0, 1.0, 0.0]"]
    found = specdec(
        capsys, "generate", "demo", *QUICK, "--draft", head, "-k", "3", "--json", *rates
    )
    assert found.code == 0
    per_position = found.document["metrics"]["acceptance_rate_per_pos"]
    assert per_position[0] > 0.9 and per_position[2] == 0.0


@pytest.mark.parametrize("mode", [(), ("--estimate",)], ids=["measured", "estimated"])
def test_profile_blocks(
    mode: tuple[str, ...], head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--set", "cache.cpu_bytes=4000000", "--set", "cache.max_model_len=256")
    found = specdec(
        capsys,
        "profile-blocks",
        "demo",
        "--draft",
        head,
        "--device",
        "cpu",
        *small,
        "--json",
        *mode,
    )
    assert found.code == 0, found.err
    (rank,) = found.document["ranks"]
    # Two heads of 32, keys and values of 16 tokens, and a vector of 256.
    assert rank["draft_block_bytes"] == (2 * 2 * 32 * 16 + 256) * 4
    own = sum(t.numel() for n, t in Head(**SIZES).tensors.items() if n != "embed_tokens.weight")
    least = 4 * (own + 2 * 256 * 32)
    assert least <= rank["draft_weight_bytes"] < 2.2 * least  # a CPU may hold two forms
    assert found.document["draft_cost"]["by_draft_tp"][0]["status"] == "ok"


@pytest.mark.usefixtures("no_pictures")
def test_a_sweep_over_kinds_of_drafts(
    head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    drafts = ["--draft", "demo:draft", "--draft", head, "--draft", "ngram"]
    once = ["--set", "run.warmup=0", "--set", "run.repeats=1"]
    sweep = ["sweep-k", "demo", *QUICK, *once, *drafts, "--k", "0,2", "--json", "-o", folder]
    found = specdec(capsys, *sweep)
    assert found.code == 0, found.err
    document = found.document
    assert [(p["draft"], p["k"], p["status"]) for p in document["points"]] == [
        (None, 0, "ok"),
        *((name, 2, "ok") for name in ("demo:draft", str(head), "ngram")),
    ]
    assert document["tokens"]["identical"] is True
    told = document["environment"]["drafts"]
    assert "read as outputs of layers" in told[str(head)].pop("draft_conventions")
    assert told == {
        "demo:draft": {},
        "ngram": {},
        str(head): {
            "draft_features": "hidden states 2, 4, 6 of the target",
            "draft_borrows": "embed_tokens.weight",
        },
    }
    sections = document["sweep"]["recipe"]["drafts"]
    assert [s and s.get("method") for s in sections] == [None, "eagle3", None]
    again = specdec(capsys, *sweep, "--resume")
    assert again.code == 0 and again.document["points"] == document["points"]
    run = read_folder(folder)
    assert run.method_of(str(head)) == "eagle3"
    assert run.method_of("demo:draft") == "draft_model"


WRONG: dict[str, tuple[list[str], str]] = {
    "a head as a model": (
        ["--draft", "HEAD", "--set", "speculation.method=draft_model"],
        "speculation.method is draft_model, but the draft HEAD is an EAGLE-3 head",
    ),
    "a model as a head": (
        ["--set", "speculation.method=eagle3"],
        "speculation.method is eagle3, but the draft demo:draft is no EAGLE-3 head",
    ),
    "no draft": (
        ["--set", "speculation.method=eagle3", "--set", "draft=null"],
        "speculation.method: eagle3 needs a draft section, but draft is null",
    ),
    "shared": (
        ["--draft", "HEAD", "--set", "draft.share=[lm_head]"],
        "draft.share: lm_head: HEAD already borrows the weights that it lacks",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_one_line(
    case: str, head: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options, told = WRONG[case]
    options = [str(head) if option == "HEAD" else option for option in options]
    found = specdec(capsys, "generate", "demo", *QUICK, "--json", *options)
    assert found.code == 2
    message = found.document["error"]["message"]
    assert told.replace("HEAD", str(head)) in message and "\n" not in message


def test_the_default_lengths_of_a_sweep_end_where_a_draft_s_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """demo:dflash proposes a block of 7, and demo:draft any number."""
    line = ["sweep-k", "demo", "--draft", "demo:dflash", "--draft", "demo:draft", "--dry-run"]
    line += ["--pairs"]
    found = specdec(capsys, *line, "--device", "cpu", "--json")
    assert found.code == 0 and found.document["sweep"]["ks"] == list(range(8))
    assert "k goes up to 7 by default: the draft demo:dflash proposes at most 7 tok" in found.err
    assert "--pairs" not in found.err
    typed = specdec(capsys, *line, "--device", "cpu", "--k", "2,8")
    assert typed.code == 2 and "(-k) is 8: " in typed.err and "by default" not in typed.err
