"""The settings of an EAGLE-3 head, read from any of the forms in which heads are published.

SafeAILab and SpecForge write a flat llama config. Model-Optimizer adds `eagle_config`. The config
of speculators holds the layer's settings in `transformer_layer_config`. DeepSpec copies the
target's config and adds `target_layer_ids`. Reads no weights.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

from specdec_cli.core.kv_cache import LayerShape
from specdec_cli.core.parallel import TensorParallel
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.config_file import config_file
from specdec_cli.recipe.choices.eagle3 import Counting, Dialect, Eagle3Keys, dialect_of
from specdec_cli.text import first_line, shown

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_BODIES = ("llama", "qwen3")
# The tables of other kinds depend on the longest position of a batch.
_ROPES = ("default", "linear", "llama3", "yarn")
_DEFAULT_ROPE_BASE = 10000.0  # heads without rope_theta were trained with it, whatever the target's
_DEFAULT_NUM_AUX = 3
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"


class Other(NamedTuple):
    """A convention that tools read differently: how it was read, and who reads it otherwise.

    changes: the fields of `HeadConfig` that are then others.
    """

    told: str
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head's settings, by its config unless `overridden`.

    name: of the checkpoint, for messages. has_head_norms: whether queries and keys are normed, as
    in qwen3. hidden_size: of the head. target_hidden_size: of the target. vocab_size: of the
    target. draft_vocab_size: number of ids that the head can propose. activation: as
    `ops.norm_gate_up` names it. rope: transformers' `rope_parameters`; the head's own, never the
    target's. windows: sliding window of each layer, 0 for none. aux_ids: the config's ids of the
    target's layers, None where it has none. counting: whether an id means a layer's input or its
    output. norm_before_residual: whether the first residual is the normed hidden state.
    norm_before_fc: whether one norm is applied to all features. fc_norm: whether each layer's
    features have a norm of their own. feeds_norm: whether the next step is fed the hidden state
    after the final norm. ties_head: whether the embedding serves as the head. is_wide: whether
    every layer reads the embedding, and not the first one alone. num_target_layers: layers of the
    target; None where the config does not say. dtype: of the checkpoint, None where it does not
    say. others: the ways in which tools read it differently.
    """

    name: str
    dialect: Dialect
    has_head_norms: bool
    hidden_size: int
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    activation: str
    eps: float
    rope: Mapping[str, Any]
    max_position_embeddings: int
    windows: tuple[int, ...]
    attention_bias: bool
    mlp_bias: bool
    aux_ids: tuple[int, ...] | None
    counting: Counting
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    feeds_norm: bool
    ties_head: bool
    is_wide: bool
    num_target_layers: int | None
    dtype: torch.dtype | None
    others: tuple[Other, ...]

    @property
    def num_aux(self) -> int:
        """Number of the target's layers whose hidden states the head reads."""
        return _DEFAULT_NUM_AUX if self.aux_ids is None else len(self.aux_ids)

    @property
    def cache_layers(self) -> list[LayerShape]:
        """The entries of the head's cache."""
        return [LayerShape(self.num_kv_heads, self.head_dim, self.head_dim)] * self.num_layers

    def on(self, parallel: TensorParallel) -> Self:
        """The settings of one rank's part: its heads, and its share of the MLP's width."""
        size = parallel.size
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, self.num_kv_heads // size),
            intermediate_size=self.intermediate_size // size,
        )

    def reads_embedding(self, layer: int) -> bool:
        """Whether `layer` reads embedding and hidden state, 2 * hidden_size numbers."""
        return layer == 0 or self.is_wide

    def feature_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """The hidden states of the target that the head reads, in transformers' counting.

        Raises `SetupError` for a layer that the target does not have. The last layer's output is
        refused too: transformers' last hidden state has passed the final norm.
        """
        n = num_target_layers
        found: tuple[int, ...] = (2, n // 2, n - 3)
        if self.aux_ids is not None:
            found = tuple(i + (self.counting == "outputs") for i in self.aux_ids)
        if sorted(set(found)) != list(found) or not 0 <= found[0] <= found[-1] < n:
            told = f"{shown(list(self.aux_ids))} as {self.counting}" if self.aux_ids else "none"
            raise SetupError(
                f"the EAGLE-3 head {self.name} reads hidden states {shown(list(found))} of a "
                f"target that has {n} layers (its config names {told})",
                "the head belongs to another target, or its layer ids count from elsewhere; "
                "speculation.eagle3_layers replaces them",
            )
        return found


def overridden(config: HeadConfig, keys: Eagle3Keys, num_target_layers: int) -> HeadConfig:
    """The config with the layers that a recipe chooses, and its own layers among `others`.

    Raises `UsageError`, which names the key, for layers that head or target cannot have.
    """
    others = tuple(other for other in config.others if "counting" not in other.changes)
    ids, own = config.aux_ids, {"aux_ids": config.aux_ids, "counting": config.counting}
    named = "no layers" if ids is None else f"{shown(list(ids))} as {config.counting} of layers"
    if keys.eagle3_layers is not None:
        layers, last = keys.eagle3_layers, num_target_layers - 1
        told = f"speculation.eagle3_layers is {shown(list(layers))}"
        if len(layers) != config.num_aux:
            raise UsageError(f"{told}: the head {config.name} reads {config.num_aux} hidden states")
        if layers[-1] > last:
            raise UsageError(
                f"{told}: the target has {num_target_layers} layers, so hidden states 0 to {last}",
                "a hidden state's number is that of the layer which reads it",
            )
        told = f"speculation.eagle3_layers: in place of the config's, which names {named}"
        others = (*others, Other(told, own))
        return replace(config, aux_ids=layers, counting="inputs", others=others)
    if keys.eagle3_counting is not None:
        if ids is None:
            raise UsageError(
                f"speculation.eagle3_counting: the config of the head {config.name} names no "
                "layers that could be counted",
                "set speculation.eagle3_layers instead",
            )
        counting = keys.eagle3_counting
        told = f"speculation.eagle3_counting: {counting}, while the config by itself names {named}"
        return replace(config, counting=counting, others=(*others, Other(told, own)))
    return config


def read_head_config(name: str, folder: Path) -> HeadConfig:
    """The settings of the head in `folder`.

    Raises `SetupError`, which names the key, for a config that is damaged, that describes no
    EAGLE-3 head, or that asks for what is not built.
    """
    raw = config_file(name, folder)
    dialect = dialect_of(raw)
    if dialect is None:
        raise SetupError(
            f"{name} is no EAGLE-3 head",
            "its config.json has no eagle_config, speculators_model_type, draft_vocab_size or "
            "architecture with Eagle3 in its name",
        )
    try:
        return _Reader(name, dialect, raw).read()
    except (TypeError, ValueError, AttributeError) as problem:
        raise SetupError(
            f"cannot read config.json of the EAGLE-3 head {name}: {first_line(problem)}",
            "it is damaged or was edited: a key has a value of another kind",
        ) from problem


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads one config, `raw`, whose dialect is known."""

    name: str
    dialect: Dialect
    raw: dict[str, Any]

    def read(self) -> HeadConfig:
        self._refuse_other_kinds()
        body = self._body()
        hidden, heads = self._count(body, "hidden_size"), self._count(body, "num_attention_heads")
        layers, vocab = self._count(body, "num_hidden_layers"), self._count(body, "vocab_size")
        if "head_dim" not in body and hidden % heads:
            raise self._bad("num_attention_heads", heads, f"it does not divide {hidden}")
        head_dim = self._count(body, "head_dim", hidden // heads)
        kv_heads = self._count(body, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise self._bad("num_key_value_heads", kv_heads, f"it does not divide {heads}")
        if head_dim % 2:
            raise self._bad("head_dim", head_dim, "rotary embeddings turn pairs")
        draft_vocab = self._count(self.raw, "draft_vocab_size", vocab)
        if draft_vocab > vocab:
            raise self._bad("draft_vocab_size", draft_vocab, f"the vocabulary has {vocab} ids")
        activation = body.get("hidden_act", "silu")
        if activation not in _ACTIVATIONS:
            raise self._bad("hidden_act", activation, "silu and gelu_pytorch_tanh are built")
        norm_before_fc, fc_norm = self._flag("norm_before_fc"), self._flag("fc_norm")
        if norm_before_fc and fc_norm:
            raise self._bad("norm_before_fc", True, "fc_norm is true as well")
        ties_head = bool(body.get("tie_word_embeddings", False))
        if ties_head and draft_vocab != vocab:
            raise self._bad("tie_word_embeddings", True, "the draft's vocabulary is another")
        aux_ids, counting = self._aux_ids()
        return HeadConfig(
            name=self.name,
            dialect=self.dialect,
            has_head_norms=body["model_type"] == "qwen3",
            hidden_size=hidden,
            target_hidden_size=self._count(self.raw, "target_hidden_size", hidden),
            vocab_size=vocab,
            draft_vocab_size=draft_vocab,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=self._count(body, "intermediate_size"),
            activation=_ACTIVATIONS[activation],
            eps=self._eps(body),
            rope=self._rope(body),
            max_position_embeddings=self._count(body, "max_position_embeddings", 2048),
            windows=self._windows(body, layers),
            attention_bias=bool(body.get("attention_bias", False)),
            mlp_bias=bool(body.get("mlp_bias", False)),
            aux_ids=aux_ids,
            counting=counting,
            norm_before_residual=self._flag("norm_before_residual"),
            norm_before_fc=norm_before_fc,
            fc_norm=fc_norm,
            feeds_norm=self._flag("norm_output"),
            ties_head=ties_head,
            is_wide=self.dialect == "deepspec",
            num_target_layers=self._count(self.raw, "num_target_layers", 0) or None,
            dtype=self._dtype(body),
            others=tuple(self._others()),
        )

    def _refuse_other_kinds(self) -> None:
        nested = self.raw.get("eagle_config") or {}
        if nested.get("use_aux_hidden_state") is False:
            raise self._bad("eagle_config.use_aux_hidden_state", False, "that is no EAGLE-3 head")
        if (nested.get("parallel_draft_step") or 1) != 1:
            steps = nested["parallel_draft_step"]
            raise self._bad("eagle_config.parallel_draft_step", steps, "only 1 is built")
        if self.raw.get("quantization_config"):
            raise self._bad("quantization_config", "…", "heads are read unquantised")

    def _body(self) -> dict[str, Any]:
        """The settings of the layers."""
        body = self.raw
        if self.dialect == "speculators":
            body = self.raw.get("transformer_layer_config") or {}
            if not isinstance(body, dict) or not body:
                raise self._bad("transformer_layer_config", body, "it holds a layer's settings")
        kind = body.get("model_type", "llama")
        # SpecForge's configs for phi4 and QwQ give the target's type; the class has llama layers.
        classes = self.raw.get("architectures") or ()
        if kind not in _BODIES and body is self.raw and "LlamaForCausalLMEagle3" in classes:
            kind = "llama"
        if kind not in _BODIES:
            raise self._bad("model_type", kind, f"{' and '.join(_BODIES)} are built")
        return body | {"model_type": kind}

    def _aux_ids(self) -> tuple[tuple[int, ...] | None, Counting]:
        """The config's ids, and whether they mean a layer's input, as vLLM and speculators count,
        or its output, as Model-Optimizer, SGLang and DeepSpec do."""
        key, ids, counting = _AUX_IDS, self.raw.get(_AUX_IDS), "inputs"
        if self.dialect == "deepspec":
            key, ids, counting = "target_layer_ids", self.raw["target_layer_ids"], "outputs"
        nested = (self.raw.get("eagle_config") or {}).get(_AUX_IDS)
        if ids is None and nested:
            key, ids, counting = f"eagle_config.{_AUX_IDS}", nested, "outputs"
        if not ids:
            return None, "inputs"
        if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
            raise self._bad(key, ids, "it has to be a list of layers")
        if sorted(set(ids)) != ids:
            raise self._bad(key, ids, "layers are read in ascending order")
        return tuple(ids), "outputs" if counting == "outputs" else "inputs"

    def _rope(self, body: dict[str, Any]) -> dict[str, Any]:
        """transformers' `rope_parameters`, from that key or the older two."""
        stored = body.get("rope_parameters") or body.get("rope_scaling") or {}
        if not isinstance(stored, dict):
            raise self._bad("rope_scaling", stored, "it has to be a mapping")
        for kind in ("full_attention", "sliding_attention"):
            if isinstance(stored.get(kind), dict):
                raise self._bad("rope_parameters", kind, "one embedding for all layers is built")
        rope = dict(stored)
        kind = rope.pop("type", None)
        rope["rope_type"] = rope.get("rope_type") or kind or "default"
        if rope["rope_type"] not in _ROPES or "mrope_section" in rope:
            raise self._bad("rope_type", rope["rope_type"], f"{', '.join(_ROPES)} are built")
        if rope.get("partial_rotary_factor", body.get("partial_rotary_factor") or 1.0) != 1.0:
            raise self._bad("partial_rotary_factor", "…", "heads turn as a whole")
        base = rope.get("rope_theta", body.get("rope_theta"))
        base = _DEFAULT_ROPE_BASE if base is None else base
        if type(base) not in (int, float) or not 0 < base < math.inf:
            raise self._bad("rope_theta", base, "it has to be a number above 0")
        rope["rope_theta"] = float(base)
        return rope

    def _windows(self, body: dict[str, Any], layers: int) -> tuple[int, ...]:
        kinds = body.get("layer_types") or ["full_attention"] * layers
        if len(kinds) < layers or set(kinds) - {"full_attention", "sliding_attention"}:
            raise self._bad("layer_types", kinds, f"it has to name attention of {layers} layers")
        # qwen3 has windows only where it is told so twice.
        is_used = body.get("use_sliding_window", body["model_type"] != "qwen3")
        if "sliding_attention" not in kinds[:layers] or not is_used:
            return (0,) * layers
        window = self._count(body, "sliding_window")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])

    def _eps(self, body: dict[str, Any]) -> float:
        eps = body.get("rms_norm_eps", 1e-6)
        if not isinstance(eps, int | float) or not 0 <= eps < 1:
            raise self._bad("rms_norm_eps", eps, "it has to be a small number")
        return float(eps)

    def _dtype(self, body: dict[str, Any]) -> torch.dtype | None:
        for settings in (self.raw, body):
            named = settings.get("dtype") or settings.get("torch_dtype")
            found = getattr(torch, str(named).removeprefix("torch."), None)
            if isinstance(found, torch.dtype):
                return found
        return None

    def _others(self) -> list[Other]:
        found = []
        if (self.raw.get("eagle_config") or {}).get(_AUX_IDS) and not self.raw.get(_AUX_IDS):
            told = f"eagle_config.{_AUX_IDS}: read as outputs of layers, as SGLang does"
            found.append(Other(told, {"counting": "inputs"}))
        if self.dialect == "speculators" and "norm_before_residual" not in self.raw:
            told = "norm_before_residual: not given, read as false; vLLM takes true"
            found.append(Other(told, {"norm_before_residual": True}))
        if self.dialect != "speculators" and self.raw.get("norm_output"):
            told = (
                "norm_output: read as vLLM and SGLang do, so steps are fed normed hidden states; "
                "SpecForge trains on hidden states before the norm"
            )
            found.append(Other(told, {"feeds_norm": False}))
        return found

    def _count(self, settings: dict[str, Any], key: str, default: int | None = None) -> int:
        """A positive number; `default` where the key is missing or null."""
        value = settings.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise self._bad(key, value, "it has to be a number above 0")
        return value

    def _flag(self, key: str) -> bool:
        value = self.raw.get(key)
        if value is not None and type(value) is not bool:
            raise self._bad(key, value, "it has to be true or false")
        return bool(value)

    def _bad(self, key: str, value: object, why: str) -> SetupError:
        return SetupError(
            f"config.json of the EAGLE-3 head {self.name}: {key} is {shown(value)}: {why}"
        )
