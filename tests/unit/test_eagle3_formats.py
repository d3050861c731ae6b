"""EAGLE-3 heads in every form that they are published in, and what is refused."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.speculators.store import stored_as
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.draft_form import with_method
from specdec_cli.models.heads.base import EMBEDDING, HEAD, HeadWeights
from specdec_cli.models.heads.checkpoint import (
    borrowed_by,
    dummy_weights,
    read_weights,
)
from specdec_cli.models.heads.description import check_target
from specdec_cli.models.heads.eagle3.config import Eagle3Config, read_head_config
from specdec_cli.recipe import Recipe, dump_recipe, load_recipe
from tests.eagle3 import DIALECTS, Head, head_config, save_head
from tests.support import CPU, save_tiny

ALL_IDS: dict[str, Any] = {"outputs": (0, 1, 2, 3, 4), "norm_before_residual": True}
# DeepSpec has no reduced vocabulary.
WRITTEN = [
    *((kind, dialect, 97) for kind in ("llama", "qwen3") for dialect in DIALECTS),
    *((kind, dialect, 31) for kind in ("llama", "qwen3") for dialect in DIALECTS[:3]),
]


def config_of(folder: Path, dialect: str = "safeailab", **changes: Any) -> Eagle3Config:
    return read_head_config("a head", save_head(folder, Head(), dialect, **changes))


def weights_of(folder: Path, head: Head, **options: Any) -> HeadWeights:
    config = read_head_config("a head", folder)
    return read_weights(config, folder, torch.float32, CPU, **options)


@pytest.mark.parametrize(("kind", "dialect", "draft_vocab"), WRITTEN)
def test_a_head_is_the_same_in_every_dialect(
    kind: str, dialect: str, draft_vocab: int, tmp_path: Path
) -> None:
    """Settings and weights are equal, except for the counting of layers."""
    head = Head(kind=kind, draft_vocab=draft_vocab, base=5e5, attention_bias=True, **ALL_IDS)
    folder = save_head(tmp_path, head, dialect)
    assert method_of(folder) == "eagle3"
    config = read_head_config("a head", folder)
    assert config.feature_layers(6) == (1, 2, 3, 4, 5)
    first = read_head_config("a head", save_head(tmp_path / "first", head, "speculators"))
    apart = ("aux_ids", "ids_key", "counting", "others", "is_wide")
    ours, theirs = asdict(config), asdict(first)
    assert {k: v for k, v in ours.items() if k not in apart} == {
        k: v for k, v in theirs.items() if k not in apart
    }
    weights = weights_of(folder, head)
    assert weights.tensors.keys() == head.tensors.keys() - {"d2t"}
    assert all(torch.equal(weights.tensors[n], head.tensors[n]) for n in weights.tensors)
    if draft_vocab == head.vocab:
        assert weights.ids is None
    else:
        assert weights.ids is not None and torch.equal(weights.ids, head.ids)


def test_published_forms(tmp_path: Path) -> None:
    """The configs that the projects themselves ship, shortened."""
    llama = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
    }
    found = _read(tmp_path, llama)
    assert found.body.rope_parameters == {"rope_type": "default", "rope_theta": 10000.0}
    assert (found.num_aux, found.feature_layers(32)) == (3, (2, 16, 29))
    assert (found.body.head_dim, found.feeds_norm) == (128, False)
    scaled = {
        "rope_theta": 500000.0,
        "rope_scaling": {
            **{"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
        },
    }
    found = _read(tmp_path, llama | scaled)
    assert (
        found.body.rope_parameters["rope_theta"] == 500000.0
        and found.body.rope_parameters["rope_type"] == "llama3"
    )
    older = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert _read(tmp_path, llama | older).body.rope_parameters["rope_type"] == "linear"
    # SpecForge, for QwQ: the target's type beside a class whose layers are llama's.
    specforge = llama | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "qwen2"}
    assert _read(tmp_path, specforge).body.model_type == "llama"
    with pytest.raises(SetupError, match=r"model_type is .qwen2"):
        _read(tmp_path, llama | {"model_type": "qwen2"})
    # nebius, for gpt-oss 20B.
    yarn = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "beta_fast": 32.0}
    nebius = {"truncated_vocab_size": 32000, "rope_theta": 150000, "rope_scaling": yarn}
    rope = _read(tmp_path, llama | nebius).body.rope_parameters
    assert yarn.items() <= rope.items() and rope["rope_theta"] == 150000.0
    # Model-Optimizer: the base inside rope_scaling, and ids of layers' outputs.
    nested = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "rope_theta": None,
        "rope_scaling": {"rope_type": "default", "rope_theta": 20000},
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]},
    }
    found = _read(tmp_path, llama | nested)
    assert found.feature_layers(32) == (2, 16, 29)
    assert found.body.rope_parameters["rope_theta"] == 20000.0
    (other,) = found.others
    assert "eagle_config" in other.told and other.changes == {"counting": "inputs"}
    deepspec = {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "target_layer_ids": [1, 9, 17, 25, 33],
        "num_target_layers": 36,
        "draft_vocab_size": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000},
    }
    found = _read(tmp_path, llama | deepspec)
    assert found.feature_layers(36) == (2, 10, 18, 26, 34)
    assert found.draft_vocab_size == 128256 and found.body.model_type == "qwen3"
    assert found.num_target_layers == 36


def _read(folder: Path, config: dict[str, Any]) -> Eagle3Config:
    (folder / "config.json").write_text(json.dumps(config))
    return read_head_config("a head", folder)


def test_windows_of_qwen3_have_to_be_switched_on(tmp_path: Path) -> None:
    """transformers' config forgets them otherwise, and speculators trains so."""
    config = head_config(Head(kind="qwen3", window=5), "speculators")
    assert _read(tmp_path, config).windows == (5,)
    del config["transformer_layer_config"]["use_sliding_window"]
    assert _read(tmp_path, config).windows == (0,)


def test_conventions_that_tools_read_differently_are_told(tmp_path: Path) -> None:
    (other,) = config_of(tmp_path, norm_output=True).others
    assert "norm_output" in other.told and other.changes == {"feeds_norm": False}
    config = head_config(Head(), "speculators")
    del config["norm_before_residual"]
    (other,) = _read(tmp_path, config).others
    assert "norm_before_residual" in other.told and other.changes == {"norm_before_residual": True}


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
        {"speculators_model_type": "peagle", "transformer_layer_config": {}},
        {"speculators_config": {"algorithm": "dflash"}},
    ],
)
def test_what_is_no_head_is_left_alone(config: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SetupError, match="not an EAGLE-3 head"):
        read_head_config("a head", tmp_path)
    for text in ("{", "[]"):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(SetupError, match="cannot read config"):
            read_head_config("a head", tmp_path)


def pair_recipe(draft: Path | str, **keys: object) -> Recipe:
    """A recipe of this draft with any target, which is not read."""
    more = {name.replace("__", "."): value for name, value in keys.items()}
    return load_recipe(None, {"target.model": "demo:target", "draft.model": str(draft)} | more)


def method_of(draft: Path | str, *, is_free: bool = False, **keys: object) -> str:
    return with_method(pair_recipe(draft, **keys), is_free=is_free).speculation.method


def test_the_draft_tells_the_method(tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", Head(), "safeailab")
    model = save_tiny(tmp_path / "model", "llama")
    assert method_of(head) == method_of(head, speculation__method="eagle3") == "eagle3"
    assert method_of(model) == method_of("demo:draft") == "draft_model"
    free = method_of(model, is_free=True, speculation__method="eagle3")
    assert free == "draft_model", "an option's draft replaces the recipe's method"
    # A method that runs no draft stays, and so does any for a draft that cannot be read.
    assert method_of(head, speculation__method="ngram") == "ngram"
    assert method_of("/no/such/head") == method_of("no/such-head") == "draft_model"
    (tmp_path / "model/config.json").write_text("[")
    assert method_of(model, speculation__method="eagle3") == "eagle3"
    # A recipe that was resolved once stays as it is.
    resolved = with_method(pair_recipe(head))
    assert with_method(resolved) == resolved
    assert load_recipe(str(saved(tmp_path, resolved))).speculation.method == "eagle3"


def saved(folder: Path, recipe: Recipe) -> Path:
    (folder / "recipe.yaml").write_text(dump_recipe(recipe))
    return folder / "recipe.yaml"


def test_a_method_that_cannot_run_the_draft_is_refused(tmp_path: Path) -> None:
    head = save_head(tmp_path / "head", Head(), "speculators")
    model = save_tiny(tmp_path / "model", "llama")
    wrong = [(head, "draft_model", "an EAGLE-3 head"), (model, "eagle3", "no EAGLE-3 head")]
    for draft, method, told in wrong:
        with pytest.raises(UsageError, match=f"method is {method}, but the draft .* is {told}"):
            method_of(draft, speculation__method=method)
        # At k = 0 no draft runs; and a draft named by an option brings its method along.
        plain = {"speculation__method": method, "speculation__num_speculative_tokens": 0}
        assert method_of(draft, **plain) == method
        assert method_of(draft, is_free=True, speculation__method=method) != method


BAD_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no width": ({"hidden_size": None}, "hidden_size is null"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
    "heads": ({"num_key_value_heads": 4}, "num_key_value_heads is 4"),
    "other body": ({"model_type": "deepseek_v3"}, "model_type is .deepseek_v3"),
    "activation": ({"hidden_act": "relu"}, "hidden_act"),
    "eps": ({"rms_norm_eps": "x"}, "rms_norm_eps"),
    "eps of zero": ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
    "too many ids": ({"draft_vocab_size": 98}, "draft_vocab_size is 98"),
    "flag": ({"fc_norm": "yes"}, "fc_norm"),
    "both norms": ({"fc_norm": True, "norm_before_fc": True}, "fc_norm is true as well"),
    "layer ids": ({"eagle_aux_hidden_state_layer_ids": [1, "2"]}, "eagle_aux_hidden_state"),
    "order": ({"eagle_aux_hidden_state_layer_ids": [3, 2]}, "ascending"),
    "rope": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type is .dynamic"),
    "mrope": ({"rope_scaling": {"type": "default", "mrope_section": [1]}}, "rope_type"),
    "base": ({"rope_theta": [2]}, r"rope_theta is \[2\]"),
    "no base": ({"rope_theta": 0}, "rope_theta is 0"),
    "partial rope": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "window": ({"layer_types": ["sliding_attention"]}, "sliding_window is null"),
    "late window": (
        {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 8}
        | {"max_window_layers": 0},
        "use_sliding_window is true: layers with a sliding window",
    ),
    "layer types": ({"layer_types": ["linear_attention"]}, "layer_types"),
    "quantised": ({"quantization_config": {"quant_method": "hqq"}}, "quant_method is .hqq"),
    "quantised how": ({"quantization_config": "fp8"}, "quantization_config is .fp8.: it must be"),
    "no features": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
    "parallel": ({"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step is 4"),
    "half a rope": ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "cannot read .*rope_par"),
    "settings in a list": ({"eagle_config": [1]}, "cannot read config.json of the EAGLE-3 head"),
    "activation in a list": ({"hidden_act": [1]}, "cannot read config.json of the EAGLE-3 head"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_settings_are_refused_by_key(case: str, tmp_path: Path) -> None:
    changes, reason = BAD_CONFIGS[case]
    with pytest.raises(SetupError, match=reason):
        config_of(tmp_path, **changes)


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path, num_target_layers=6)
    check_target(config, 48, 97, 6)
    for sizes, key in (
        ((64, 97, 6), "target_hidden_size is 48, but the target has 64"),
        ((48, 128, 6), "vocab_size is 97, but the target has 128"),
        ((48, 97, 8), "num_target_layers is 6, but the target has 8"),
    ):
        with pytest.raises(SetupError, match=key):
            check_target(config, *sizes)
    # The head reads hidden states 1, 3 and 4: the last is a target's final norm if it has 4 layers.
    config = config_of(tmp_path)
    with pytest.raises(SetupError, match="a target that has 4 layers"):
        check_target(config, 48, 97, 4)
    check_target(config, 48, 97, 5)


BAD_WEIGHTS: dict[str, tuple[str, Any, str]] = {
    "missing": ("fc.weight", None, "1 missing tensor, first fc.weight"),
    "missing norm": ("midlayer.hidden_norm.weight", None, "layers.0.hidden_norm.weight"),
    "missing ids": ("d2t", None, "first d2t"),
    "missing head": ("lm_head.weight", None, "first lm_head.weight"),
    "unknown": (
        "mask_hidden",
        torch.zeros(1, 1, 9),
        "1 unknown tensor, first mask_hi",
    ),
    "bias": ("midlayer.self_attn.q_proj.bias", torch.zeros(48), "q_proj.bias"),
    "twice": ("layers.0.hidden_norm.weight", torch.zeros(48), "occurs twice"),
    "shape": (
        "midlayer.self_attn.q_proj.weight",
        torch.zeros(48, 48),
        r"\[48, 48\], but config.json requires \[48, 96",
    ),
    "features": (
        "fc.weight",
        torch.zeros(48, 96),
        r"\[48, 96\], but config.json requires \[48, 144\]",
    ),
    "width": ("norm.weight", torch.zeros(64), r"norm.weight has shape \[64\]"),
    "quantised": ("fc.weight", torch.zeros(48, 144, dtype=torch.int8), "int8, which is quantised"),
    "ids past": ("d2t", torch.arange(31) * 3, "d2t maps to ids from 0 to 120"),
    "ids before": ("d2t", -torch.ones(31, dtype=torch.int64), "d2t maps to ids from -1"),
    "same ids": ("d2t", -torch.arange(31), "d2t maps several draft ids to one target id"),
    "ids apart": ("d2t", torch.ones(31, dtype=torch.int64), "t2d and d2t name different ids"),
    "ids' kind": ("d2t", torch.zeros(31), r"d2t is \[31\] float32"),
    "ids' size": ("d2t", torch.zeros(30, dtype=torch.int64), r"d2t is \[30\] int64"),
}


@pytest.mark.parametrize("case", BAD_WEIGHTS)
def test_bad_weights_are_refused_by_name(case: str, tmp_path: Path) -> None:
    name, value, reason = BAD_WEIGHTS[case]
    head = Head(draft_vocab=31)
    folder = save_head(tmp_path, head, "safeailab")
    weights_of(folder, head)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(name, None)
    save_file(tensors if value is None else tensors | {name: value}, file)
    with pytest.raises(SetupError, match=reason):
        weights_of(folder, head)


def test_matrices_in_fp8(tmp_path: Path) -> None:
    """They are read as the numbers that codes and scales stand for, by any name of a dialect."""
    head = Head(draft_vocab=31)
    folder = save_head(tmp_path, head, "safeailab")
    plain = dict(weights_of(folder, head).tensors)
    file = folder / "model.safetensors"
    tensors, settings = stored_as("fp8", load_file(file))
    save_file(tensors, file)
    with pytest.raises(SetupError, match=r"first fc\.weight_scale"):
        weights_of(folder, head)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    found = weights_of(folder, head).tensors
    name = "midlayer.self_attn.q_proj.weight"
    want = tensors[name].float() * tensors[f"{name}_scale"].float()
    assert torch.equal(found["layers.0.self_attn.q_proj.weight"], want)
    assert found.keys() == plain.keys()
    changed = {name for name in plain if not torch.equal(found[name], plain[name])}
    assert changed == {name for name in plain if "proj" in name or name == "fc.weight"}
    for name in changed:
        torch.testing.assert_close(found[name], plain[name], rtol=2**-4, atol=2e-4)
    file_without = {name: t for name, t in tensors.items() if name != "fc.weight_scale"}
    save_file(file_without, file)
    with pytest.raises(SetupError, match=r"fc\.weight is torch\.float8_e4m3fn, .* has no scales"):
        weights_of(folder, head)


@pytest.mark.parametrize("has_own", [False, True])
def test_matrices_that_model_optimizer_s_own_file_describes(tmp_path: Path, has_own: bool) -> None:
    """A folder's own quantization_config is taken first, as for whole models."""
    head = Head(draft_vocab=31)
    folder = save_head(tmp_path, head, "safeailab")
    file = folder / "model.safetensors"
    tensors, wanted = load_file(file), {}
    for name in [name for name in tensors if "proj" in name or name == "fc.weight"]:
        scale = tensors[name].abs().amax() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        wanted[name.replace("midlayer", "layers.0")] = tensors[name].float() * scale
    save_file(tensors, file)
    with pytest.raises(SetupError, match=r"first fc\.weight_scale"):
        weights_of(folder, head)
    settings = {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    apart = {"quantization": settings if not has_own else {"quant_algo": "NVFP4"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(apart))
    config = json.loads((folder / "config.json").read_text())
    if has_own:
        config["quantization_config"] = {"quant_method": "modelopt"} | settings
    (folder / "config.json").write_text(json.dumps(config))
    found = weights_of(folder, head).tensors
    assert wanted and all(torch.equal(found[name], value) for name, value in wanted.items())


def test_a_file_of_model_optimizer_that_quantises_no_weight(tmp_path: Path) -> None:
    """It may name the dtype of caches only. A file that names none is damaged."""
    folder = save_head(tmp_path, head := Head(), "safeailab")
    settings = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": settings}))
    assert weights_of(folder, head).tensors.keys() == head.tensors.keys() - {"d2t"}
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {}}))
    with pytest.raises(SetupError, match=r"^hf_quant_config\.json of .*quant_algo is None$"):
        weights_of(folder, head)


def test_what_training_leaves_behind_is_no_harm(tmp_path: Path) -> None:
    head = Head()
    folder = save_head(tmp_path, head, "speculators")
    file = folder / "model.safetensors"
    left = {"verifier_norm.weight": torch.ones(48), "rotary_emb.inv_freq": torch.ones(4)}
    save_file(load_file(file) | left, file)
    assert weights_of(folder, head).tensors.keys() == head.tensors.keys()


def test_embedding_and_head_of_the_target(tmp_path: Path) -> None:
    """A head without its own takes the target's, itself and not a copy."""
    head = Head()
    lent = {EMBEDDING: torch.randn(97, 48), HEAD: torch.randn(97, 48)}
    folder = save_head(tmp_path, head, "speculators", without=(EMBEDDING, HEAD))
    found = weights_of(folder, head, lent=lent)
    assert found.tensors[EMBEDDING].data_ptr() == lent[EMBEDDING].data_ptr()
    assert found.tensors[HEAD].data_ptr() == lent[HEAD].data_ptr()
    config = read_head_config("a head", folder)
    assert borrowed_by(config, folder, torch.float32, lent) == {EMBEDDING, HEAD}
    with pytest.raises(SetupError, match="first embed_tokens"):
        weights_of(folder, head)
    narrow = lent | {EMBEDDING: torch.randn(97, 40)}
    with pytest.raises(SetupError, match=r"embed_tokens.weight is missing, and the target's, \[97"):
        weights_of(folder, head, lent=narrow)
    # Own ones are taken, and the head of a reduced vocabulary has to be its own.
    own = weights_of(save_head(tmp_path, head, "speculators"), head, lent=lent)
    assert torch.equal(own.tensors[HEAD], head.tensors[HEAD])
    reduced = Head(draft_vocab=31)
    save_head(tmp_path, reduced, "speculators", without=(HEAD,))
    with pytest.raises(SetupError, match="first lm_head"):
        weights_of(folder, reduced, lent=lent)


def test_a_tied_head_is_its_embedding(tmp_path: Path) -> None:
    head = Head()
    folder = save_head(tmp_path, head, "safeailab", without=(HEAD,), tie_word_embeddings=True)
    assert HEAD not in weights_of(folder, head).tensors
    # SpecForge's heads have their own output matrix even if the config, a tied target's, says not.
    for vocab in (31, 97):
        head = Head(draft_vocab=vocab)
        save_head(folder, head, "safeailab", tie_word_embeddings=True)
        assert torch.equal(weights_of(folder, head).tensors[HEAD], head.tensors[HEAD])
    save_head(folder, Head(draft_vocab=31), "safeailab", (HEAD,), tie_word_embeddings=True)
    with pytest.raises(SetupError, match="first lm_head"):
        weights_of(folder, head)


def test_pickled_weights_only_if_allowed(tmp_path: Path) -> None:
    head = Head(draft_vocab=31)
    folder = save_head(tmp_path, head, "safeailab")
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()
    with pytest.raises(SetupError, match="pickled weights only"):
        weights_of(folder, head)
    found = weights_of(folder, head, allow_pickle=True)
    assert all(torch.equal(found.tensors[n], head.tensors[n]) for n in found.tensors)
    assert found.ids is not None and torch.equal(found.ids, head.ids)
    half = weights_of(folder, head, allow_pickle=True, parallel=TensorParallel(1, 2)).tensors
    down = half["layers.0.mlp.down_proj.weight"]
    assert torch.equal(down, found.tensors["layers.0.mlp.down_proj.weight"][:, 28:])
    assert down.is_contiguous()


def test_dummy_weights_have_every_shape(tmp_path: Path) -> None:
    config = read_head_config("a head", save_head(tmp_path, Head(draft_vocab=31), "safeailab"))
    one, other = (dummy_weights(config, torch.bfloat16, CPU) for _ in range(2))
    assert {n: tuple(t.shape) for n, t in one.tensors.items()} == config.shapes()
    assert all(torch.equal(t, other.tensors[n]) for n, t in one.tensors.items())
    assert one.ids is not None and one.ids.unique().shape == (31,)
    assert 0 <= int(one.ids.min()) and int(one.ids.max()) < 97
