"""The load-time gate: its refusals, their words, and proofs that each refusal is necessary."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AttentionInterface, AutoConfig, AutoModelForCausalLM

from specdec_cli.core.batch import Span
from specdec_cli.core.kv_cache import BlockAllocator, KVCache, LayerShape
from specdec_cli.core.types import Sequence
from specdec_cli.errors import ExitCode, SetupError
from specdec_cli.models import attention, gate
from specdec_cli.models.attention import ATTENTION_NAME
from specdec_cli.models.description import describe
from specdec_cli.models.gate import check_config, probe
from specdec_cli.models.known_results import KnownResults
from specdec_cli.models.loader import load
from specdec_cli.models.paged import PagedModel
from specdec_cli.models.refusals import Unsupported
from specdec_cli.models.spec import ModelSpec
from tests.support import CPU, FAMILIES, TINY, VOCAB, description, save_tiny, tiny_config

SMALL: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
LLAMA: dict[str, Any] = TINY | {"model_type": "llama"}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": (
        SMALL | {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4},
        "attention code of its own",
    ),
    "falcon": (
        TINY | {"model_type": "falcon"},
        "attention code of its own",
    ),
    "gptj": (
        SMALL | {"model_type": "gptj", "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8},
        "attention code of its own",
    ),
    "mpt": (
        SMALL | {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4},
        "attention code of its own",
    ),
    "t5": (
        SMALL | {"model_type": "t5", "d_model": 64, "num_layers": 2, "num_heads": 4},
        "t5 is an encoder-decoder model",
    ),
    "bart": (SMALL | {"model_type": "bart"}, "bart is an encoder-decoder model"),
    "bert": (TINY | {"model_type": "bert"}, "attends to later tokens"),
    "gemma3-bidirectional": (
        TINY | {"model_type": "gemma3_text", "head_dim": 16, "use_bidirectional_attention": True},
        "attends to later tokens",
    ),
    "llama-bidirectional": (LLAMA | {"is_causal": False}, "attends to later tokens"),
    "rope-dynamic": (
        LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rotary embedding is of type dynamic",
    ),
    "rope-dynamic-old-key": (
        LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rotary embedding is of type dynamic",
    ),
    "rope-longrope": (
        TINY
        | {
            "model_type": "phi3",
            "original_max_position_embeddings": 64,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [2.0] * 8,
            },
        },
        "rotary embedding is of type longrope",
    ),
    "mrope": (
        TINY
        | {
            "model_type": "qwen2",
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        "M-RoPE",
    ),
    "qwen3_next": (
        TINY | {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
        "layers of type linear_attention",
    ),
    "llama4": (TINY | {"model_type": "llama4_text"}, "layers of type chunked_attention"),
    "llama4 without positions": (
        TINY
        | {"model_type": "llama4_text", "layer_types": ["full_attention"] * 2}
        | {"no_rope_layers": [1, 0], "attn_temperature_tuning": True, "pad_token_id": 0},
        "attn_temperature_tuning is set, and no_rope_layers has layers without positions",
    ),
    "experts of odd width": (
        TINY | FAMILIES["qwen2_moe"] | {"moe_intermediate_size": 30, "dtype": "float32"},
        "rows of its experts' matrices are 30 numbers in float32 and must be multiples of 16 bytes",
    ),
    "mamba": (
        {"model_type": "mamba", "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2},
        "",
    ),
    "qwen2_vl": ({"model_type": "qwen2_vl"}, "qwen2_vl is a multimodal model"),
    "llava": ({"model_type": "llava"}, "llava is a multimodal model"),
    "gemma3-multimodal": (
        {"model_type": "gemma3", "text_config": {}, "vision_config": {}},
        "gemma3 is a multimodal model",
    ),
    "gpt_neo": (
        SMALL
        | {"model_type": "gpt_neo", "hidden_size": 64, "num_layers": 2, "num_heads": 4}
        | {"attention_types": [[["global", "local"], 1]]},
        "gpt_neo has attention code of its own",
    ),
    # Its attention would work, but transformers does not mark it so.
    "stablelm": (TINY | {"model_type": "stablelm"}, "stablelm has attention code of its own"),
    "lfm2": (
        TINY | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
        "layers of type conv",
    ),
    "diffllama": (
        TINY | {"model_type": "diffllama"},
        "diffllama does not attend once in each of its 2 layers: 4 calls came from 2 layers",
    ),
    "doge": (
        TINY | {"model_type": "doge", "keep_window_size": 2},
        "its layers compute an attention mask of their own",
    ),
    "jetmoe": (
        TINY | {"model_type": "jetmoe"},
        "jetmoe looks at values in the middle of a pass to decide what to compute",
    ),
    "more heads of keys than of queries": (
        TINY | FAMILIES["cohere2"] | {"num_key_value_heads": 16},
        "the numbers of query, key and value heads do not match: 4, 16, 16",
    ),
    "rope of another kind": (
        TINY
        | FAMILIES["gemma3n"]
        | {"rope_parameters": {"full_attention": {"rope_type": {"a": 1}, "rope_theta": 1.0}}},
        "transformers cannot build it",
    ),
}

if "deepseek_v32" in CONFIG_MAPPING:  # as in GLM-5, each token chooses the ones that it reads
    REFUSED["deepseek_v32"] = TINY | {"model_type": "deepseek_v32"}, "layers of type"

QUANTISED: dict[str, tuple[dict[str, Any], str]] = {
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bitsandbytes"),
    "aqlm": ({"quant_method": "aqlm", "nbits_per_codebook": 16}, "aqlm"),
    "hqq": ({"quant_method": "hqq", "bits": 4}, "hqq"),
    "torchao": ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "torchao"),
    "unnamed": ({"load_in_8bit": True}, "missing"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    """The refusal comes before weights are read; the folder has none."""
    values, reason = REFUSED[case]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(SetupError) as caught:
        description(tmp_path)
    problem = caught.value
    assert isinstance(problem, Unsupported)
    assert problem.code == ExitCode.ENVIRONMENT == 5
    assert reason in problem.message
    assert str(tmp_path) in problem.message, "which model is meant"
    assert "\n" not in problem.message and "Error" not in problem.message
    assert problem.hint and all(family in problem.hint for family in ("llama", "mixtral", "gpt2"))


@pytest.mark.parametrize(
    ("function", "more"),
    [
        ("create_chunked_causal_mask", {}),
        ("create_causal_mask", {"or_mask_function": max}),
        ("create_sliding_window_causal_mask", {"block_sequence_ids": torch.zeros(1, 3)}),
    ],
)
def test_other_masks_are_refused(
    function: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family's code makes its masks by these functions, in one place for all layers."""
    module = build(LLAMA | {"sliding_window": 7}, ATTENTION_NAME)
    plain = attention._placeholder

    def changed(_: str, config: Any, *args: Any, **given: Any) -> torch.Tensor:
        return plain(function, config, *args, **(given | more))

    probe(module, "m")
    monkeypatch.setattr(attention, "_placeholder", changed)
    with pytest.raises(Unsupported, match="an attention mask of their own"):
        probe(module, "m")


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("case", QUANTISED)
def test_quantised_weights_are_refused_by_their_method(
    case: str, role: str, tmp_path: Path
) -> None:
    settings, method = QUANTISED[case]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": settings}))
    with pytest.raises(Unsupported) as caught:
        describe(ModelSpec(role, str(tmp_path), None, "auto", "auto"), CPU)
    problem = caught.value
    assert f"quantised, and quantization_config.quant_method is {method}" in problem.message
    assert problem.hint and "gptq or modelopt or mxfp4 work" in problem.hint


@pytest.mark.parametrize("role", ["target", "draft"])
@pytest.mark.parametrize("form", [None, "marlin-24", "nvfp4-pack-quantized"])
def test_formats_that_are_not_read_are_refused_by_their_key(
    form: str | None, role: str, tmp_path: Path
) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}}
    settings = {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": settings}))
    with pytest.raises(SetupError) as caught:
        describe(ModelSpec(role, str(tmp_path), None, "auto", "auto"), CPU)
    assert f"quantization_config.format is {form!r}" in caught.value.message
    assert "float-quantized" in caught.value.hint


EVERY_HEAD = [LayerShape(4, 16, 16)] * 2
# Keys have a rotary part beside the part that values are made from.
LATENT = [LayerShape(4, 16 + 8, 12)] * 2

CACHED = {
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "gemma3n": [LayerShape(2, 16, 16)] * 4,
    "gemma4": [LayerShape(2, 16, 16), LayerShape(2, 32, 32)],
    "gemma4-moe": [LayerShape(2, 16, 16), LayerShape(2, 32, 32)],
    "gpt_bigcode": [LayerShape(1, 16, 16)] * 2,
    "gpt_neox": EVERY_HEAD,
    "mimo_v2_flash": [LayerShape(2, 16, 8), LayerShape(4, 16, 8)],
    "modernbert-decoder": EVERY_HEAD,
    "opt": EVERY_HEAD,
    "youtu": LATENT,
}


class Compared(KnownResults):
    """Runs operators whose results are known too, and compares."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = len(self._known)
        found = super().__torch_dispatch__(func, types, args, kwargs)
        if not func._schema.is_mutable and len(self._known) == known:
            expected = func(*args, **(kwargs or {}))
            assert properties(found) == properties(expected), func
        return found


def properties(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.shape, result.stride(), result.dtype, result.device, result.layout
    return [properties(each) for each in result] if isinstance(result, list | tuple) else result


@pytest.mark.parametrize("family", FAMILIES)
def test_accepted(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shapes of the cache come from the probe, whose operators repeat their results."""
    config = tiny_config(family)
    config.architectures = None
    config.save_pretrained(tmp_path)
    found = description(tmp_path)
    if family in CACHED:
        assert found.layers == CACHED[family]
    else:
        heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
        head = getattr(config, "head_dim", None) or 64 // config.num_attention_heads
        assert found.layers == [LayerShape(heads, head, head)] * 2
    assert all(p.is_meta for p in found.module.parameters()), "nothing is allocated yet"
    monkeypatch.setattr(gate, "KnownResults", Compared)
    assert probe(found.module, "m") == found.layers


def test_the_role_and_name_of_a_refused_draft(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava"}))
    spec = ModelSpec("draft", str(tmp_path), None, "auto", "dummy")
    with pytest.raises(Unsupported, match=str(tmp_path)):
        describe(spec, CPU)


def build(values: dict[str, Any], attention: str) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**(values | {"initializer_range": 0.2}))
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def ungated_error(module: Any, oracle: Any, layers: list[LayerShape]) -> float:
    """Largest logit error of decoding two tokens on a cache that holds three."""
    cache = KVCache(layers, 20, 4, torch.float32, CPU)
    model = PagedModel(module, cache)
    seq = Sequence(0, [5, 17, 31, 60, 8], 5, 40)
    BlockAllocator(20, 4).extend(seq.block_table, 5)
    with torch.inference_mode():
        want = oracle(torch.tensor([seq.tokens])).logits[0, 3:]
    model.forward([Span(seq, 0, 3)], [0])
    got = model.forward([Span(seq, 3, 5)], [2]).logits
    return float((got - want).abs().max())


def unchecked(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Our attention function without its refusals: it ignores arguments that it does not know."""
    known = ("scaling", "sliding_window", "softcap", "s_aux")
    given = {name: more.get(name) for name in known}
    return attention._dispatch(module, query, key, value, None, **given)


AttentionInterface.register("unchecked", unchecked)


class Shapes:
    """Attention that only records the shapes that each layer caches."""

    def __init__(self) -> None:
        self.layers = [LayerShape(4, 16, 16)] * 2

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: object
    ) -> torch.Tensor:
        self.layers[layer] = LayerShape(key.shape[0], key.shape[-1], value.shape[-1])
        return query.new_zeros(query.shape[1], query.shape[0], value.shape[-1])


def ungated(values: dict[str, Any]) -> float:
    """Largest logit error of a family that runs although the gate would refuse it."""
    oracle, module = build(values, "eager"), build(values, "unchecked")
    module.load_state_dict(oracle.state_dict())
    shapes = Shapes()
    attention.attach(module, shapes)
    with torch.inference_mode():
        module(torch.tensor([[5, 17, 31]]), position_ids=torch.arange(3)[None], use_cache=False)
    return ungated_error(module, oracle, shapes.layers)


SPARSE = TINY | {
    "model_type": "minimax_m3_vl_text",
    "layer_types": ["minimax_m3_sparse"] * 2,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_block_size": 2,
    "index_topk_blocks": 1,
    "index_local_blocks": 1,
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "dense_intermediate_size": 64,
}

WRONG: dict[str, dict[str, Any]] = {
    # Does not read the cache.
    "own-attention": REFUSED["bloom"][0],
    # Would read the cache, but also attends to later tokens.
    "bidirectional": REFUSED["bert"][0],
    "layer-type-chunked": TINY
    | {
        "model_type": "llama4_text",
        "attention_chunk_size": 2,
        "head_dim": 16,
        "intermediate_size_mlp": 64,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
        "no_rope_layers": [1, 1],
    },
    "layer-type-linear": TINY
    | {
        "model_type": "qwen3_next",
        "layer_types": ["linear_attention", "full_attention"],
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "convolution": REFUSED["lfm2"][0],
    "two-calls-a-layer": REFUSED["diffllama"][0],
    "own-mask": REFUSED["doge"][0],
}


@pytest.mark.parametrize("rule", WRONG)
def test_without_the_gate_logits_are_wrong(rule: str) -> None:
    assert ungated(WRONG[rule]) > 0.1


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (WRONG["convolution"], "lfm2 mixes neighbouring tokens by convolution"),
        (SPARSE, "its layers ask for attention with block_indices"),
    ],
    ids=["convolution", "unknown-argument"],
)
def test_rules_behind_the_one_for_layer_types(values: dict[str, Any], reason: str) -> None:
    """Not every config names the types of its layers."""
    with torch.device("meta"):
        module = build(values, ATTENTION_NAME)
    with pytest.raises(Unsupported, match=reason):
        probe(module, "m")


def test_rotary_settings_are_found_wherever_a_config_has_them() -> None:
    """Configs have them by layer type, as in gemma3, or under the old key, as in remote code."""
    plain = {"rope_type": "default", "rope_theta": 1e4}
    scaled = {"rope_type": "dynamic", "rope_theta": 1e6, "factor": 2.0}
    by_type = {"sliding_attention": plain, "full_attention": scaled}
    check_config(tiny_config("gemma3", rope_parameters=dict.fromkeys(by_type, plain)), "m")
    old = SimpleNamespace(model_type="own", rope_scaling={"type": "dynamic", "factor": 2.0})
    for config in (tiny_config("gemma3", rope_parameters=by_type), old):
        with pytest.raises(Unsupported, match="its rotary embedding is of type dynamic"):
            check_config(config, "m")


@pytest.mark.parametrize("case", ["rope-dynamic", "rope-longrope"])
def test_without_the_gate_neighbours_change_logits(case: str) -> None:
    """Compares a short sequence alone with one beside a sequence past the table's change."""
    short = {"max_position_embeddings": 16, "original_max_position_embeddings": 16}
    module = build(REFUSED[case][0] | short, ATTENTION_NAME)
    model = PagedModel(module, KVCache([LayerShape(2, 16, 16)] * 2, 40, 4, torch.float32, CPU))
    allocator = BlockAllocator(40, 4)
    seqs = [Sequence(i, list(range(3, 3 + n)), n, 64) for i, n in enumerate((5, 40))]
    for seq in seqs:
        allocator.extend(seq.block_table, len(seq.tokens))
    alone = model.forward([Span(seqs[0], 0, 5)], [5]).logits
    beside = model.forward([Span(seqs[0], 0, 5), Span(seqs[1], 0, 40)], [5, 0]).logits
    assert float((alone - beside).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("case", "crash"), [("mpt", AttributeError), ("gptj", KeyError), ("falcon", KeyError)]
)
def test_without_the_gate_it_crashes(case: str, crash: type[Exception]) -> None:
    values, _ = REFUSED[case]
    oracle = build(values, "eager")
    with pytest.raises(crash):
        ungated_error(build(values, ATTENTION_NAME), oracle, [LayerShape(4, 16, 16)] * 2)


def test_without_the_gate_an_index_of_keys_is_out_of_bounds() -> None:
    """In attention to chosen blocks the index holds only the keys of its own pass."""
    with pytest.raises(RuntimeError, match="out of bounds"):
        ungated(SPARSE)


@pytest.mark.parametrize("case", ["t5", "llava", "qwen2_vl"])
def test_without_the_gate_it_cannot_be_built(case: str) -> None:
    """An encoder or a vision tower has no place in a causal language model."""
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        build(REFUSED[case][0], ATTENTION_NAME)


def test_without_the_gate_quantised_weights_are_not_found(tmp_path: Path) -> None:
    """Such weights have separate names, beside scales. The loader's tests cover the other cases."""
    folder = save_tiny(tmp_path, "llama")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.qweight"] = tensors.pop(f"{name}.weight").to(torch.int32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SetupError, match=f"{name}.weight"):
        load(description(folder), CPU)


def test_with_the_gates_consent_the_same_driver_is_right() -> None:
    """Otherwise the tests above would only show that the driver is wrong."""
    oracle, module = build(LLAMA, "eager"), build(LLAMA, ATTENTION_NAME)
    module.load_state_dict(oracle.state_dict())
    assert ungated_error(module, oracle, [LayerShape(2, 16, 16)] * 2) < 1e-5


@pytest.mark.parametrize("change", ["skipped", "replaced", "repeated"])
def test_every_layer_must_call_exactly_once(change: str) -> None:
    module = build(LLAMA, ATTENTION_NAME)
    layers = module.model.layers
    if change == "skipped":
        del layers[1]
    elif change == "replaced":
        layers[1] = layers[0]
    else:
        once = layers[1].forward
        layers[1].forward = lambda x, **more: once(once(x, **more), **more)
    with pytest.raises(Unsupported, match="does not attend once in each of its 2 layers"):
        probe(module, "m")


def with_more(layer: Any, **given: Any) -> None:
    once = layer.self_attn.forward
    layer.self_attn.forward = lambda *args, **more: once(*args, **(more | given))


def with_values(layer: Any) -> None:
    once = layer.forward
    layer.forward = lambda x, **more: once(x[x > 0], **more)


def with_features(layer: Any) -> None:
    layer.mlp.up_proj = torch.nn.Linear(64, 7, device="meta")


ODD_LAYERS: dict[str, tuple[Callable[[Any], None], str]] = {
    "mask": (
        lambda layer: with_more(layer, attention_mask=torch.zeros(1, 1, 3, 3)),
        "an attention mask of their own",
    ),
    "argument": (lambda layer: with_more(layer, block_indices=3), "attention with block_indices"),
    "values": (with_values, "looks at values in the middle of a pass"),
    "features": (with_features, "a trial pass through llama fails"),
    "convolution": (
        lambda layer: setattr(layer, "mlp", torch.nn.Conv1d(64, 64, 3, padding=1, device="meta")),
        "mixes neighbouring tokens by convolution",
    ),
}


@pytest.mark.parametrize("case", ODD_LAYERS)
def test_one_odd_layer_among_equal_ones_is_refused(case: str) -> None:
    """The code of each layer runs, although most of its operators repeat those of the first."""
    with torch.device("meta"):
        module = build(LLAMA | {"num_hidden_layers": 4}, ATTENTION_NAME)
    change, reason = ODD_LAYERS[case]
    probe(module, "m")
    change(module.model.layers[2])
    with pytest.raises(Unsupported, match=reason):
        probe(module, "m")
