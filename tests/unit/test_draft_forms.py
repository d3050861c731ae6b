"""Configs of every kind of draft in use, written after the published ones: one form fits each.

Sizes are shortened; the keys are those by which tools tell drafts apart.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_cli.engine.plan import plan
from specdec_cli.errors import ExitCode, SetupError
from specdec_cli.models.draft_form import with_method
from specdec_cli.recipe import Recipe, load_recipe
from specdec_cli.recipe.choices import forms
from specdec_cli.recipe.choices.eagle3 import dialect_of
from specdec_cli.recipe.choices.forms import DraftForm
from specdec_cli.recipe.choices.registry import METHODS, fitting_forms
from tests.engine.test_formats import STORED, store_as
from tests.support import save_tiny

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "intermediate_size": 128,
    "vocab_size": 97,
}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
REDUCED = {"draft_vocab_size": 31}
NAMED = {"architectures": ["LlamaForCausalLMEagle3"]}
IDS = {"target_layer_ids": [1, 9, 17, 25, 33]}


def speculators(kind: str, **keys: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{kind.capitalize()}Speculator"],
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "proposal_methods": [], "verifier": {}},
        "transformer_layer_config": dict(LLAMA),
        **keys,
    }


def deepspec(**keys: Any) -> dict[str, Any]:
    """A config of DeepSpec, with the class of its DFlash or its DSpark."""
    own = {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 90}
    return QWEN3 | own | {"num_anchors": 512, "num_target_layers": 36} | IDS | keys


# noun: None for an ordinary model. seen: what a message shows. dialect: of EAGLE-3 heads.
CONFIGS: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "llama": (LLAMA, None, ""),
    "qwen3, tied": (QWEN3 | {"tie_word_embeddings": True}, None, ""),
    "deepseek with its modules": (
        LLAMA | {"architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 1},
        None,
        "",
    ),
    "a fill-mask id that is null": (LLAMA | {"mask_token_id": None}, None, ""),
    "eagle3, SafeAILab": (LLAMA | REDUCED, "an EAGLE-3 head", "draft_vocab_size: 31"),
    "eagle3, SafeAILab, whole vocabulary": (
        LLAMA | NAMED,
        "an EAGLE-3 head",
        'architectures: ["LlamaForCausalLMEagle3"]',
    ),
    "eagle3, SpecForge": (LLAMA | NAMED | REDUCED, "an EAGLE-3 head", "architectures"),
    "eagle3, AngelSlim": (
        QWEN3 | {"architectures": ["Eagle3LlamaForCausalLM"], "modal_type": "LLM"} | REDUCED,
        "an EAGLE-3 head",
        "architectures",
    ),
    "eagle3, Model-Optimizer": (
        LLAMA
        | REDUCED
        | {"eagle_config": {"use_aux_hidden_state": True, "parallel_draft_step": 1}},
        "an EAGLE-3 head",
        "eagle_config",
    ),
    "eagle3, speculators": (
        speculators("eagle3", norm_before_residual=True, **REDUCED),
        "an EAGLE-3 head",
        'speculators_model_type: "eagle3"',
    ),
    "eagle3, speculators of old": (
        {"speculators_config": {"algorithm": "eagle3"}, "transformer_layer_config": LLAMA},
        "an EAGLE-3 head",
        'speculators_config.algorithm: "eagle3"',
    ),
    "eagle3, DeepSpec": (
        QWEN3 | {"architectures": ["Qwen3Eagle3Model"], "draft_vocab_size": None} | IDS,
        "an EAGLE-3 head",
        "architectures",
    ),
    "peagle, speculators": (
        speculators("peagle", mask_token_id=90, **REDUCED),
        "a P-EAGLE head",
        'speculators_model_type: "peagle"',
    ),
    "peagle, SpecForge": (
        LLAMA | {"architectures": ["PEagleDraftModel"]} | REDUCED,
        "a P-EAGLE head",
        "architectures",
    ),
    "peagle, flat": (
        LLAMA | NAMED | REDUCED | {"ptd_token_id": 90},
        "a P-EAGLE head",
        "ptd_token_id: 90",
    ),
    "peagle, by pard_token": (
        LLAMA | NAMED | {"pard_token": 90},
        "a P-EAGLE head",
        "pard_token: 90",
    ),
    "dflash, z-lab": (
        QWEN3
        | {"architectures": ["DFlashDraftModel"], "block_size": 16}
        | {"dflash_config": {"mask_token_id": 90, **IDS}},
        "a DFlash drafter",
        'architectures: ["DFlashDraftModel"]',
    ),
    "dflash, an ordinary class": (
        QWEN3 | {"block_size": 16, "dflash_config": {"mask_token_id": 90}} | REDUCED,
        "a DFlash drafter",
        "dflash_config",
    ),
    "dflash, with a Markov rank of none": (
        QWEN3 | {"markov_rank": 0, "dflash_config": {"mask_token_id": 90, "markov_rank": 0}},
        "a DFlash drafter",
        "dflash_config",
    ),
    "dflash, speculators": (
        speculators("dflash", block_size=8, mask_token_id=90, **REDUCED),
        "a DFlash drafter",
        'speculators_model_type: "dflash"',
    ),
    "dflash, Muse": (
        QWEN3
        | {"architectures": ["MuseGlimmerAssistantModel"], "block_size": 8, "mask_token_id": 90}
        | IDS,
        "a DFlash drafter",
        "architectures",
    ),
    "dflash, DeepSpec": (deepspec(markov_rank=0), "a DSpark drafter", "architectures"),
    "dspark, DeepSpec": (
        deepspec(markov_rank=256, markov_head_type="vanilla", enable_confidence_head=True),
        "a DSpark drafter",
        'architectures: ["Qwen3DSparkModel"]',
    ),
    "dspark, SpecForge": (
        QWEN3
        | {"block_size": 7}
        | {"dflash_config": {"projector_type": "dspark", "mask_token_id": 90, **IDS}},
        "a DSpark drafter",
        'dflash_config.projector_type: "dspark"',
    ),
    "dspark, by its nested rank": (
        QWEN3 | {"architectures": ["DFlashDraftModel"], "dflash_config": {"markov_rank": 256}},
        "a DSpark drafter",
        "dflash_config.markov_rank: 256",
    ),
    "dspark, by its rank": (QWEN3 | {"markov_rank": 256}, "a DSpark drafter", "markov_rank: 256"),
    "dspark, speculators": (
        speculators("dspark", block_size=8, mask_token_id=90, markov_rank=256, **REDUCED),
        "a DSpark drafter",
        'speculators_model_type: "dspark"',
    ),
    "pard": (LLAMA | {"pard_token": 90, "spd_type": "pard"}, "a PARD draft", "pard_token: 90"),
    "pard, by its token": (QWEN3 | {"pard_token": 90}, "a PARD draft", "pard_token: 90"),
    "pard-2": (
        QWEN3 | {"pard_token": 90, "spd_type": "pard2", "pard2_target_layers": [1, 5]},
        "a PARD-2 draft",
        'spd_type: "pard2"',
    ),
    "eagle, speculators": (
        speculators("eagle", fusion_bias=True),
        "an EAGLE head of the first kinds (EAGLE-1, EAGLE-2 or HASS)",
        'speculators_model_type: "eagle"',
    ),
    "hass, speculators": (
        speculators("eagle", layernorms=True),
        "an EAGLE head of the first kinds (EAGLE-1, EAGLE-2 or HASS)",
        'speculators_model_type: "eagle"',
    ),
    "hass, flat": (
        LLAMA | REDUCED | {"architectures": ["EagleLlamaForCausalLM"]},
        "an EAGLE head of the first kinds (EAGLE-1, EAGLE-2 or HASS)",
        "architectures",
    ),
    "eagle, vLLM": (
        {"model_type": "eagle", "architectures": ["EAGLEModel"], "model": LLAMA},
        "an EAGLE head of the first kinds (EAGLE-1, EAGLE-2 or HASS)",
        'model_type: "eagle"',
    ),
    "medusa": (
        {"base_model_name_or_path": "t", "medusa_num_heads": 5, "medusa_num_layers": 1},
        "a set of Medusa heads",
        "medusa_num_heads: 5",
    ),
    "medusa, vLLM": (
        {"model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": 5},
        "a set of Medusa heads",
        'model_type: "medusa"',
    ),
    "hydra": (
        {"hydra_num_heads": 4, "hydra_num_layers": 1, "grounded_heads": True},
        "a set of Hydra heads",
        "hydra_num_heads: 4",
    ),
    "mlp speculator": (
        {"model_type": "mlp_speculator", "architectures": ["MLPSpeculatorPreTrainedModel"]},
        "an MLP speculator",
        'model_type: "mlp_speculator"',
    ),
    "mtp, extracted": (
        speculators("mtp"),
        "an MTP module",
        'speculators_model_type: "mtp"',
    ),
    "mtp, SGLang's class": (
        LLAMA | {"architectures": ["DeepseekV3ForCausalLMNextN"], "num_nextn_predict_layers": 1},
        "a multi-token-prediction module on its own",
        "architectures",
    ),
    "gemma 4's assistant": (
        {"model_type": "gemma4_assistant"},
        "an assistant that reads the target's cache",
        'model_type: "gemma4_assistant"',
    ),
    "deepseek v4's stages": (
        LLAMA | {"dspark_target_layer_ids": [1, 2]},
        "a stage of DeepSeek V4",
        "dspark_target_layer_ids: [1, 2]",
    ),
    # Keys of two kinds, of which one decides.
    "dflash with a PARD token": (
        QWEN3 | {"dflash_config": {}, "pard_token": 90},
        "a DFlash drafter",
        "dflash_config",
    ),
    "dflash with masks of other kinds": (
        QWEN3 | {"dflash_config": {}, "pard_token": 90, "ptd_token_id": 90} | REDUCED,
        "a DFlash drafter",
        "dflash_config",
    ),
    "dspark with a PARD token": (
        QWEN3 | {"markov_rank": 256, "pard_token": 90},
        "a DSpark drafter",
        "markov_rank: 256",
    ),
    "dspark beside eagle3's keys": (
        QWEN3 | {"markov_rank": 256, "mask_token_id": 90} | REDUCED,
        "a DSpark drafter",
        "markov_rank: 256",
    ),
    "dspark with a rank, and no mask": (
        QWEN3 | {"markov_rank": 256} | REDUCED,
        "a DSpark drafter",
        "markov_rank: 256",
    ),
    "dspark with v4's key": (
        deepspec(markov_rank=256, dspark_target_layer_ids=[1]),
        "a DSpark drafter",
        "architectures",
    ),
    "peagle with a PARD token": (
        LLAMA | {"architectures": ["PEagleDraftModel"], "pard_token": 90},
        "a P-EAGLE head",
        "architectures",
    ),
    "eagle with a mask": (
        LLAMA | {"architectures": ["EagleLlamaForCausalLM"], "mask_token_id": 90} | REDUCED,
        "an EAGLE head of the first kinds (EAGLE-1, EAGLE-2 or HASS)",
        "architectures",
    ),
    "pard-2 with a reduced vocabulary": (
        QWEN3 | {"spd_type": "pard2"} | REDUCED,
        "a PARD-2 draft",
        'spd_type: "pard2"',
    ),
    "another speculator with eagle3's keys": (
        speculators("eagle4", architectures=["LlamaForCausalLMEagle3"], **REDUCED),
        "a speculator of an unknown kind",
        'speculators_model_type: "eagle4"',
    ),
    "another speculator with peagle's keys": (
        speculators("peagle2", architectures=["PEagleDraftModel"], mask_token_id=90),
        "a speculator of an unknown kind",
        'speculators_model_type: "peagle2"',
    ),
    "another speculator with eagle's class": (
        speculators("eagle2", architectures=["EagleSpeculator"]),
        "a speculator of an unknown kind",
        'speculators_model_type: "eagle2"',
    ),
    "another speculator with dspark's keys": (
        speculators("dspark2", architectures=["DSpark2Speculator"], markov_rank=256),
        "a speculator of an unknown kind",
        'speculators_model_type: "dspark2"',
    ),
    "another speculator with dflash's keys": (
        speculators("parallel", mask_token_id=90, dflash_config={}),
        "a speculator of an unknown kind",
        'speculators_model_type: "parallel"',
    ),
    "speculators' keys of two kinds": (
        speculators("dflash", speculators_config={"algorithm": "eagle3"}, mask_token_id=90),
        "a draft of contradictory kinds",
        'speculators_model_type: "dflash" and speculators_config.algorithm: "eagle3"',
    ),
    "speculators' keys of mtp and dflash": (
        speculators("mtp", speculators_config={"algorithm": "dflash"}, mask_token_id=90),
        "a draft of contradictory kinds",
        'speculators_config.algorithm: "dflash" and speculators_model_type: "mtp"',
    ),
    "speculators' dflash with a Markov head": (
        speculators("dflash", mask_token_id=90, markov_rank=256),
        "a draft of contradictory kinds",
        'speculators_model_type: "dflash" and markov_rank: 256',
    ),
    "dflash 2": (
        speculators("dflash2", block_size=8, mask_token_id=90, dflash_config={}, **REDUCED),
        "a speculator of an unknown kind",
        'speculators_model_type: "dflash2"',
    ),
    "dflash 2, by its class": (
        QWEN3 | {"architectures": ["DFlash2DraftModel"], "dflash_config": {}},
        "a successor of DFlash (DFlash 2, Domino)",
        'architectures: ["DFlash2DraftModel"]',
    ),
    "domino": (
        QWEN3
        | {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "domino"}},
        "a successor of DFlash (DFlash 2, Domino)",
        'dflash_config.projector_type: "domino"',
    ),
    "dflash, by its projector": (
        QWEN3 | {"dflash_config": {"projector_type": "dflash"}},
        "a DFlash drafter",
        "dflash_config",
    ),
    "another pard": (
        QWEN3 | {"pard_token": 90, "spd_type": "pard3"},
        "a draft of an unknown kind",
        'spd_type: "pard3"',
    ),
    "a speculator whose kind is no word": (
        {"speculators_model_type": ["dflash"], "mask_token_id": 90, **REDUCED},
        "a speculator of an unknown kind",
        "speculators_model_type",
    ),
}
DIALECTS = {
    "SafeAILab": "flat",
    "SpecForge": "flat",
    "AngelSlim": "flat",
    "Model-Optimizer": "model-optimizer",
    "speculators": "speculators",
    "DeepSpec": "deepspec",
}


BUILT: dict[str | None, str] = {  # the method of each kind that one runs
    "an EAGLE-3 head": "eagle3",
    "an MTP module": "mtp_module",
    "a DFlash drafter": "dflash",
    "a DSpark drafter": "dspark",
    "a P-EAGLE head": "peagle",
    "a PARD draft": "pard",
}


@pytest.mark.parametrize("case", CONFIGS)
def test_one_form_fits(case: str) -> None:
    config, noun, seen = CONFIGS[case]
    found = fitting_forms(config)
    assert [fits.form.noun for fits in found] == [noun] * (noun is not None)
    assert all(seen in fits.seen for fits in found)
    is_head = case.startswith("eagle3")
    methods = [BUILT[noun]] if noun in BUILT else []
    assert [fits.method for fits in found if fits.method] == methods
    dialects = [kind for name, kind in DIALECTS.items() if f"eagle3, {name}" in case]
    assert dialect_of(config) == (dialects[0] if is_head else None)


BY_WEIGHTS = {
    # EAGLE-1, EAGLE-2 and HASS as their authors publish them.
    "eagle": ("fc.weight", "an EAGLE head of the first kinds (EAGLE-1, EAGLE-2 or HASS)"),
    "eagle, nested": ("model.fc.weight", "an EAGLE head of the first kinds"),
    "medusa": ("0.0.linear.weight", "a set of Medusa heads"),
    "medusa, merged": ("medusa_head.1.0.linear.bias", "a set of Medusa heads"),
    "hydra": ("hydra_head.0.0.linear.weight", "a set of Hydra heads"),
    "mlp": ("speculator.emb.0.weight", "an MLP speculator"),
    "unknown": ("blend.gate", "1 tensor in the weights of the draft"),
    "modules": ("mtp.0.eh_proj.weight", "1 tensor in the weights of the draft"),
}


@pytest.mark.parametrize("case", BY_WEIGHTS)
def test_a_draft_whose_config_is_a_model_s_is_known_by_its_weights(
    case: str, tmp_path: Path
) -> None:
    tensor, told = BY_WEIGHTS[case]
    target = save_tiny(tmp_path / "target", "llama")
    draft = save_tiny(tmp_path / "draft", "llama", seed=1, num_hidden_layers=1)
    sets = {"target.model": str(target), "draft.model": str(draft), "run.device": "cpu"}
    recipe = load_recipe(None, sets | {"target.load_format": "dummy", "draft.load_format": "auto"})
    tensors = load_file(draft / "model.safetensors")
    spare = "model.layers.0.self_attn.rotary_emb.inv_freq"  # no use is known, and none is missed
    for extra, is_refused in ((spare, False), (tensor, True)):
        save_file(tensors | {extra: torch.zeros(8)}, draft / "model.safetensors")
        with pytest.raises(SetupError) as caught:
            plan(recipe)
        said = caught.value
        assert (tensor in said.message and told in said.message) is is_refused
        assert is_refused or "tokenizer" in said.message
        assert said.code == ExitCode.ENVIRONMENT and "\n" not in said.message


FP8 = {"quant_method": "fp8", "weight_block_size": [32, 32]}


@pytest.mark.parametrize("kind", ["fp8", "gguf", "gptq", "packed, zeros", "mxfp4", "int8"])
def test_weights_without_a_use_are_told_in_every_format(kind: str, tmp_path: Path) -> None:
    """Scales belong to what is used; another tensor is refused by its name."""
    target = save_tiny(tmp_path / "target", "llama")
    draft = save_tiny(tmp_path / "draft", "llama", num_hidden_layers=1)
    stray = torch.ones(4, 4)
    sets = {"target.model": str(target), "run.device": "cpu", "target.load_format": "dummy"}
    if kind == "gguf":
        gguf_files = pytest.importorskip("tests.gguf_files")
        model = gguf_files.tiny_model("llama", num_hidden_layers=1)
        for name, tensor in (("rope_freqs.weight", torch.ones(8)), ("blk.0.nextn.enorm", stray)):
            file = tmp_path / f"{name}.gguf"
            gguf_files.save_gguf(file, "llama", model, extra={name: tensor})
            recipe = load_recipe(None, sets | {"draft.model": str(file)})
            with pytest.raises(SetupError) as caught:
                plan(recipe)
            assert ("would not be used" in caught.value.message) is ("nextn" in name)
            assert "nextn" not in name or name in caught.value.message
        return
    codes, scales = dict[str, Any](), dict[str, Any]()
    if kind == "fp8":
        config = json.loads((draft / "config.json").read_text()) | {"quantization_config": FP8}
        (draft / "config.json").write_text(json.dumps(config))
    else:
        store_as(draft, tmp_path / "numbers", *STORED[kind])
    for name, tensor in load_file(draft / "model.safetensors").items():
        is_matrix = "_proj" in name and kind == "fp8"
        codes[name] = tensor.to(torch.float8_e4m3fn) if is_matrix else tensor
        if is_matrix:
            scales[f"{name}_scale_inv"] = torch.ones(
                -(-tensor.shape[0] // 32), tensor.shape[1] // 32
            )
            scales[name.replace("weight", "input_scale")] = torch.ones(1)
    recipe = load_recipe(None, sets | {"draft.model": str(draft)})
    for extra in ({}, {"blend.gate": stray}):
        save_file(codes | scales | extra, draft / "model.safetensors")
        with pytest.raises(SetupError) as caught:
            plan(recipe)
        assert ("would not be used: blend.gate;" in caught.value.message) is bool(extra)


def test_a_draft_without_safetensors_and_tokenizer_is_no_model(tmp_path: Path) -> None:
    target = save_tiny(tmp_path / "target", "llama")
    draft = save_tiny(tmp_path / "draft", "llama", num_hidden_layers=1)
    torch.save(load_file(draft / "model.safetensors"), draft / "pytorch_model.bin")
    (draft / "model.safetensors").unlink()
    sets = {"target.model": str(target), "draft.model": str(draft), "run.device": "cpu"}
    with pytest.raises(SetupError, match="no tokenizer and only pickled weights"):
        plan(load_recipe(None, sets | {"target.load_format": "dummy"}))


def recipe_of(folder: Path, config: dict[str, Any], **speculation: Any) -> Recipe:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    keys = {f"speculation.{key}": value for key, value in speculation.items()}
    return load_recipe(None, {"target.model": "demo:target", "draft.model": str(folder), **keys})


@pytest.mark.parametrize("case", CONFIGS)
def test_what_no_method_runs_is_refused_by_its_key(case: str, tmp_path: Path) -> None:
    """The recipe's name for it does not matter. At k = 0 no draft runs, so nothing is refused."""
    config, noun, seen = CONFIGS[case]
    if (wanted := BUILT.get(noun, None if noun else "draft_model")) is not None:
        assert with_method(recipe_of(tmp_path, config)).speculation.method == wanted
        return
    for named in ({}, {"method": "draft_model"}, {"method": "eagle3"}):
        for is_free in (False, True):
            with pytest.raises(SetupError) as caught:
                with_method(recipe_of(tmp_path, config, **named), is_free=is_free)
            error = caught.value
            assert error.code == ExitCode.ENVIRONMENT and "\n" not in error.message
            assert error.message.startswith(f"{tmp_path} is {noun} (")
            assert seen in error.message and error.message.endswith("which is not supported yet")
    plain = recipe_of(tmp_path, config, num_speculative_tokens=0)
    assert with_method(plain) == plain


def test_a_config_of_two_kinds_is_refused_by_both(tmp_path: Path) -> None:
    config = CONFIGS["dflash, z-lab"][0] | {"medusa_num_heads": 5}
    with pytest.raises(SetupError) as caught:
        with_method(recipe_of(tmp_path, config))
    assert "fits 2 kinds of draft" in caught.value.message
    assert "DFlashDraftModel" in caught.value.message and "medusa_num_heads: 5" in str(caught.value)


def test_a_config_of_two_kinds_that_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin = replace(METHODS["eagle3"], form=DraftForm("a twin", (forms.EAGLE3,)))
    monkeypatch.setitem(METHODS, "twin", twin)
    with pytest.raises(SetupError, match=r"fits 2 kinds of draft: an EAGLE-3 head .* and a twin"):
        with_method(recipe_of(tmp_path, CONFIGS["eagle3, SpecForge"][0]))


def test_a_plugin_that_describes_its_drafts_gets_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specdec_cli import plugin

    monkeypatch.setitem(METHODS, "own", METHODS["none"])  # so that it is taken out again
    del METHODS["own"]

    class Own:
        @staticmethod
        def describe(place: Any) -> Any:
            raise AssertionError("not described here")

    plugin.method("own", weights_from="draft")(Own)
    recipe = recipe_of(tmp_path, CONFIGS["peagle, flat"][0], method="own")
    assert with_method(recipe, is_free=True).speculation.method == "own"
