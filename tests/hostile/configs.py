"""Models with a damaged config.json or generation_config.json, and commands that read them."""

import json
import random
from pathlib import Path
from typing import Any

from specdec_cli.demo import demo_path
from tests.hostile.commands import SHORT, Found, linked, model_in, run_of
from tests.hostile.materials import Materials
from tests.hostile.values import damaged, dumped, encoded, mutated

_TYPES = "t5 bert mamba whisper llava clip gpt2 falcon bloom mpt rwkv jamba qwen2_vl x auto".split()
_ROPES: list[Any] = [
    {"rope_type": "yarn", "factor": 1e12},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0},
    {"rope_type": "linear", "factor": 0},
    {"rope_type": "dynamic", "factor": -1},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0] * 99, "factor": 2},
    {"rope_type": "llama3", "factor": 0, "low_freq_factor": 1, "high_freq_factor": 1},
    {"rope_type": "x", "rope_theta": "x"},
    {"rope_theta": 0},
    {"rope_theta": -1e308, "partial_rotary_factor": 1e6},
    {"full_attention": {"rope_type": "default"}},
    *("yarn", [], 4, {}),
]
_QUANTISED: list[Any] = [
    {"quant_method": method}
    for method in (
        "fp8",
        "mxfp4",
        "gptq",
        "awq",
        "bitsandbytes",
        "compressed-tensors",
        "x",
        8,
        None,
    )
]
_QUANTISED += [
    {"quant_method": "fp8", "weight_block_size": size}
    for size in ([0, 0], [128], [1e12, 1], [-1, 128], "128", {}, [[1], [2]], [3, 5])
]
_KNOWN: dict[str, list[Any]] = {
    "model_type": [*_TYPES, None, 1, []],
    "rope_parameters": _ROPES,
    "rope_scaling": _ROPES,
    "quantization_config": [*_QUANTISED, "fp8", []],
    "layer_types": [["x"] * 8, ["full_attention"], [], "full_attention", ["linear_attention"] * 8],
    "sliding_window": [0, -1, 1, 10**12, "x", 1.5],
    "num_key_value_heads": [3, 0, 16, 1, None],
    "num_attention_heads": [3, 1, 7, 1000],
    "head_dim": [0, 1, 3, 31, 10**9, None],
    "hidden_size": [1, 255, 10**6],
    "vocab_size": [1, 2, 4095, 4097, 10**9],
    "num_hidden_layers": [0, 1, 9, 1000],
    "hidden_act": ["nope", None, 3, "gelu", ["silu"]],
    "torch_dtype": ["float8_e4m3fn", "int8", "complex64", "x", 16, None, "float64"],
    "dtype": ["float8_e4m3fn", "int8", "complex64", "x", 16, None, "float64"],
    "max_position_embeddings": [1, 2, 4_194_304, 2**40, 0],
    "eos_token_id": [[], [[]], -1, 10**12, "x", [None], 4096, True],
    "architectures": [[], None, "x", ["BertModel"], [None], [{}]],
    "auto_map": [{"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Y"}, "x", []],
    "tie_word_embeddings": [False, "no", None, 2],
    "rms_norm_eps": [0, -1, "1e-5", 1e308],
    "initializer_range": [-1, 0, "x", 1e308],
    "text_config": [{}, {"model_type": "llama"}, [], {"text_config": {"text_config": {}}}],
    "attention_bias": [True, "x"],
    "is_encoder_decoder": [True, "x"],
    "num_experts": [4, 10_000],
    "id2label": [{"x": "y"}, {"-1": 3}, []],
    "transformers_version": [3, [], "x", None],
    "attn_implementation": ["flash_attention_2", 3],
    "_attn_implementation": ["flash_attention_2", 3],
    "pad_token_id": [-1, 10**12, "x"],
}


def config(rng: random.Random, folder: Path, materials: Materials) -> Found:
    """A model with another config.json or generation_config.json."""
    source = rng.choice([demo_path("demo:target"), demo_path("demo:draft"), *materials.tiny])
    model = model_in(folder, rng)
    name = "config.json"
    if rng.random() < 0.08 and (source / "generation_config.json").exists():
        name = "generation_config.json"
    values = json.loads((source / name).read_text())
    linked(source, model, name)
    how = rng.choice(["known", "known", "any", "any", "two", "bytes"])
    if how == "bytes":
        data, told = damaged((source / name).read_bytes(), rng)
    else:
        if how == "known" and name == "config.json":
            key = rng.choice(list(_KNOWN))
            values[key] = rng.choice(_KNOWN[key])
            told = f"{key}: {values[key]}"
        else:
            values, told = mutated(values, rng, 2 if how == "two" else 1)
        data = encoded(dumped(values, rng))
    (model / name).write_bytes(data)
    command = run_of(model, rng, is_alone=source in materials.tiny)
    if rng.random() < 0.4:  # sizes that no weights contradict get further
        command += ["--set", "target.load_format=dummy"]
        command += ["--set", "draft.load_format=dummy"] if "--draft" in command else []
    return f"{source.name} {name} {told}", command


def head(rng: random.Random, folder: Path, materials: Materials) -> Found:
    """An EAGLE-3 head with another config."""
    source = demo_path("demo:eagle3")
    model = linked(source, model_in(folder, rng), "config.json")
    values, told = mutated(
        json.loads((source / "config.json").read_text()), rng, rng.choice([1, 1, 2])
    )
    (model / "config.json").write_bytes(encoded(dumped(values, rng)))
    prompt = ["--prompt", "def add(a, b):"]
    return told, ["generate", "demo", "--draft", str(model), "-k", "3", *prompt, *SHORT]
