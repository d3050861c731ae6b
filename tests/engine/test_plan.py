"""A plan's description of its run, which needs neither weights nor a GPU."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_cli.engine.build import warm_up_lengths
from specdec_cli.engine.plan import Plan, compiled_roles, plan
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.tokenizer import ByteTokenizer, is_same_tokenizer
from specdec_cli.recipe import load_recipe
from tests.cli.generate_helpers import tiny_model
from tests.support import save_tiny

SWITCHES = ("run.compile", "run.cuda_graphs")


def tiny_plan(folder: Path, target: str = "llama", draft: str = "llama", **overrides: Any) -> Plan:
    """A plan as it would be on a GPU."""
    models = {
        f"{role}.model": str(save_tiny(folder / role, family))
        for role, family in (("target", target), ("draft", draft))
    }
    dummy = {f"{role}.load_format": "dummy" for role in ("target", "draft")}
    keys = {key.replace("__", "."): value for key, value in overrides.items()}
    sets = {**models, **dummy, **keys}
    checked = plan(
        load_recipe(None, sets | {"run.device": "cpu", **dict.fromkeys(SWITCHES, "auto")})
    )
    found = replace(checked, recipe=load_recipe(None, sets), device=torch.device("cuda", 0))
    return replace(found, compiled=compiled_roles(found))


def test_fused_layers_are_not_compiled(tmp_path: Path) -> None:
    found = tiny_plan(tmp_path)
    assert found.execution == {
        "compile": "off: layers are fused instead",
        "cuda_graphs": "on: one graph a round",
    }
    assert found.stages == [
        "loading the target",
        "loading the draft",
        "compiling kernels and capturing rounds",
    ]


def test_families_without_fused_layers_are_compiled(tmp_path: Path) -> None:
    found = tiny_plan(tmp_path, target="olmo2")
    assert found.execution["compile"] == "on: target"
    assert found.stages.count("compiling the target") == 1


def test_compile_on_means_every_model(tmp_path: Path) -> None:
    found = tiny_plan(tmp_path, run__compile="on", run__cuda_graphs="on")
    assert found.execution["compile"] == "on: target, draft"
    assert found.stages.count("compiling the draft") == 2


@pytest.mark.parametrize("what", ["compile", "cuda_graphs"])
def test_off_is_off(what: str, tmp_path: Path) -> None:
    found = tiny_plan(tmp_path, target="olmo2", **{f"run__{what}": "off"})
    assert found.execution[what] == "off: as asked" and not found.compiled


def test_experts_are_captured_in_bfloat16_only(tmp_path: Path) -> None:
    found = tiny_plan(tmp_path, target="mixtral", target__dtype="float16")
    assert found.execution["cuda_graphs"] == "off: experts of the target are not in bfloat16"
    assert not found.compiled
    for family, compiled in {"mixtral": (), "granitemoe": ("target",)}.items():
        found = tiny_plan(tmp_path / family, target=family, target__dtype="bfloat16")
        assert found.no_cuda_graphs is None and found.compiled == compiled


def test_ngram_rounds_are_captured_too(tmp_path: Path) -> None:
    found = tiny_plan(tmp_path, speculation__method="ngram")
    assert found.execution["cuda_graphs"] == "on: one graph a round"
    found = tiny_plan(tmp_path, speculation__method="ngram", run__cuda_graphs="off")
    assert found.execution["cuda_graphs"] == "off: as asked"


def test_what_is_compiled_needs_graphs(tmp_path: Path) -> None:
    found = tiny_plan(tmp_path, target="olmo2", run__cuda_graphs="off")
    assert found.execution["compile"] == "off: run.cuda_graphs is off"
    assert found.no_compile == "run.cuda_graphs is off", "which is why it cannot be asked for"


@pytest.mark.parametrize("what", ["compile", "cuda_graphs"])
def test_what_cannot_be_had_is_refused(what: str, tmp_path: Path) -> None:
    model = str(save_tiny(tmp_path, "llama"))
    sets = {"target.model": model, "draft.model": model, "run.device": "cpu", f"run.{what}": "on"}
    dummy = {"target.load_format": "dummy", "draft.load_format": "dummy"}
    for more in ({}, {"run.cuda_graphs": "off"} if what == "compile" else {}):
        with pytest.raises(UsageError, match=f"run.{what}: on is impossible: the device is a CPU"):
            plan(load_recipe(None, sets | dummy | more))


def test_a_rank_needs_a_process_and_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = {"target.model": "demo:target", "run.device": "cpu"}
    split = load_recipe(None, sets | {"target.tensor_parallel_size": 2})
    with pytest.raises(UsageError, match="tensor_parallel_size is 2, but 1 process is running"):
        plan(split)
    monkeypatch.setattr("specdec_cli.engine.devices.world_size", lambda: 2)
    named = load_recipe(None, sets | {"target.tensor_parallel_size": 2, "run.device": "cuda:0"})
    with pytest.raises(UsageError, match="cuda:0 is a single device, but each of the 2 ranks"):
        plan(named)


def test_no_text_is_longer_than_the_model_allows() -> None:
    for wanted, found in ((None, 2048), (100, 100), (2048, 2048)):
        sets = {"cache.max_model_len": wanted, "run.device": "cpu"}
        assert plan(load_recipe("demo", sets)).max_model_len == found
    with pytest.raises(UsageError, match=r"^cache.max_model_len: 2049 exceeds .* of 2048 tok"):
        plan(load_recipe("demo", {"cache.max_model_len": 2049, "run.device": "cpu"}))


def test_rotary_tables_reach_as_far_as_texts() -> None:
    """Two of a head's width for each position, in a fused form alone."""
    sets = {"target.model": "demo:target", "run.device": "cpu", "cache.max_model_len": 300}
    target = plan(load_recipe(None, sets)).target
    width = target.layers[0].key_dim * target.dtype.itemsize
    bytes_of = {n: target.within(n).loaded_bytes(is_compiled=False) for n in (0, 300)}
    assert bytes_of[300] - bytes_of[0] == 2 * 300 * width
    assert target.reach == 300 and target.loaded_bytes(is_compiled=False) == bytes_of[300]
    assert target.loaded_bytes(is_compiled=True) == target.weight_bytes


def test_plain_decoding_proposes_nothing() -> None:
    found = plan(load_recipe(None, {"target.model": "demo:target", "run.device": "cpu"}))
    assert (found.k, found.recipe.proposer) == (0, None)


def test_a_rule_is_remarked_on_where_it_changes_text() -> None:
    """Given rates are drawn in greedy decoding too, and typical acceptance then keeps the text."""
    given = {"speculation.synthetic_acceptance_length": 2.0}
    for rule, more, temperature, is_told in (
        ("synthetic", given, 0.0, True),
        ("typical", {}, 1.0, True),
        ("typical", {}, 0.0, False),
        ("rejection", {}, 1.0, False),
    ):
        sets = {"run.device": "cpu", "speculation.acceptance": rule, **more}
        found = plan(load_recipe("demo", sets | {"sampling.temperature": temperature}))
        assert (found.remark is not None) == is_told


def test_a_config_alone_takes_the_targets_tokenizer(tmp_path: Path) -> None:
    target = tiny_model(tmp_path / "target")
    draft = save_tiny(tmp_path / "draft", "llama")
    sets = {"target.model": str(target), "draft.model": str(draft), "run.device": "cpu"}
    with pytest.raises(SetupError, match=r"cannot load the tokenizer of .*draft: there is none"):
        plan(load_recipe(None, sets))
    found = plan(load_recipe(None, sets | {"draft.load_format": "dummy"}))
    assert found.draft is not None and found.tokenizer.vocabulary()["w3"] == 3
    small = save_tiny(tmp_path / "small", "llama", vocab_size=50)
    sets |= {"draft.model": str(small), "draft.load_format": "dummy"}
    with pytest.raises(SetupError, match=r"has 50 ids, but target .* has more"):
        plan(load_recipe(None, sets))


def test_one_prompt_warms_up_passes_of_one_width(tmp_path: Path) -> None:
    for family, overrides, longest, lengths in (
        ("llama", {}, 47, [47]),
        ("llama", {}, 64, [64]),
        ("llama", {}, 65, [33, 65]),
        ("llama", {}, 20, [20, 33]),
        ("llama", {}, 5000, [33, 2049]),  # a chunk is no longer
        ("llama", {"speculation__num_speculative_tokens": 3}, 20, [33]),  # the last is not fed
        ("llama", {"speculation__num_speculative_tokens": 3}, 47, [33, 47]),
        ("llama", {"run__cuda_graphs": "off"}, 47, [33, 47]),
        ("gpt2", {}, 47, [33, 47]),  # has no fused form
    ):
        sets = {"speculation__num_speculative_tokens": 0} | overrides
        found = tiny_plan(tmp_path / f"{family}{longest}{len(overrides)}", family, **sets)
        assert warm_up_lengths(found, longest) == lengths, (family, overrides, longest)


def test_the_same_tokenizer_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that differs or is missing, even one without a vocabulary, causes another reading."""
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
    folders = [tmp_path / "target", tmp_path / "draft"]
    for folder in folders:
        save_tiny(folder, "llama")
        for name in names:
            (folder / name).write_text("{}")
    read: list[str] = []

    def note(place: Path, *_: object) -> ByteTokenizer:
        read.append(place.name)
        return ByteTokenizer(97)

    monkeypatch.setattr("specdec_cli.engine.pairing.load_tokenizer", note)
    models = dict(zip(("target.model", "draft.model"), map(str, folders), strict=True))
    recipe = load_recipe(None, models | {"run.device": "cpu"})
    for name in (None, *names):
        read.clear()
        if name is not None:
            (folders[1] / name).write_text("{ }")
        plan(recipe)
        assert read == (["target"] if name is None else ["target", "draft"])
        if name is not None:
            (folders[1] / name).write_text("{}")
    (folders[1] / names[2]).unlink()
    assert not is_same_tokenizer(*folders)
