"""The load-time gate: what it refuses, in which words, and that refusing is necessary."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdec_cli.engine.batch import Span
from specdec_cli.engine.kv_cache import BlockAllocator, KVCache, LayerShape
from specdec_cli.engine.types import Sequence
from specdec_cli.errors import ExitCode, SetupError
from specdec_cli.models.attention import ATTENTION_NAME
from specdec_cli.models.gate import Unsupported, probe
from specdec_cli.models.loader import ModelSpec, describe
from specdec_cli.models.paged import PagedModel
from tests.support import _COMMON, CPU, FAMILIES, VOCAB, description, tiny_config

SMALL: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": 2}
LLAMA: dict[str, Any] = _COMMON | {"model_type": "llama"}

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bloom": (
        SMALL | {"model_type": "bloom", "hidden_size": 64, "n_layer": 2, "n_head": 4},
        "attention code of its own",
    ),
    "falcon": (
        _COMMON | {"model_type": "falcon"},
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
    "bert": (_COMMON | {"model_type": "bert"}, "attends to later tokens"),
    "gemma3-bidirectional": (
        _COMMON
        | {"model_type": "gemma3_text", "head_dim": 16, "use_bidirectional_attention": True},
        "attends to later tokens",
    ),
    "rope-dynamic": (
        LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        "rotary embedding is of type dynamic",
    ),
    "rope-dynamic-old-key": (
        LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rotary embedding is of type dynamic",
    ),
    "rope-longrope": (
        _COMMON
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
        _COMMON
        | {
            "model_type": "qwen2",
            "rope_scaling": {"rope_type": "default", "mrope_section": [2, 3, 3]},
        },
        "M-RoPE",
    ),
    "qwen3_next": (
        _COMMON
        | {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention"]},
        "layers of type linear_attention",
    ),
    "llama4": (_COMMON | {"model_type": "llama4_text"}, "layers of type chunked_attention"),
    "mamba": (
        {"model_type": "mamba", "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2},
        "",
    ),
    "qwen2_vl": ({"model_type": "qwen2_vl"}, "qwen2_vl is a multimodal model"),
    "llava": ({"model_type": "llava"}, "llava is a multimodal model"),
    "quantised-8bit": (
        LLAMA | {"quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True}},
        "weights are quantised",
    ),
    "quantised-fp8": (
        LLAMA | {"quantization_config": {"quant_method": "fp8"}},
        "weights are quantised",
    ),
    "quantised-gptq": (
        LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4}},
        "weights are quantised",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_reason(case: str, tmp_path: Path) -> None:
    """Before any weight is read: the folder has none."""
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
    assert problem.hint and "llama" in problem.hint


@pytest.mark.parametrize("family", FAMILIES)
def test_accepted(family: str, tmp_path: Path) -> None:
    """With the shapes of its cache, read off the probe."""
    config = tiny_config(family)
    config.architectures = None
    config.save_pretrained(tmp_path)
    found = description(tmp_path)
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert found.layers == [LayerShape(heads, width, width)] * 2
    assert all(p.is_meta for p in found.module.parameters()), "nothing is allocated yet"


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
    got = model.forward([Span(seq, 3, 5)], [2])
    return float((got - want).abs().max())


@pytest.mark.parametrize("case", ["bloom", "bert"])
def test_without_the_gate_logits_are_wrong(case: str) -> None:
    """bloom never reads the cache; bert would, and looks at later tokens too."""
    values, _ = REFUSED[case]
    oracle, module = build(values, "eager"), build(values, ATTENTION_NAME)
    module.load_state_dict(oracle.state_dict())
    assert ungated_error(module, oracle, [LayerShape(4, 16, 16)] * 2) > 0.1


@pytest.mark.parametrize(
    ("case", "crash"), [("mpt", AttributeError), ("gptj", KeyError), ("falcon", KeyError)]
)
def test_without_the_gate_it_crashes(case: str, crash: type[Exception]) -> None:
    values, _ = REFUSED[case]
    oracle = build(values, "eager")
    with pytest.raises(crash):
        ungated_error(build(values, ATTENTION_NAME), oracle, [LayerShape(4, 16, 16)] * 2)


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
    with pytest.raises(Unsupported, match="attention calls come through"):
        probe(module, "m")
