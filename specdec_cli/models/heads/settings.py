"""Read and check the settings of a head's layers in its config.json. No weights are read."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from specdec_cli.errors import SetupError
from specdec_cli.models.formats import FORMATS, Settings
from specdec_cli.models.heads.layers import CONFIGS
from specdec_cli.text import first_line, shown

_ACTIVATIONS = {a: a for a in ("silu", "gelu_pytorch_tanh")} | {"swish": "silu"}
# The supported kinds of rotary embedding. The tables of other kinds depend on the largest position
# in a batch, so they cannot be computed once.
_ROPES = ("default", "linear", "llama3", "yarn")
NO_WINDOWS = "layers with a sliding window are not supported"
_DEFAULT_ROPE_BASE = 10000.0  # for a head without rope_theta; the target's base is not used


@contextmanager
def reading(noun: str, name: str) -> Iterator[None]:
    """Raise a `SetupError` for errors in the `with` block, which reads a head's config.json."""
    try:
        yield
    except (TypeError, ValueError, AttributeError, LookupError) as problem:
        raise SetupError(
            f"cannot read config.json of the {noun} {name}: {first_line(problem)}",
            "it is damaged or was edited: a key has a value of the wrong type",
        ) from problem


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """The settings in a head's config.json. All methods raise a `SetupError` that names the key of
    a bad value.

    noun: what messages call this kind of head.
    name: the checkpoint's name, for messages.
    raw: the whole file.
    body: the part that describes the layers.
    """

    noun: str
    name: str
    raw: dict[str, Any]
    body: dict[str, Any]

    @property
    def vocab_size(self) -> int:
        return self.count(self.body, "vocab_size")

    @property
    def draft_vocab_size(self) -> int:
        vocab = self.vocab_size
        found = self.count(self.raw, "draft_vocab_size", vocab)
        if found > vocab:
            raise self.bad("draft_vocab_size", found, f"the vocabulary has {vocab} ids")
        return found

    @property
    def quantisation(self) -> Settings | None:
        """The settings of the head's quantised matrices; None if no matrix is quantised."""
        if not (found := self.section("quantization_config")):
            return None
        method = found.get("quant_method")
        if not isinstance(method, str) or method not in FORMATS:
            told = f"{', '.join(sorted(FORMATS))} are supported"
            raise self.bad("quantization_config.quant_method", method, told)
        return found

    def common(self) -> dict[str, Any]:
        """Return the fields of a `HeadConfig` that all kinds of head read in the same way."""
        layers, raw = self.layers(), self.raw
        return {
            "name": self.name,
            "body": layers,
            "target_hidden_size": self.count(raw, "target_hidden_size", layers.hidden_size),
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "num_target_layers": self.count(raw, "num_target_layers", 0) or None,
            "quantisation": self.quantisation,
        }

    def nested(self) -> dict[str, Any]:
        """Return the part of a speculators config that describes the layers."""
        body = self.raw.get("transformer_layer_config")
        if not isinstance(body, dict) or not body:
            raise self.bad("transformer_layer_config", body, "a layer's settings are missing")
        return body

    def layers(self) -> Any:
        """Return transformers' config of the layers."""
        body = self.body
        hidden, heads = self.count(body, "hidden_size"), self.count(body, "num_attention_heads")
        if "head_dim" not in body and hidden % heads:
            raise self.bad("num_attention_heads", heads, f"it does not divide {hidden}")
        head_dim = self.count(body, "head_dim", hidden // heads)
        kv_heads = self.count(body, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise self.bad("num_key_value_heads", kv_heads, f"it does not divide {heads}")
        if head_dim % 2:
            raise self.bad("head_dim", head_dim, "it must be even for rotary embeddings")
        activation = body.get("hidden_act", "silu")
        if activation not in _ACTIVATIONS:
            told = "only silu and gelu_pytorch_tanh are supported"
            raise self.bad("hidden_act", activation, told)
        eps = body.get("rms_norm_eps", 1e-6)
        if not isinstance(eps, int | float) or not 0 < eps < 1:
            raise self.bad("rms_norm_eps", eps, "it must be a number between 0 and 1")
        # transformers refuses a hidden size that is not a multiple of the number of heads, so pass
        # one that is, and set the real size below.
        found = CONFIGS[body["model_type"]](
            hidden_size=heads * head_dim,
            num_hidden_layers=self.count(body, "num_hidden_layers"),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=self.count(body, "intermediate_size"),
            hidden_act=_ACTIVATIONS[activation],
            rms_norm_eps=float(eps),
            rope_parameters=self._rope(),
            max_position_embeddings=self.count(body, "max_position_embeddings", 2048),
            attention_bias=bool(body.get("attention_bias", False)),
            mlp_bias=bool(body.get("mlp_bias", False)),
        )
        found.hidden_size = hidden
        return found

    def _rope(self) -> dict[str, Any]:
        """Return transformers' `rope_parameters`, from the key of that name or from the older keys
        `rope_scaling` and `rope_theta`."""
        body = self.body
        stored = body.get("rope_parameters") or body.get("rope_scaling") or {}
        if not isinstance(stored, dict):
            raise self.bad("rope_scaling", stored, "it must be a mapping")
        for kind in ("full_attention", "sliding_attention"):
            if isinstance(stored.get(kind), dict):
                raise self.bad(
                    "rope_parameters", kind, "only one embedding for all layers is supported"
                )
        rope = dict(stored)
        kind = rope.pop("type", None)
        rope["rope_type"] = rope.get("rope_type") or kind or "default"
        if rope["rope_type"] not in _ROPES or "mrope_section" in rope:
            raise self.bad("rope_type", rope["rope_type"], f"{', '.join(_ROPES)} are supported")
        if rope.get("partial_rotary_factor", body.get("partial_rotary_factor") or 1.0) != 1.0:
            raise self.bad("partial_rotary_factor", "…", "partly rotated heads are not supported")
        base = rope.get("rope_theta", body.get("rope_theta"))
        base = _DEFAULT_ROPE_BASE if base is None else base
        if type(base) not in (int, float) or not 0 < base < math.inf:
            raise self.bad("rope_theta", base, "it must be a number above 0")
        rope["rope_theta"] = float(base)
        return rope

    def refuse_late_windows(self) -> None:
        """Raise `SetupError` if layers have a sliding window without `layer_types`: those from
        `max_window_layers` on, if `use_sliding_window` and `sliding_window` are set."""
        body = self.body
        is_used = body.get("use_sliding_window") and body.get("sliding_window")
        if is_used and not body.get("layer_types"):
            first = body.get("max_window_layers", 28)
            if type(first) is not int or first < self.count(body, "num_hidden_layers"):
                raise self.bad("use_sliding_window", True, NO_WINDOWS)

    def count(self, settings: dict[str, Any], key: str, default: int | None = None) -> int:
        """Return a positive number, or `default` if the key is missing or null."""
        value = settings.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise self.bad(key, value, "it must be a number above 0")
        return value

    def token_id(self, key: str, value: object) -> int:
        """Return `value`, which must be one of the vocabulary's ids."""
        if type(value) is not int or not 0 <= value < self.vocab_size:
            raise self.bad(key, value, f"it must be one of {self.vocab_size} ids")
        return value

    def section(self, key: str) -> dict[str, Any]:
        """Return the mapping `raw[key]`; {} if the key is missing or null."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            raise self.bad(key, value, "it must be a mapping")
        return value or {}

    def flag(self, key: str) -> bool:
        """Return the boolean `raw[key]`; a missing key counts as false."""
        value = self.raw.get(key)
        if value is not None and type(value) is not bool:
            raise self.bad(key, value, "it must be true or false")
        return bool(value)

    def bad(self, key: str, value: object, why: str) -> SetupError:
        return SetupError(
            f"config.json of the {self.noun} {self.name}: {key} is {shown(value)}: {why}"
        )
