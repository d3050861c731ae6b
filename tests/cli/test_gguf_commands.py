"""Commands on models in GGUF files: text, the record of a run, estimates, faults in one line."""

import json
from pathlib import Path

import pytest

from specdec_cli.app import main
from tests.engine.test_gguf_places import vocabulary
from tests.gguf_files import TYPES, gguf_reference, save_gguf, tiny_model
from tests.support import greedy_reference

CPU = ("--device", "cpu")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = vocabulary() | {"llama.vocab_size": None}
    model = tiny_model("llama", vocab_size=len(values["tokenizer.ggml.tokens"]))
    place = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return save_gguf(place, "llama", model, TYPES.Q4_0, more=values)


@pytest.mark.parametrize("options", [(), ("--draft", "itself", "-k", "3")], ids=["plain", "draft"])
def test_generate(options: tuple[str, ...], file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = tuple(str(file) if word == "itself" else word for word in options)
    command = ["generate", "--target", str(file), *options, *CPU, "--prompt", "hello w"]
    assert main([*command, "--max-new-tokens", "12", "--ignore-eos", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (output,) = document["outputs"]
    want = greedy_reference(gguf_reference(file), output["prompt_token_ids"], 12)
    assert output["token_ids"] == want
    how = document["environment"]
    assert how["target_weights"] == "dequantised from GGUF (Q4_0, F32)"
    assert document["recipe"]["target"]["model"] == str(file)
    if options:
        assert document["metrics"]["mean_acceptance_length"] == 4.0, "the draft is the target"


def test_an_estimate_counts_plain_numbers(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["profile-blocks", "--target", str(file), "-k", "0", *CPU, "--estimate", "--json"]
    assert main([*command, "--dtype", "bfloat16"]) == 0
    (rank,) = json.loads(capsys.readouterr().out)["ranks"]
    count = sum(p.numel() for p in tiny_model("llama", vocab_size=264).parameters())
    assert count * 2 <= rank["target_weight_bytes"] < count * 4


@pytest.mark.parametrize("kept", [0.0, 0.1, 0.9])
def test_a_cut_file_is_one_line(
    kept: float, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.gguf"
    content = file.read_bytes()
    cut.write_bytes(content[: int(kept * len(content))])
    assert main(["generate", "--target", str(cut), *CPU, "--prompt", "hello"]) == 5
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 2 and said[0].startswith(f"error: cannot read the GGUF file {cut}: ")
    assert said[1].startswith("hint: ")


def test_the_key_file_is_checked(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", "--target", str(file.parent), *CPU, "--prompt", "hello"]
    assert main([*command, "--set", "target.file=../m.gguf"]) == 2
    assert "target.file" in capsys.readouterr().err
    assert main([*command, "--set", "target.file=other.gguf"]) == 5
    assert "no file other.gguf" in capsys.readouterr().err
