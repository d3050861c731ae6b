"""Models that `store` writes in each form, and the table of runs over them."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scripts.speculators import quantised, store
from specdec_cli.models.held import plain_weight
from specdec_cli.models.loader import load
from specdec_cli.models.stored import stored_parameters
from tests.engine.test_formats import described
from tests.gguf_files import TYPES, save_gguf, tiny_model
from tests.support import CPU, save_tiny


@pytest.mark.parametrize(("form", "largest"), [("plain", 0.0), ("fp8", 1 / 25), ("int4", 1 / 8)])
def test_a_form_is_near_the_numbers(
    form: str, largest: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The readers' numbers, and what a form stores of a form: the same once more, or less."""
    source = save_tiny(tmp_path / "source", "llama")
    given = ["store", str(source), str(tmp_path / "one"), "--form", form]
    monkeypatch.setattr(sys, "argv", given)
    store.main()
    monkeypatch.setattr(sys, "argv", ["store", given[2], str(tmp_path / "two"), "--form", "plain"])
    store.main()
    want = dict(load(described(source, "auto"), CPU).named_parameters())
    one = load(described(tmp_path / "one", "auto" if form == "plain" else "stored"), CPU)
    two = dict(load(described(tmp_path / "two", "auto"), CPU).named_parameters())
    assert len(stored_parameters(one)) == (0 if form == "plain" else 14)
    for name, parameter in one.named_parameters():
        found = plain_weight(parameter)
        assert torch.equal(found.bfloat16(), two[name].bfloat16()), name
        if "_proj" not in name:
            assert torch.equal(found, want[name]), name
            continue
        errors = (found - want[name]).abs()
        assert errors.mean() <= largest * want[name].abs().mean(), name
        assert bool(errors.any()) is (form != "plain")


def test_a_file_is_written_as_a_folder_that_names_its_class(tmp_path: Path) -> None:
    model = tiny_model("llama")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    file = save_gguf(tmp_path / "m.gguf", "llama", model, TYPES.F32)
    tensors, config = store.plain_tensors(file)
    store.write(tmp_path / "folder", "plain", tensors, config)
    assert json.loads((tmp_path / "folder" / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLM"
    ]
    found = type(model).from_pretrained(tmp_path / "folder", dtype=torch.float32)
    ids = torch.arange(1, 12)[None]
    assert torch.allclose(found(ids).logits, model(ids).logits, atol=1e-4)


def test_scales_of_four_bits_have_the_least_error() -> None:
    numbers = torch.randn(8, 64, generator=torch.Generator().manual_seed(2))
    parts = store.in_int4(numbers)
    words = parts["weight_packed"].long() & 0xFFFFFFFF
    codes = torch.stack([words >> 4 * i & 15 for i in range(8)], -1).flatten(-2) - 8
    scales = parts["weight_scale"].float().repeat_interleave(32, 1)
    error = (codes * scales - numbers).square().sum()
    usual = numbers.unflatten(-1, (-1, 32)).abs().amax(-1) / 7
    usual = usual.repeat_interleave(32, 1)
    plainly = ((numbers / usual).round() * usual - numbers).square().sum()
    assert 0.3 * plainly < error < 0.97 * plainly


def test_runs_are_set_beside_both_as_they_were(tmp_path: Path) -> None:
    counts = {
        "plain": {"a/head": [[20, 10]] * 9, "ngram": [[30, 20]] * 9},
        "int4": {"a/head": [[18, 10]] * 9, "b/head-fp8": [[10 + i, 10] for i in range(9)]},
    }
    for target, runs in counts.items():
        told = {name: [{"k": 4, "counts": found}] for name, found in runs.items()}
        (tmp_path / f"{target}.json").write_text(json.dumps({"runs": told}))
    runs = quantised.runs_of([tmp_path / f"{target}.json" for target in counts])
    head, other, both, ngram = quantised.lines(runs)[2:]
    assert head == "| head | 4 | plain | plain | 2.00 |  |"
    assert other == "| head | 4 | int4 | plain | 1.80 | 0.900 |"
    assert both.startswith("| head | 4 | int4 | fp8 | 1.40 (") and "| 0.700 (0." in both
    assert ngram == "| ngram | 4 | plain | plain | 1.50 |  |"
    runs["int4", "ngram", "plain", 4] = quantised.SumRatio(torch.ones(5, 2).numpy(), (1, -1))
    with pytest.raises(ValueError, match="ngram at k = 4 ran on other prompts over plain"):
        quantised.lines(runs)


def test_two_runs_of_one_name_are_refused(tmp_path: Path) -> None:
    """train.py calls each of its folders `speculator`, and folders may have files of one name."""
    run = [{"k": 4, "counts": [[20, 10]] * 9}]
    both = {"HEAD/speculator": run, "DRAFT/speculator": [{**run[0], "k": 2}]}
    file, other = tmp_path / "plain.json", tmp_path / "other" / "plain.json"
    file.write_text(json.dumps({"runs": both}))
    told = f"HEAD/speculator in {file} and DRAFT/speculator in {file} have one name"
    with pytest.raises(ValueError, match=told):
        quantised.runs_of([file])
    other.parent.mkdir()
    for one in (file, other):
        one.write_text(json.dumps({"runs": {"ngram": run}}))
    with pytest.raises(ValueError, match=f"ngram in {file} and ngram in {other} have one name"):
        quantised.runs_of([file, other])


def test_a_model_is_not_written_over_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_tiny(tmp_path / "source", "llama")
    before = {file.name: file.read_bytes() for file in source.iterdir()}
    other = tmp_path / "other"
    other.symlink_to(source)
    for out in (source, other, tmp_path / "x" / ".." / "source"):
        monkeypatch.setattr(sys, "argv", ["store", str(source), str(out)])
        with pytest.raises(ValueError, match="holds the model: name another folder"):
            store.main()
    assert {file.name: file.read_bytes() for file in source.iterdir()} == before


@pytest.mark.parametrize(
    ("family", "plain"),
    [
        ("llama", {"model.embed_tokens", "lm_head"}),
        ("gpt_neox", {"gpt_neox.embed_in", "embed_out", "lm_head"}),
        ("gpt2", {"transformer.wte", "transformer.wpe", "lm_head"}),
    ],
)
def test_embeddings_and_heads_stay_plain(family: str, plain: set[str], tmp_path: Path) -> None:
    """Readers quantise every matrix that the config does not name."""
    tensors, config = store.plain_tensors(save_tiny(tmp_path / "source", family))
    store.write(tmp_path / "stored", "fp8", tensors, config)
    stored = load_file(tmp_path / "stored" / "model.safetensors")
    settings = json.loads((tmp_path / "stored" / "config.json").read_text())["quantization_config"]
    matrices = {name.removesuffix(".weight") for name, t in tensors.items() if t.dim() == 2}
    scaled = {name.removesuffix(".weight_scale") for name in stored if name.endswith("_scale")}
    assert set(settings["ignore"]) == plain and scaled
    assert scaled == matrices - plain
