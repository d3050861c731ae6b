"""Read the settings of MTP modules from a target's config and tensor names. Each module is a
projection with two norms, followed by a one-layer model of the target's family. No weights are
read."""

import math
import re
from collections.abc import Collection, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

from specdec_cli.errors import SetupError
from specdec_cli.models.config_file import config_file, head_config_file
from specdec_cli.models.formats import Settings
from specdec_cli.models.heads.settings import HeadSettings
from specdec_cli.models.refusals import ANOTHER_DRAFT
from specdec_cli.models.weights import tensor_names
from specdec_cli.recipe.choices.mtp import MtpKeys
from specdec_cli.text import counted, one_line, shown

_KEYS = ("num_nextn_predict_layers", "num_mtp_layers")
# Config keys that set a layer's shape or change its results.
_LAYER = (
    *("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size"),
    *("hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias"),
)
PROJECTION, NORMS = "eh_proj.weight", ("enorm.weight", "hnorm.weight")


class Form(NamedTuple):
    """Translates a module's tensor names between the checkpoint and our module; implements
    `loader.Names`. In the checkpoint's names, `{}` stands for the module's `number`.

    layer: the prefix of the decoder layer's names in the checkpoint.
    outer: maps the checkpoint's names of all other tensors to ours.
    layer_types, mlp_layer_types: the types of the decoder layer if the target's config does not
    give them for MTP modules; None to use the types of the target's last layer.
    reads_target: whether all modules of a chain read the target's hidden states, instead of those
    of the previous module.
    """

    layer: str
    outer: dict[str, str]
    number: int
    layer_types: str | None = None
    mlp_layer_types: str | None = "sparse"
    reads_target: bool = False

    def of(self, index: int) -> Self:
        """Return the form for the module `index` places after this one."""
        return self._replace(number=self.number + index)

    def own(self, name: str, /) -> str | None:
        """Return our name for a tensor in the file, or None if it belongs to another module."""
        for stored, own in self.outer.items():
            if f"{name}.".startswith(f"{(prefix := stored.format(self.number))}."):
                return own + name.removeprefix(prefix)
        if name.startswith(prefix := self.layer.format(self.number)):
            return f"model.layers.0.{name.removeprefix(prefix)}"
        return None

    def stored(self, own: str, /) -> str:
        """Return the name that a tensor has in the checkpoint. own: its name in our module."""
        for stored, prefix in self.outer.items():
            if f"{own}.".startswith(f"{prefix}."):
                return stored.format(self.number) + own.removeprefix(prefix)
        return self.layer.format(self.number) + own.removeprefix("model.layers.0.")


def _deepseek(num_layers: int) -> Form:
    names = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm"}
    names |= {"shared_head.norm": "model.norm", "shared_head.head": "lm_head"}
    names |= {"embed_tokens": "model.embed_tokens"}
    layer = "model.layers.{}."
    return Form(layer, {layer + stored: own for stored, own in names.items()}, num_layers)


_QWEN3_NEXT = Form(
    "mtp.layers.{}.",
    {
        "mtp.fc": "eh_proj",
        "mtp.pre_fc_norm_embedding": "enorm",
        "mtp.pre_fc_norm_hidden": "hnorm",
        "mtp.norm": "model.norm",
    },
    0,
)

# MiMo-V2-Flash, whose config does not say how many modules there are.
_MIMO = Form(
    "model.mtp.layers.{}.",
    {
        "model.mtp.layers.{}.eh_proj": "eh_proj",
        "model.mtp.layers.{}.enorm": "enorm",
        "model.mtp.layers.{}.hnorm": "hnorm",
        "model.mtp.layers.{}.final_layernorm": "model.norm",
        "model.mtp.layers.{}.pre_mlp_layernorm": "model.layers.0.post_attention_layernorm",
        "model.mtp.layers.{}.self_attn.attention_sink_bias": "model.layers.0.self_attn.sinks",
    },
    0,
    layer_types="sliding_attention",
    mlp_layer_types="dense",
    reads_target=True,
)
_MIMO_COUNT = 3  # number of modules in the published files


# A module in its own folder, as speculators writes it.
EXTRACTED = Form(
    "mtp_layers.{}.",
    {
        "mtp_layers.{}.input_proj": "eh_proj",
        "mtp_layers.{}.token_layernorm": "enorm",
        "mtp_layers.{}.hidden_layernorm": "hnorm",
        "mtp_layers.{}.final_layernorm": "model.norm",
    },
    0,
)


@dataclass(frozen=True, slots=True)
class MtpConfig:
    """The settings of one MTP module.

    count: the number of modules in the checkpoint.
    hidden_size: H.
    vocab_size: V.
    form: translates the names of the first module's tensors.
    keys: the recipe's settings for details that inference tools handle differently.
    index: the module's number in the chain; its row t embeds token t + 1 + index.
    quantisation: for a module in its own folder, the settings of its quantised matrices. None if
    the module is not quantised, or if it is in the target's files.
    """

    carries: ClassVar[bool] = True

    name: str
    count: int
    hidden_size: int
    vocab_size: int
    form: Form
    keys: MtpKeys
    index: int = 0
    quantisation: Settings | None = None

    @property
    def shift(self) -> int:
        return 1 + self.index

    @property
    def reads_target(self) -> bool:
        """True if all modules of a chain read the target's hidden states. A module then outputs
        these beside its own hidden states, so that the next module can read them."""
        return self.form.reads_target and self.count > 1

    @property
    def output_size(self) -> int:
        return self.hidden_size * (2 if self.reads_target else 1)

    @property
    def max_k(self) -> int | None:
        """The maximum number of proposals per round. In a chain, each module makes one. A single
        module runs repeatedly, so there is no limit (None)."""
        return None if self.count == 1 else self.count

    def lacks(self, index: int, missing: Collection[str]) -> SetupError:
        first = self.form.of(index).stored(min(missing))
        return SetupError(
            f"the weights of {self.name} lack {counted(len(missing), 'tensor')} of its MTP "
            f"modules, first {first}",
            "config.json and the weights do not belong together, or a file is missing",
        )


def read_mtp_config(
    name: str, place: Path, config: Any, names: Collection[str], keys: MtpKeys
) -> MtpConfig:
    """Read the settings of the MTP modules in a target's own files.

    config: transformers' config of the target. names: the names of the tensors in its files; empty
    if unknown. Raises a `SetupError` that names the key if the config says that there are no
    modules.
    """
    raw = config_file(name, place)
    key = next((key for key in _KEYS if raw.get(key) is not None), _KEYS[0])
    form, count = _deepseek(int(config.num_hidden_layers)), raw.get(key, 0)
    told = "is missing" if key not in raw else f"is {shown(count)}"
    if any(_QWEN3_NEXT.own(stored) for stored in names):
        form = _QWEN3_NEXT
    if config.model_type == "mimo_v2_flash":
        form = _MIMO
        if raw.get(key) is None:
            told += f", and its weights have no {form.layer.format(0)}eh_proj.weight"
            most = len(names) + 1
            absent = (n for n in range(most) if form.of(n).stored(PROJECTION) not in names)
            count = next(absent) if names else _MIMO_COUNT
    if type(count) is not int or count < 1:
        raise SetupError(
            f"config.json of {name} declares no MTP modules: {key} {told}",
            "take another draft",
        )
    sizes = int(config.hidden_size), int(config.vocab_size)
    return MtpConfig(name, count, *sizes, form, keys)


def tensors_of_modules(name: str, place: Path, config: Any) -> re.Pattern[str] | None:
    """Return a pattern for the names of the MTP modules' tensors in a target's files; None if its
    config declares no modules. config: transformers' config of the target."""
    try:
        found = read_mtp_config(name, place, config, (), MtpKeys())
    except SetupError:
        return None
    numbers = "|".join(str(found.form.number + index) for index in range(found.count))
    layers = re.escape(found.form.layer).replace(r"\{\}", f"({numbers})")
    return re.compile(rf"^{layers}|^(model\.)?mtp\.")


def read_module_config(name: str, place: Path, config: Any, keys: MtpKeys) -> MtpConfig:
    """Read the settings of a module in its own folder. Raises a `SetupError` that names the key if
    the module belongs to another target, or that names a tensor of a second module."""
    whole = head_config_file(name, place)
    raw = whole.get("transformer_layer_config")
    stored = raw if isinstance(raw, dict) else {}
    for key, ours, theirs in _compared(stored, config):
        is_number = isinstance(ours, float) and isinstance(theirs, float)
        if ours != theirs and not (is_number and math.isclose(ours, theirs, rel_tol=1e-6)):
            raise SetupError(
                f"the MTP module {name} is for another target: its transformer_layer_config.{key} "
                f"is {shown(ours)}, but the target has {shown(theirs)}",
                ANOTHER_DRAFT,
            )
    second = EXTRACTED.of(1)
    if others := [one for one in tensor_names(place) if second.own(one) is not None]:
        raise SetupError(
            f"the MTP module {name} has a second module in its weights (first "
            f"{one_line(min(others))}), but only one in a folder is supported",
            "take one with a single module, or a target with the modules in its own files",
        )
    settings = HeadSettings("MTP module", name, whole, stored)
    if (count := settings.count(whole, _KEYS[0], 1)) != 1:
        raise settings.bad(_KEYS[0], count, "only one module in a folder is supported")
    sizes = int(config.hidden_size), int(config.vocab_size)
    return MtpConfig(name, 1, *sizes, EXTRACTED, keys, quantisation=settings.quantisation)


def _compared(stored: dict[str, Any], config: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the keys of a module's layer settings that must agree with the target's config, which
    its layer is made from, each with both values. Those of `_LAYER` and of rotary embeddings may be
    missing on either side."""
    for key in ("model_type", "hidden_size", "vocab_size"):
        yield key, stored.get(key), getattr(config, key)
    for key in _LAYER:
        ours, theirs = stored.get(key), getattr(config, key, None)
        if ours is not None and theirs is not None:
            yield key, ours, theirs
    both = getattr(config, "rope_parameters", None), stored.get("rope_parameters")
    rope, own = (one if isinstance(one, dict) else {} for one in both)
    found = {f"rope_parameters.{key}": (key, ours) for key, ours in own.items()}
    found["rope_theta"] = "rope_theta", stored.get("rope_theta")
    for told, (key, ours) in found.items():
        if ours is not None and rope.get(key) is not None and not isinstance(ours, dict):
            yield told, ours, rope[key]


def layer_config(config: Any, index: int, form: Form) -> Any:
    """Make transformers' config for the layer of one module from the target's config."""
    own = deepcopy(config)
    for key in ("layer_types", "mlp_layer_types"):
        if (kinds := getattr(own, key, None)) is not None:
            listed = getattr(own, f"mtp_{key}", None)
            setattr(own, key, [listed[index] if listed else getattr(form, key) or kinds[-1]])
    own.num_hidden_layers = 1
    if hasattr(own, "first_k_dense_replace"):
        own.first_k_dense_replace = 0
    return own
