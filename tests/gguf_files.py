"""GGUF files of tiny models, written with the gguf package's own writer and quantisation."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFValueType, GGUFWriter, get_tensor_name_map
from gguf.constants import GGML_QUANT_SIZES, MODEL_ARCH_NAMES, GGMLQuantizationType
from gguf.quants import quantize
from transformers import AutoModelForCausalLM

from tests.support import CPU, TINY

TYPES = GGMLQuantizationType
# Where a block's scales are, as half floats. Any bytes make a block, if its scales are sane.
_SCALES = {TYPES.Q4_K: (0, 2), TYPES.Q5_K: (0, 2), TYPES.Q6_K: (208,)}
_FAMILY_OF = {
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "minimax-m2": "minimax_m2",
    "gemma3": "gemma3_text",
}
_KEYS = [
    ("block_count", "num_hidden_layers"),
    ("context_length", "max_position_embeddings"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.sliding_window", "sliding_window"),
    ("attention.key_length", "head_dim"),
    ("vocab_size", "vocab_size"),
    ("expert_count", "num_experts"),
    ("expert_count", "num_local_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
    ("expert_shared_feed_forward_length", "shared_expert_intermediate_size"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
]


def tiny_model(architecture: str, seed: int = 0, **values: Any) -> Any:
    """A random model, whose norms and biases are not neutral."""
    from transformers import AutoConfig

    torch.manual_seed(seed)
    # The file has it in single precision.
    shape = TINY | {"rms_norm_eps": float(np.float32(1e-6))}
    kind = _FAMILY_OF.get(architecture, architecture)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape | values))
    with torch.no_grad():
        stored = model.state_dict()
        buffers = [tensor for name, tensor in model.named_buffers() if name in stored]
        for tensor in [*model.parameters(), *buffers]:
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor) * 0.1)
    return model.eval()


def save_gguf(
    file: Path,
    architecture: str,
    model: Any,
    kind: GGMLQuantizationType = TYPES.F32,
    *,
    named: str | None = None,
    more: dict[str, Any] | None = None,
    extra: dict[str, torch.Tensor] | None = None,
    others: dict[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write a model. named: the family whose names of tensors it has. more: keys beside those of
    the config; None leaves one out. extra: tensors that the model lacks. others: types in place of
    `kind`, by the last part of a tensor's name before "weight"."""
    writer = GGUFWriter(str(file), architecture)
    config = model.config
    rope = config.rope_parameters
    values: dict[str, Any] = {
        f"{architecture}.{key}": found
        for key, name in _KEYS
        if (found := getattr(config, name, None)) is not None
    }
    if named == "llama" or architecture == "llama":
        values[f"{architecture}.rope.dimension_count"] = config.head_dim
    values[f"{architecture}.rope.freq_base"] = float(rope.get("full_attention", rope)["rope_theta"])
    values[f"{architecture}.attention.layer_norm_rms_epsilon"] = config.rms_norm_eps
    values |= {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
    values["tokenizer.ggml.padding_token_id"] = 0  # the default of phi3 is beyond tiny vocabularies
    for key, value in (values | (more or {})).items():
        if value is not None:
            write_value(writer, key, value)
    tensors = file_tensors(architecture, model, named) | (extra or {})
    for name, tensor in tensors.items():
        array, is_matrix = tensor.float().numpy(), tensor.dim() > 1 and "ffn_gate_inp" not in name
        own = (others or {}).get(name.split(".")[-2], kind)
        stored = own if is_matrix else TYPES.F32
        writer.add_tensor(name, packed(array, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def write_value(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a key, with the kind of number that such files have."""
    if isinstance(value, list):
        writer.add_array(key, value)
        return
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    writer.add_key_value(key, value, kinds.get(type(value), GGUFValueType.STRING))


def file_tensors(
    architecture: str, model: Any, named: str | None = None
) -> dict[str, torch.Tensor]:
    """The model's tensors by their names and in their layouts in a file, slowest dimension first.

    Rotary pairs of llama lie side by side there, gemma's norms are greater by one, and gates and
    values of experts apart.
    """
    number = next(n for n, name in MODEL_ARCH_NAMES.items() if name == (named or architecture))
    config = model.config
    table = get_tensor_name_map(number, config.num_hidden_layers)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            block = name.split(".")[2]
            halves = tensor.chunk(2, dim=1)
            for half, value in zip(("gate", "up"), halves, strict=True):
                found[f"blk.{block}.ffn_{half}_exps.weight"] = value.contiguous()
            continue
        if name.endswith("e_score_correction_bias"):
            found[f"blk.{name.split('.')[2]}.exp_probs_b.bias"] = tensor
            continue
        base, _, leaf = (
            name.rpartition(".") if "down_proj" not in name[-9:] else (name, "", "weight")
        )
        stored = table.get_name(base)
        assert stored is not None, name
        for part, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if "llama" in (architecture, named) and stored.endswith(f"attn_{part}"):
                halves = tensor.unflatten(0, (heads, 2, tensor.shape[0] // heads // 2))
                tensor = halves.transpose(1, 2).flatten(0, 2)
        if architecture.startswith("gemma") and stored.endswith("norm"):
            tensor = tensor + 1
        if stored.endswith("shexp") and tensor.shape[0] == 1:
            tensor = tensor[0]
        found[f"{stored}.{leaf}"] = tensor
    return found


def packed(array: np.ndarray[Any, Any], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Numbers in a type: quantised, or random blocks where the package cannot quantise."""
    if kind == TYPES.F32:
        return array.astype(np.float32)
    if kind not in _SCALES:
        return np.asarray(quantize(array, kind))
    width, nbytes = GGML_QUANT_SIZES[kind]
    blocks = random_blocks(kind, array.size // width, array.size)
    for at in _SCALES[kind]:
        blocks[:, at : at + 2].view(np.float16)[:] = 0.05 / 31 / (16 if at < 200 else 60)
    return blocks.reshape(*array.shape[:-1], array.shape[-1] // width * nbytes)


def random_blocks(kind: GGMLQuantizationType, count: int, seed: int) -> np.ndarray[Any, Any]:
    generator = np.random.default_rng(seed)
    return generator.integers(0, 256, (count, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)


def gguf_reference(file: Path) -> Any:
    """The oracle: transformers' own loading of a file, with its plain attention."""
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, attn_implementation="eager", dtype=torch.float32
    )
    model.set_experts_implementation("eager")
    return model.to(CPU).eval()
