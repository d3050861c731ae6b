"""Models in GGUF files against transformers' own loading of the same file, and against the model
that was written to it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import dequantize
from gguf.constants import GGML_QUANT_SIZES

from specdec_cli.core.parallel import ALONE, TensorParallel
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.description import describe
from specdec_cli.models.gguf.blocks import KEPT
from specdec_cli.models.gguf.files import read_model
from specdec_cli.models.gguf.header import TensorPlace
from specdec_cli.models.gguf.tensors import FROM_GGUF, is_undone, read_stored
from specdec_cli.models.held import held_bytes, plain_weight
from specdec_cli.models.loader import load
from specdec_cli.models.spec import ModelSpec
from specdec_cli.models.stored import stored_parameters
from tests.engine.test_families import TOLERANCE, Driver
from tests.gguf_files import TYPES, gguf_reference, random_blocks, save_gguf, tiny_model
from tests.support import CPU, decode, greedy_reference, make_engine, paged_model

# Sizes that transformers' tables of keys leave out have its defaults here: it takes no others.
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 128},
    "gemma2": {"head_dim": 32, "sliding_window": 7},
    "gemma3": {"head_dim": 32, "sliding_window": 7},
    "qwen2moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "qwen3moe": {
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
}
MINIMAX: dict[str, Any] = {
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.5,
    },
}
MINIMAX_KEYS = {"minimax-m2.rope.dimension_count": 8, "minimax-m2.expert_gating_func": 2}
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21, 22]]


def spec(file: Path, dtype: str = "auto", load_format: str = "auto") -> ModelSpec:
    return ModelSpec("target", str(file), None, dtype, load_format)


def assert_as_transformers(file: Path) -> None:
    """Equal weights, logits and greedy text."""
    oracle = gguf_reference(file)
    module = load(describe(spec(file), CPU), CPU)
    want = oracle.state_dict()
    assert module.state_dict().keys() == want.keys()
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, want[name]), name
    driver = Driver(paged_model(file, 120, 4), oracle, [19, 6, 33])
    assert driver.feed([(0, 18), (0, 5), (0, 20)]) < TOLERANCE
    found = decode(make_engine(file, None), PROMPTS, 0, max_new_tokens=12)
    for seq, prompt in zip(found, PROMPTS, strict=True):
        assert seq.tokens[len(prompt) :] == greedy_reference(oracle, prompt, 12)


@pytest.mark.parametrize(
    "architecture", [a for a in FROM_GGUF if a not in ("mistral", "minimax-m2")]
)
def test_architectures_as_transformers_loads_them(architecture: str, tmp_path: Path) -> None:
    """It reads no files of architecture mistral: mistral's say llama."""
    model = tiny_model(architecture, **DEFAULTS.get(architecture, {}))
    assert_as_transformers(save_gguf(tmp_path / "m.gguf", architecture, model, TYPES.Q8_0))


@pytest.mark.skipif(
    not hasattr(transformers.integrations.gguf, "convert_gguf_tokenizer"),
    reason="this version of transformers turns all of each head",
)
def test_minimax_as_transformers_loads_it(tmp_path: Path) -> None:
    model, file = tiny_model("minimax-m2", **MINIMAX), tmp_path / "m.gguf"
    assert_as_transformers(save_gguf(file, "minimax-m2", model, TYPES.Q8_0, more=MINIMAX_KEYS))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q6_K", "BF16", "F16"])
def test_types_as_transformers_loads_them(kind: str, tmp_path: Path) -> None:
    # Four times as wide as other tiny models, so with a quarter of their spread.
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
    model = tiny_model("llama", **sizes, initializer_range=0.05)
    assert_as_transformers(save_gguf(tmp_path / "m.gguf", "llama", model, TYPES[kind]))


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
Q4_K_M = {"attn_v": TYPES.Q6_K, "ffn_down": TYPES.Q6_K, "output": TYPES.Q6_K}


def written(file: Path, architecture: str, kind: str, **more: Any) -> Path:
    """A model whose embedding is not its head. Blocks of the K types have 256 numbers."""
    sizes: dict[str, Any] = WIDE if kind.endswith("_K") or kind == "TQ2_0" else {}
    if "moe" in architecture:
        wide = {"moe_intermediate_size": 256, "head_dim": 64}
        sizes = DEFAULTS["qwen3moe"] | sizes | (wide if sizes else {"moe_intermediate_size": 64})
    model = tiny_model(architecture, **sizes, initializer_range=0.05, tie_word_embeddings=False)
    return save_gguf(file, architecture, model, TYPES[kind], **more)


def stored_in(dtype: str, file: Path) -> ModelSpec:
    return ModelSpec("target", str(file), None, dtype, "auto", weights="stored")


@pytest.mark.parametrize(
    ("kind", "architecture", "others"),
    [
        *((kind, "llama", None) for kind in KEPT),
        *((kind, "qwen3moe", None) for kind in ("Q4_0", "Q8_0", "Q4_K")),
        ("Q4_K", "llama", Q4_K_M),
        ("Q4_0", "llama", {"attn_k": TYPES.Q5_1}),
    ],
)
def test_blocks_stay_stored(
    kind: str, architecture: str, others: dict[str, TYPES] | None, tmp_path: Path
) -> None:
    """Their numbers are those of the gguf package, in the module's order of rows, on ranks too."""
    file = written(tmp_path / "m.gguf", architecture, kind, others=others)
    spec = stored_in("float32", file)
    want = dict(load(describe(replace(spec, weights="dequantise"), CPU), CPU).named_parameters())
    for rank in range(3):
        parallel = ALONE if rank == 2 else TensorParallel(rank, 2, None, CPU)
        about = describe(spec, CPU, parallel)
        held = stored_parameters(load(about, CPU))
        count = 2 + 5 * (architecture == "llama")
        assert len(held) >= count and "model.layers.0.self_attn.q_proj.weight" in held
        for name, parameter in held.items():
            numbers = want[name]
            if name in about.shards.parts:
                numbers = about.shards.parts[name].of(numbers)
            assert torch.equal(plain_weight(parameter), numbers), name
            assert held_bytes(parameter) == parameter.value.num_bytes, name
    kinds = [kind, *(other.name for other in (others or {}).values())]
    told = about.notes["weights"]
    assert told.endswith(" as stored") and all(told.count(one) == 2 for one in kinds)
    texts = [
        decode(make_engine(file, None, weights=weights), [[5, 17, 31]], 0, max_new_tokens=8)
        for weights in ("stored", "dequantise")
    ]
    assert texts[0][0].tokens == texts[1][0].tokens


def test_a_mixed_file_stays_stored_as_transformers_computes_it(tmp_path: Path) -> None:
    """Q4_K_M mixes types: query and key in 4 bits and values in 6 make one product in 8 bits."""
    file = written(tmp_path / "m.gguf", "llama", "Q4_K", others=Q4_K_M)
    oracle = gguf_reference(file)
    driver = Driver(paged_model(file, 120, 4, fused=True, weights="stored"), oracle, [19, 6, 33])
    assert driver.feed([(0, 18), (0, 5), (0, 20)]) < TOLERANCE
    found = decode(make_engine(file, None, weights="stored"), PROMPTS, 0, max_new_tokens=12)
    for seq, prompt in zip(found, PROMPTS, strict=True):
        assert seq.tokens[len(prompt) :] == greedy_reference(oracle, prompt, 12)
    exact, halves = (
        stored_parameters(load(describe(stored_in(dtype, file), CPU), CPU))
        for dtype in ("float32", "bfloat16")
    )
    assert len(exact) == len(halves) == 8
    in_4_bits = {name for name, held in exact.items() if held.stored_as.kind == "int4"}
    assert {name.split(".")[-2] for name in in_4_bits} == {"o_proj", "gate_proj", "up_proj"}
    for name, parameter in exact.items():
        (codes, *shared), (same, *rounded) = parameter.value.tensors, halves[name].value.tensors
        assert torch.equal(codes, same), name
        for one, half in zip(shared, rounded, strict=True):
            assert one.dtype == torch.float32 and half.dtype == torch.float16
            assert ((half.float() - one).abs() <= one.abs() * 2**-11).all(), name


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_weights_are_multiplied_by_their_scales(architecture: str, tmp_path: Path) -> None:
    """Files in NVFP4 have scales: one for a matrix, or one for each of its experts."""
    scales = {"blk.0.attn_output.scale": torch.tensor([0.05])}
    names = ["model.layers.0.self_attn.o_proj.weight"]
    if architecture == "qwen3moe":
        scales |= {f"blk.0.ffn_{half}_exps.scale": torch.arange(1.0, 5) for half in ("gate", "up")}
        scales["blk.1.ffn_down_exps.scale"] = torch.arange(2.0, 6)
        names += ["model.layers.0.mlp.experts.gate_up_proj"] * 2
        names += ["model.layers.1.mlp.experts.down_proj"]
    plain = written(tmp_path / "plain.gguf", architecture, "Q8_0")
    scaled = written(tmp_path / "scaled.gguf", architecture, "Q8_0", extra=scales)
    want = load(describe(spec(plain), CPU), CPU).state_dict()
    for name, scale in dict(zip(names, scales.values(), strict=True)).items():
        want[name] *= scale if len(scale) == 1 else scale[:, None, None]
    for weights in ("dequantise", "stored"):
        about = describe(replace(stored_in("float32", scaled), weights=weights), CPU)
        module = load(about, CPU)
        held = stored_parameters(module)
        assert bool(held) == (weights == "stored")
        for name, tensor in module.named_parameters():
            value = plain_weight(held[name]) if name in held else tensor
            assert torch.equal(value, want[name]), name
    short = {"blk.0.attn_q.scale": torch.ones(2)}
    file = written(tmp_path / "short.gguf", architecture, "Q8_0", extra=short)
    with pytest.raises(SetupError, match=r"q_proj.weight .* \(its scale has shape \[2\]\)"):
        load(describe(spec(file), CPU), CPU)


def test_scaled_activations_are_refused(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q.input_scale": torch.ones(1)}
    file = written(tmp_path / "m.gguf", "llama", "Q8_0", extra=extra)
    with pytest.raises(SetupError, match=r"activations have scales \(blk.0.attn_q.input_scale\)"):
        describe(spec(file), CPU)


def test_what_cannot_stay_stored_is_told(tmp_path: Path) -> None:
    file = written(tmp_path / "other.gguf", "llama", "TQ2_0")
    with pytest.raises(UsageError, match=r"none of its matrices is Q4_0 or .* or Q6_K"):
        describe(stored_in("float32", file), CPU)
    file = written(tmp_path / "m.gguf", "llama", "Q4_K")
    place = read_model(file).tensors["blk.0.ffn_up.weight"]
    with file.open("r+b") as stream:
        stream.seek(place.start)
        stream.write(np.float16(60000).tobytes())  # times integers of 6 bits
    load(describe(stored_in("float32", file), CPU), CPU)
    with pytest.raises(SetupError, match=r"up_proj.weight in .* too large for float16"):
        load(describe(stored_in("bfloat16", file), CPU), CPU)


@pytest.mark.parametrize("kind", [k for k in TYPES if is_undone(int(k))], ids=lambda k: k.name)
def test_every_type_is_dequantised(kind: TYPES, tmp_path: Path) -> None:
    """Rows of a matrix are dequantised too, as ranks read them."""
    width, nbytes = GGML_QUANT_SIZES[kind]
    blocks = random_blocks(kind, 3 * 5 * 2, 7)
    (tmp_path / "t").write_bytes(b"front" + blocks.tobytes())
    stored = TensorPlace(tmp_path / "t", (3, 5, 2 * width), int(kind), 5, blocks.size)
    with np.errstate(all="ignore"):
        want = torch.from_numpy(dequantize(blocks.reshape(15, 2 * nbytes), kind))
    want = want.view(3, 5, 2 * width)
    found = read_stored(stored, torch.float32)
    assert torch.equal(found.nan_to_num(), want.nan_to_num())
    rows = read_stored(stored, torch.float32, slice(1, 3))
    assert torch.equal(rows.nan_to_num(), want[1:].nan_to_num())
    assert torch.equal(
        read_stored(stored, torch.bfloat16).nan_to_num(), want.bfloat16().nan_to_num()
    )


LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}
ROPE_KEYS: dict[str, dict[str, Any]] = {
    "llama-linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    "llama-linear-by-default": {"rope.scaling.factor": 4.0},
    "llama-linear-in-old-files": {"rope.scale_linear": 4.0},
    "llama-unscaled": {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
}
ROUND_TRIPS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-untied": ("llama", {}),
    "llama-bias": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", LINEAR),
    "llama-linear-by-default": ("llama", LINEAR),
    "llama-linear-in-old-files": ("llama", LINEAR),
    "llama-unscaled": ("llama", {}),
    "llama3": (
        "llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        },
    ),
    "mistral": ("mistral", {"sliding_window": 7}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma2": (
        "gemma2",
        {"head_dim": 32, "sliding_window": 7, "attn_logit_softcapping": 2.0}
        | {"final_logit_softcapping": 5.0},
    ),
    "phi3": ("phi3", {"sliding_window": 7}),
    "minimax-m2": ("minimax-m2", MINIMAX),
    "qwen3moe": (
        "qwen3moe",
        DEFAULTS["qwen3moe"] | {"head_dim": 16, "moe_intermediate_size": 32},
    ),
}


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_a_written_model_is_read_back(case: str, tmp_path: Path) -> None:
    """Sizes, windows, caps, biases and rotary scaling too, which transformers loses."""
    architecture, values = ROUND_TRIPS[case]
    model = tiny_model(architecture, **values)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    named = "llama" if architecture == "mistral" else None
    more: dict[str, Any] = {}
    if case == "minimax-m2":
        more = MINIMAX_KEYS
    more |= {f"llama.{key}": value for key, value in ROPE_KEYS.get(case, {}).items()}
    extra = {}
    if case == "llama3":  # a file has the quotients of frequencies instead of settings
        plain = 500000.0 ** -(torch.arange(0, 16, 2) / 16)
        extra["rope_freqs.weight"] = plain / model.model.rotary_emb.inv_freq
    file = tmp_path / "m.gguf"
    save_gguf(file, architecture, model, named=named, more=more, extra=extra)
    driver = Driver(paged_model(file, 120, 4), model, [19, 6, 33])
    assert driver.feed([(0, 18), (0, 5), (0, 20)]) < TOLERANCE
