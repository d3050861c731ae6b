"""Make transformers' config for a model in a GGUF file.

transformers has tables that map GGUF keys to config keys, but they leave out keys that change a
model's results: rotary scaling, sizes of heads and experts, softcaps and windows. This module reads
these keys, or refuses the model.
"""

import math
from typing import Any

import torch
from transformers import CONFIG_MAPPING
from transformers.integrations.ggml import GGUF_CONFIG_DEFAULTS_MAPPING, GGUF_CONFIG_MAPPING

from specdec_cli.errors import SetupError
from specdec_cli.models.config_file import check_numbers
from specdec_cli.models.gguf.header import Header, name_of
from specdec_cli.models.gguf.tensors import (
    FROM_GGUF,
    architecture_of,
    check_kinds,
    read_stored,
)
from specdec_cli.models.refusals import Unsupported
from specdec_cli.text import one_line, shown

_TEXT_ONLY = {"gemma3": "gemma3_text"}
# Architectures and layer counts of the 27B models. They derive the scale of queries
# from hidden_size / heads instead of the head size, but no key in the file says so.
_OTHER_SCALE = {("gemma2", 46), ("gemma3", 62)}
_PLAIN = {"F32": None, "F16": "float16", "BF16": "bfloat16"}
_SIGMOID = 2  # value of `expert_gating_func` for sigmoid scores of experts
_SPECIAL = ("bos", "eos", "eot", "eom")
_ROTARY_FACTORS = "rope_freqs.weight"


def gguf_config(name: str, header: Header) -> Any:
    """Return transformers' config for the model in a GGUF file. Raises `SetupError` for impossible
    values, and `Unsupported` for a model that cannot run here."""
    architecture = architecture_of(name, header)
    check_kinds(name, header)
    values = _mapped(name, architecture, header)
    check_numbers(name, values, "the GGUF file")
    values["eos_token_id"] = _ends(name, header, values)
    for key in ("rms_norm_eps", "rope_theta"):
        number = values.get(key, 1.0)
        if type(number) not in (int, float) or not (math.isfinite(number) and number > 0):
            raise _not_possible(name, key, number, "it must be above 0")
    values["dtype"] = _dtype(header)
    try:
        config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
    except Exception as problem:
        reason = f"transformers cannot make its config ({one_line(str(problem))})"
        raise Unsupported(name, reason) from problem
    _check_heads(name, architecture, header, config)
    if architecture == "minimax-m2" and values.get("scoring_func", _SIGMOID) != _SIGMOID:
        raise Unsupported(name, "its router does not choose experts by sigmoids")
    _set_rotary(name, architecture, header, config)
    return config


def _mapped(name: str, architecture: str, header: Header) -> dict[str, Any]:
    """Return the config's keys and their values. Most come from transformers' tables; those that
    the tables leave out are added. Raises `SetupError` if the file has a list for one of them."""

    def one(key: str) -> Any:
        found = header.values.get(key)
        if isinstance(found, list):
            raise _not_possible(name, key, found, "it must be one value, not a list")
        return found

    known = FROM_GGUF[architecture]
    # transformers distinguishes mistral from llama by the model's name.
    is_mistral = architecture == "llama" and header.values.get("general.name") == "mistral"
    family = "mistral" if is_mistral else known
    values: dict[str, Any] = dict(GGUF_CONFIG_DEFAULTS_MAPPING.get(family) or {})
    tables = {"tokenizer": GGUF_CONFIG_MAPPING["tokenizer"]}
    tables[architecture] = GGUF_CONFIG_MAPPING[family]
    for prefix, table in tables.items():
        for key, wanted in table.items():
            found = one(f"{prefix}.{key}")
            if found is not None and wanted is not None:
                values[wanted] = found
    values["model_type"] = _TEXT_ONLY.get(family, family)
    values["tie_word_embeddings"] = "output.weight" not in header.tensors
    if "vocab_size" not in values and isinstance(
        tokens := header.values.get("tokenizer.ggml.tokens"), list
    ):
        values["vocab_size"] = len(tokens)

    def said(key: str) -> Any:
        return one(f"{architecture}.{key}")

    more = {
        "head_dim": said("attention.key_length"),
        "moe_intermediate_size": said("expert_feed_forward_length"),
        "shared_expert_intermediate_size": said("expert_shared_feed_forward_length"),
        "attn_logit_softcapping": said("attn_logit_softcapping"),
        "final_logit_softcapping": said("final_logit_softcapping"),
    }
    if family == "phi3":
        del more["head_dim"]  # phi3's files have no such key
    if family in ("phi3", "mistral"):
        more["sliding_window"] = said("attention.sliding_window")
    if family in ("llama", "mistral", "qwen2"):
        del more["head_dim"]  # the tables take it from rope.dimension_count, if present
    if family == "llama" and "blk.0.attn_q.bias" in header.tensors:
        more["attention_bias"] = True
    if family == "llama" and "blk.0.ffn_gate.bias" in header.tensors:
        more["mlp_bias"] = True
    if (architecture, values.get("num_hidden_layers")) in _OTHER_SCALE:
        heads, width = values.get("num_attention_heads"), values.get("hidden_size")
        if type(heads) is int and type(width) is int and heads > 0:
            more["query_pre_attn_scalar"] = width // heads
    return values | {key: value for key, value in more.items() if value is not None}


def _ends(name: str, header: Header, values: dict[str, Any]) -> Any:
    """Return the ids that end a text: a list if there are several, None if there is none. Raises
    `SetupError` if a special id in the file is not in the vocabulary."""
    size, ends = values.get("vocab_size") or math.inf, [values.get("eos_token_id")]
    for special in _SPECIAL:
        found = header.values.get(key := f"tokenizer.ggml.{special}_token_id")
        if found is not None and not (type(found) is int and 0 <= found < size):
            raise _not_possible(name, key, found, f"it must be a token's id, below {size}")
        ends += [found] if special in ("eot", "eom") else []
    found_ends = list(dict.fromkeys(end for end in ends if end is not None))
    return found_ends if len(found_ends) > 1 else (found_ends or [None])[0]


def _not_possible(name: str, key: str, value: object, hint: str) -> SetupError:
    return SetupError(f"the GGUF file of {name}: {key} is {shown(value)}", hint)


def _dtype(header: Header) -> str | None:
    """Return the name of the dtype in which to run an unquantised file, or None if any tensor is
    quantised. If all tensors are float32, the dtype is float32. Otherwise it is the dtype of the
    16-bit tensors, or bfloat16 if both 16-bit dtypes occur."""
    kinds = {name_of(t.kind) for t in header.tensors.values()}
    if not kinds <= _PLAIN.keys():
        return None
    halves = [dtype for kind in sorted(kinds) if (dtype := _PLAIN[kind])]
    return "bfloat16" if "bfloat16" in halves else "float16" if halves else "float32"


def _check_heads(name: str, architecture: str, header: Header, config: Any) -> None:
    """Raise `Unsupported` for head sizes and experts that a transformers config cannot express. For
    minimax-m2, also set in `config` which share of each head is rotated."""
    experts = header.values.get(f"{architecture}.expert_count")
    if experts and not any(hasattr(config, key) for key in ("num_experts", "num_local_experts")):
        raise Unsupported(name, f"transformers reads no experts from GGUF files of {architecture}")
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None:
        head_dim = config.hidden_size // max(1, config.num_attention_heads)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        found = header.values.get(f"{architecture}.{key}", head_dim)
        if key == "rope.dimension_count" and architecture == "minimax-m2" and type(found) is int:
            config.rope_parameters["partial_rotary_factor"] = found / head_dim
            found = head_dim
        if found != head_dim:
            raise Unsupported(name, f"{key} is {shown(found)}, but its heads have {head_dim}")


def _set_rotary(name: str, architecture: str, header: Header, config: Any) -> None:
    """Add the file's scaling of rotary embeddings to `config`, because transformers' tables leave
    this scaling out. Raises `Unsupported` for a scaling that cannot run here."""
    if any(tensor.startswith("rope_factors_") for tensor in header.tensors):
        raise Unsupported(name, "its rotary embedding is of type longrope")
    said = f"{architecture}.rope.scaling"
    kind = header.values.get(f"{said}.type", "linear")  # the default in llama.cpp
    old = header.values.get(f"{architecture}.rope.scale_linear")
    factor = header.values.get(f"{said}.factor", old) or 1.0
    settings: dict[str, Any] = {}
    if kind == "linear" and type(factor) is float and factor > 0:
        settings = {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    elif kind != "none":
        raise Unsupported(name, f"its rotary embedding is scaled as {shown(kind)}")
    rope = config.rope_parameters
    if _ROTARY_FACTORS in header.tensors:
        settings = _llama3(name, header, config)
    elif not settings:
        return
    rope.get("full_attention", rope).update(settings)


def _llama3(name: str, header: Header, config: Any) -> dict[str, Any]:
    """Return the settings of llama3's rotary embedding. Raises `Unsupported` if they do not
    reproduce the factors in the file."""
    stored = read_stored(header.tensors[_ROTARY_FACTORS], torch.float32).flatten()
    factor = float(stored.max())
    settings = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theta, dim = float(config.rope_parameters["rope_theta"]), 2 * stored.numel()
    turns = 8192 / (2 * math.pi * theta ** (torch.arange(0, dim, 2).double() / dim))
    smooth = ((turns - 1.0) / 3.0).clamp(0.0, 1.0)
    factors = 1 / (smooth + (1 - smooth) / factor)
    if not torch.allclose(factors, stored.double(), rtol=1e-3):
        raise Unsupported(name, f"its rotary factors ({_ROTARY_FACTORS}) are not llama3's")
    return settings
