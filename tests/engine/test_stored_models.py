"""Models whose weights stay as stored, beside the same models with plain numbers in their place."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_cli.core.parallel import TensorParallel
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.pairing import check_shared
from specdec_cli.errors import ExitCode, SetupError, UsageError
from specdec_cli.experiment.duration import _shape_of
from specdec_cli.models.description import Description, describe
from specdec_cli.models.fused import bytes_held_twice
from specdec_cli.models.held import plain_weight
from specdec_cli.models.loader import load
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.stored import part_of, stored_parameters
from tests.stored_kind import dequantise, known, store
from tests.support import (
    CPU,
    decode,
    description,
    greedy_reference,
    make_engine,
    paged_model,
    reference,
    save_tiny,
)

PROMPT = [5, 17, 31, 60, 8]
GROUP = (16, 32)
SPEC = ModelSpec("target", "", None, "float32", "auto", weights="stored")


@pytest.fixture(autouse=True)
def kind() -> Iterator[None]:
    with known():
        yield


def described(folder: Path, parallel: TensorParallel | None = None, **changes: Any) -> Description:
    spec = replace(SPEC, name=str(folder), **changes)
    return describe(spec, CPU, *([] if parallel is None else [parallel]))


def pair(
    folder: Path, family: str, group: tuple[int, int] = GROUP, plain: tuple[str, ...] = (), **c: Any
) -> tuple[Path, Path]:
    """A model that is stored, and the same one with plain numbers."""
    kept = save_tiny(folder / "stored", family, **c)
    assert len(store(kept, group, plain)) >= 6
    numbers = Path(shutil.copytree(kept, folder / "plain"))
    dequantise(numbers)
    return kept, numbers


def engine(target: Path, draft: Path | None = None) -> Engine:
    return make_engine(target, draft, weights="stored" if target.name == "stored" else "auto")


FAMILIES: list[tuple[str, tuple[int, int], dict[str, Any]]] = [
    ("llama", (1, 0), {}),
    ("llama-tied", GROUP, {}),
    ("qwen3", (1, 32), {}),
    ("gemma2", GROUP, {}),
    # q, k and v end within a group of rows.
    ("llama", (24, 32), {}),
    ("qwen3_moe", (1, 0), {"mlp_only_layers": [0]}),
    ("mixtral", GROUP, {}),
    ("glm4_moe", (1, 32), {"use_qk_norm": True}),
]


@pytest.mark.parametrize(("family", "group", "changes"), FAMILIES, ids=str)
def test_texts_equal_those_of_plain_numbers(
    family: str, group: tuple[int, int], changes: dict[str, Any], tmp_path: Path
) -> None:
    kept, numbers = pair(tmp_path, family, group, **changes)
    module = described(kept).module
    stored = stored_parameters(module)
    assert ("lm_head.weight" in stored) != module.config.tie_word_embeddings
    assert not any("embed" in name or "norm" in name or "gate.weight" in name for name in stored)
    texts = []
    for folder in (kept, numbers):
        [seq] = decode(
            engine(folder),
            [PROMPT],
            0,
            max_new_tokens=24,
            temperature=1.0,
        )
        texts.append(seq.tokens)
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 6, "any weights would do"


def test_a_stored_target_with_a_stored_draft(tmp_path: Path) -> None:
    kept, numbers = pair(tmp_path, "llama")
    texts = [
        decode(engine(target, draft), [PROMPT, [9, 8]], 3, max_new_tokens=20)
        for target, draft in ((kept, kept), (numbers, numbers))
    ]
    for ours, theirs in zip(*texts, strict=True):
        assert ours.tokens == theirs.tokens


@pytest.mark.parametrize("family", ["llama", "llama-tied", "mixtral"])
def test_bytes_are_those_of_codes_and_scales(family: str, tmp_path: Path) -> None:
    """Bytes on meta equal those that are held, and nothing is held twice."""
    kept, numbers = pair(tmp_path, family)
    about = described(kept)
    want = sum(t.nbytes for t in load_file(kept / "model.safetensors").values())
    assert about.weight_bytes == want < description(numbers).weight_bytes / 2
    module = load(about, CPU)
    held = [p.value for p in stored_parameters(module).values()]
    assert all(value is not None for value in held)
    sizes = [p.untyped_storage().nbytes() for p in stored_parameters(module).values()]
    assert max(sizes) <= 4, "a stored parameter has no numbers of its own"
    model = paged_model(kept, 60, 8, fused=True, weights="stored")
    assert bytes_held_twice(about.module) == 0
    tables = 2 * model.fused.cos.nbytes
    merged = model.fused.storages
    for name, before in stored_parameters(module).items():
        after = stored_parameters(model.module)[name].value
        assert before.value is not None and after is not None
        assert torch.equal(after.plain(torch.float32), before.value.plain(torch.float32)), name
        assert all(t.untyped_storage().data_ptr() in merged for t in after.tensors), "held twice"
    # A number a stored parameter stands for those that it does not have.
    assert 0 <= sum(model.storages.values()) - want - tables < 1000


def test_a_part_of_the_modules_stays_plain(tmp_path: Path) -> None:
    kept, numbers = pair(tmp_path, "llama", plain=("lm_head", "self_attn"))
    names = set(stored_parameters(described(kept).module))
    assert names and all(".mlp." in name for name in names)
    texts = [
        decode(engine(folder), [PROMPT], 0, max_new_tokens=20)[0].tokens
        for folder in (kept, numbers)
    ]
    assert texts[0] == texts[1]


def test_products_that_are_merged_have_one_storage(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, "llama")
    store(folder, GROUP, plain=("k_proj",))
    with pytest.raises(SetupError) as caught:
        described(folder)
    told = "model.layers.0.self_attn.q_proj.weight and model.layers.0.self_attn.k_proj.weight"
    assert told in caught.value.message


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_moe"])
@pytest.mark.parametrize("group", [(1, 0), GROUP], ids=str)
def test_ranks_hold_their_parts(family: str, group: tuple[int, int], tmp_path: Path) -> None:
    wide = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    folder = save_tiny(tmp_path, family, **wide)
    store(folder, group, plain=("lm_head",) if group == GROUP else ())
    whole = stored_parameters(load(described(folder), CPU))
    for rank in range(2):
        about = described(folder, TensorParallel(rank, 2, None, CPU))
        parts = about.shards.parts
        assert {n.rpartition(".")[0][-6:] for n in parts} > {"q_proj", "o_proj"}
        found = stored_parameters(load(about, CPU))
        assert found.keys() == whole.keys()
        for name, parameter in found.items():
            ours, theirs = parameter.value, whole[name].value
            assert ours is not None and theirs is not None
            plain = theirs.plain(torch.float32)
            if name in parts:
                assert torch.equal(part_of(theirs, whole[name], parts[name]).codes, ours.codes)
                plain = parts[name].of(plain)
            assert torch.equal(ours.plain(torch.float32), plain), name
        assert about.weight_bytes < described(folder).weight_bytes


@pytest.mark.parametrize(
    ("family", "group", "told"),
    [
        ("llama", (48, 0), "q_proj.weight of {} cannot be split over ranks at rows 0 and 32 of 64"),
        ("llama", (1, 48), "o_proj.weight of {} cannot be split over ranks at columns 0 and 32"),
        ("mixtral", (48, 0), "q_proj.weight of {} cannot be split over ranks at rows 0 and 32"),
    ],
)
def test_a_split_through_a_group_is_refused_by_name(
    family: str, group: tuple[int, int], told: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, family)
    store(folder, group)
    with pytest.raises(SetupError) as caught:
        described(folder, TensorParallel(0, 2, None, CPU))
    assert told.format(folder) in caught.value.message and "share a scale" in caught.value.message


NAMED = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("field", "change", "told"),
    [
        (
            "_scale",
            lambda t: t[:-1],
            "scales of shape [7, 2]; with blocks of 16 x 32 they should have shape [8, 2]",
        ),
        ("", lambda t: t[:, :-1].clone(), "has shape [128, 62]"),
        ("", lambda t: t.char(), "is int8 of [128, 32], but its scales are for a matrix of int16"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_fields_that_do_not_fit_are_refused_by_name(
    field: str, change: Any, told: str, size: int, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "llama")
    store(folder, GROUP, plain=("lm_head",))
    tensors = load_file(folder / "model.safetensors")
    changed = change(tensors.pop(f"{NAMED}{field}"))
    tensors |= {} if changed is None else {f"{NAMED}{field}": changed}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SetupError) as caught:
        load(described(folder, TensorParallel(0, size, None, CPU)), CPU)
    assert caught.value.code == ExitCode.ENVIRONMENT
    assert f"{NAMED} of {folder} " in caught.value.message
    assert told in caught.value.message


def test_dummy_weights_are_stored_too(tmp_path: Path) -> None:
    """Each rank has its part of the same weights, even if that cuts columns that share a scale."""
    folder = save_tiny(tmp_path, "llama")
    store(folder, (1, 0))
    whole = stored_parameters(load(described(folder, load_format="dummy"), CPU))
    assert len(whole) == 14
    for rank in range(2):
        about = described(folder, TensorParallel(rank, 2, None, CPU), load_format="dummy")
        for name, parameter in stored_parameters(load(about, CPU)).items():
            ours, theirs = parameter.value, whole[name].value
            assert ours is not None and theirs is not None
            plain = theirs.plain(torch.float32)
            plain = about.shards.parts[name].of(plain) if name in about.shards.parts else plain
            assert torch.equal(ours.plain(torch.float32), plain) and plain.std() > 0.1


def test_what_cannot_stay_stored_is_dequantised_or_refused(tmp_path: Path) -> None:
    """Layers of other families read plain weights alone, and plain weights have no other form."""
    other = save_tiny(tmp_path / "phi3", "phi3")
    store(other, (1, 0))
    plain = save_tiny(tmp_path / "llama", "llama")
    assert not stored_parameters(description(other).module)
    for folder, reason in ((other, "layers of phi3 read plain"), (plain, "are not quantised")):
        with pytest.raises(UsageError, match=rf"target\.weights: stored does not suit .*{reason}"):
            described(folder)


@pytest.mark.parametrize(
    ("features", "group", "told"),
    [
        # Gate ends inside a group: groups of the joined matrix would begin at other rows of up.
        (28, (16, 4), "gate_up_proj of {} has matrices of 28 rows"),
        (24, (16, 4), "gate_up_proj of {} has matrices of 24 rows"),
        (48, (24, 16), "down_proj of {} has matrices of 64 rows"),
    ],
)
def test_experts_that_end_inside_a_group_are_dequantised_or_refused(
    features: int, group: tuple[int, int], told: str, tmp_path: Path
) -> None:
    kept, numbers = pair(tmp_path, "qwen3_moe", group, moe_intermediate_size=features)
    with pytest.raises(SetupError) as caught:
        described(kept)
    assert told.format(kept) in caught.value.message
    auto = replace(SPEC, name=str(kept), weights="auto")
    about = describe(auto, torch.device("cuda"))
    experts = {n.rpartition(".")[2] for n in stored_parameters(about.module) if ".experts." in n}
    assert experts == {"gate_up_proj", "down_proj"} - {told.split()[0]}
    want = dict(load(description(numbers), CPU).named_parameters())
    for name, parameter in load(about, CPU).named_parameters():
        assert torch.equal(plain_weight(parameter), want[name]), name


def test_a_draft_cannot_borrow_a_stored_head(tmp_path: Path) -> None:
    kept, _ = pair(tmp_path, "llama")
    about = described(kept)
    assert check_shared(about, about, ("embeddings",)) > 0
    with pytest.raises(SetupError, match=r"draft\.share: lm_head cannot be borrowed"):
        check_shared(about, about, ("embeddings", "lm_head"))


def test_times_are_estimated_from_stored_bytes(tmp_path: Path) -> None:
    kept, numbers = pair(tmp_path, "mixtral")
    ours, theirs = _shape_of(described(kept), 1), _shape_of(description(numbers), 1)
    assert ours.parameters == pytest.approx(theirs.parameters, rel=0.05)
    assert 0.25 < ours.experts / theirs.experts < 0.27, "a byte a number, and scales"
    assert 0.25 < ours.always / theirs.always < 0.35


# float8, as people store it.

FLOAT8 = torch.float8_e4m3fn


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy} | more
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    form = {"format": "float-quantized", "ignore": ["lm_head"], "config_groups": groups}
    return {"quant_method": "compressed-tensors"} | form


FP8: list[tuple[dict[str, Any], str, tuple[int, int]]] = [
    ({"quant_method": "fp8", "weight_block_size": [16, 32]}, "_scale_inv", (16, 32)),
    ({"quant_method": "fp8", "weight_block_size": None}, "_scale_inv", (0, 0)),
    (compressed("tensor"), "_scale", (0, 0)),
    (compressed("channel"), "_scale", (1, 0)),
    (compressed("block", block_structure=[16, 8]), "_scale", (16, 8)),
]


def store_fp8(folder: Path, settings: dict[str, Any], ending: str, group: tuple[int, int]) -> Path:
    """Quantise a checkpoint in place; returns a folder with the products of codes and scales."""
    tensors = load_file(folder / "model.safetensors")
    plain = dict(tensors)
    for name in [n for n in tensors if "_proj" in n or ".experts." in n]:
        rows, columns = tensors[name].shape
        high, wide = group[0] or rows, group[1] or columns
        blocks = tensors[name].float().view(rows // high, high, columns // wide, wide)
        scales = blocks.abs().amax((1, 3)) / 448
        each = scales.repeat_interleave(high, 0).repeat_interleave(wide, 1)
        tensors[name] = (tensors[name] / each).to(FLOAT8)
        plain[name] = tensors[name].float() * each
        tensors[f"{name}{ending}"] = scales if group[0] else scales.view(1)
        tensors[f"{name.removesuffix('.weight')}.input_scale"] = torch.ones(1)
    other = Path(shutil.copytree(folder, folder.parent / "plain"))
    save_file(plain, other / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return other


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize(("settings", "ending", "group"), FP8, ids=str)
def test_float8_equals_transformers_on_its_products(
    settings: dict[str, Any], ending: str, group: tuple[int, int], family: str, tmp_path: Path
) -> None:
    """Stored and dequantised, whole and a rank's part."""
    wide = {"moe_intermediate_size": 64} if family == "qwen3_moe" else {}
    folder = save_tiny(tmp_path / "stored", family, **wide)
    other = store_fp8(folder, settings, ending, group)
    want = greedy_reference(reference(other), PROMPT, 16)
    for weights in ("stored", "dequantise"):
        [seq] = decode(make_engine(folder, None, weights=weights), [PROMPT], 0, max_new_tokens=16)
        assert seq.tokens[len(PROMPT) :] == want
    assert len(set(want)) > 3, "any weights would do"
    stored = stored_parameters(described(folder).module)
    assert len(stored) >= 10 and "lm_head.weight" not in stored
    plain = dict(load(description(other), CPU).named_parameters())
    for name, parameter in stored_parameters(load(described(folder), CPU)).items():
        assert parameter.value is not None and parameter.value.codes.dtype == FLOAT8
        assert torch.equal(parameter.value.plain(torch.float32), plain[name]), name
    about = described(folder, TensorParallel(1, 2, None, CPU))
    for name, parameter in stored_parameters(load(about, CPU)).items():
        assert parameter.value is not None
        mine = plain[name]
        if name in about.shards.parts:
            mine = about.shards.parts[name].of(mine)
        assert torch.equal(parameter.value.plain(torch.float32), mine), name


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (compressed("channel") | {"format": "nvfp4-pack"}, "format is 'nvfp4-pack'"),
        (
            compressed("channel") | {"format": "pack-quantized"},
            "config_groups.weights.type is 'float'",
        ),
        (compressed("channel", num_bits=4), "config_groups.weights.num_bits is 4"),
        (compressed("channel", type="int"), "config_groups.weights.type is 'int'"),
        (compressed("group"), "config_groups.weights.strategy is 'group'"),
        (compressed("block"), "block_structure is None"),
        (compressed("channel") | {"config_groups": []}, "config_groups is []"),
        (compressed("channel") | {"config_groups": {"a": 1}}, "config_groups is {'a': 1}"),
    ],
    ids=str,
)
def test_settings_that_are_not_understood_are_refused_by_key(
    settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    folder = save_tiny(tmp_path, "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    for weights in ("auto", "stored"):
        with pytest.raises(SetupError) as caught:
            described(folder, weights=weights)
        assert f"config.json of {folder}: quantization_config.{told}" in caught.value.message
        assert caught.value.code == ExitCode.ENVIRONMENT


@pytest.mark.parametrize("weights", ["auto", "stored", "not quantised"])
def test_a_tied_head_that_is_stored_apart_is_refused(weights: str, tmp_path: Path) -> None:
    """It would not be the embedding that the config says it is; nor are codes without scales."""
    folder = save_tiny(tmp_path / "stored", "llama-tied")
    settings, *stored = FP8[3]
    if is_quantised := weights != "not quantised":
        store_fp8(folder, settings | {"ignore": []}, *stored)
    tensors = load_file(folder / "model.safetensors")
    matrix = tensors["model.embed_tokens.weight"]
    scales = matrix.abs().amax(1, keepdim=True) / 448
    tensors |= {"lm_head.weight": (matrix / scales).to(FLOAT8)}
    tensors |= {"lm_head.weight_scale": scales} if is_quantised else {}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SetupError) as caught:
        load(described(folder, weights=weights if is_quantised else "auto"), CPU)
    assert "lm_head.weight" in caught.value.message and "\n" not in caught.value.message
    assert "differ" in caught.value.message


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_plain_weights_are_quantised_while_loading(
    family: str, load_format: str, tmp_path: Path
) -> None:
    """Each row is quantised alone, so every rank gets the whole model's numbers."""
    folder = save_tiny(tmp_path, family)
    plain = dict(
        load(described(folder, weights="auto", load_format=load_format), CPU).named_parameters()
    )
    about = described(folder, weights="fp8", load_format=load_format)
    assert about.notes == {"weights": "quantised to fp8 while loading"}
    whole = stored_parameters(load(about, CPU))
    assert len(whole) >= 10 and "lm_head.weight" not in whole
    for name, parameter in whole.items():
        ours, numbers = plain_weight(parameter), plain[name]
        read = 1 if parameter.is_transposed else -1
        most = numbers.abs().amax(read, keepdim=True)
        assert ((ours - numbers).abs() <= most / 25).all() and not torch.equal(ours, numbers), name
        assert parameter.value is not None
        assert parameter.value.scales.unique().numel() > 1
    for rank in range(2):
        part = described(
            folder, TensorParallel(rank, 2, None, CPU), weights="fp8", load_format=load_format
        )
        for name, parameter in stored_parameters(load(part, CPU)).items():
            wanted = plain_weight(whole[name])
            if name in part.shards.parts:
                wanted = part.shards.parts[name].of(wanted)
            assert torch.equal(plain_weight(parameter), wanted), name
    if (family, load_format) == ("llama", "auto"):
        other = Path(shutil.copytree(folder, tmp_path / "plain"))
        tensors = load_file(other / "model.safetensors")
        tensors |= {name: plain_weight(held).contiguous() for name, held in whole.items()}
        save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
        want = greedy_reference(reference(other), PROMPT, 16)
        [seq] = decode(make_engine(folder, None, weights="fp8"), [PROMPT], 0, max_new_tokens=16)
        assert seq.tokens[len(PROMPT) :] == want and len(set(want)) > 3
