"""Read the settings of an EAGLE-3 head from any of the config formats in which such heads are
published.

SafeAILab and SpecForge: a flat llama config.
Model-Optimizer: a flat llama config with `eagle_config`.
speculators: the layers' settings nested in `transformer_layer_config`.
DeepSpec: the target's config with `target_layer_ids`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.config_file import head_config_file
from specdec_cli.models.draft import Passes
from specdec_cli.models.heads.base import EMBEDDING, HEAD, HeadConfig, Other
from specdec_cli.models.heads.layers import CONFIGS
from specdec_cli.models.heads.settings import HeadSettings, reading
from specdec_cli.models.weights import tensor_names
from specdec_cli.recipe.choices.eagle3 import Counting, Dialect, Eagle3Keys, dialect_of
from specdec_cli.recipe.choices.forms import MASK, first_seen, speculator
from specdec_cli.text import shown

_DEFAULT_NUM_AUX = 3
_AUX_IDS = "eagle_aux_hidden_state_layer_ids"
_MIDDLE = re.compile("^midlayer[.]")
# Tensors that a checkpoint may contain but that are not loaded: rotary tables, which the config
# determines, and the verifier's weights, which only training needs.
_HARMLESS = re.compile(r"(^|[.])rotary_emb[.]|^verifier_(norm|lm_head)[.]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(HeadConfig):
    """The settings of an EAGLE-3 head. `overridden` replaces some of them with the recipe's.

    aux_ids: the ids of the target's layers that the config lists; None if it lists none.
    counting: whether the head reads the input or the output of each listed layer.
    norm_before_residual: whether the first residual is the normed hidden state.
    norm_before_fc: whether one norm is applied to all features together.
    fc_norm: whether each layer's features have a norm of their own.
    feeds_norm: whether the next step reads the hidden state after the final norm.
    ties_head: whether the embedding is also the output matrix: the config says so, and the
        checkpoint has no output matrix.
    is_wide: whether every layer reads the embedding; if false, only the first one does.
    ids_key: the config's key for the layer ids.
    takes_embedding: whether to use the target's embedding instead of the head's own.
    """

    noun: ClassVar[str] = "EAGLE-3 head"

    aux_ids: tuple[int, ...] | None
    counting: Counting
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    feeds_norm: bool
    ties_head: bool
    is_wide: bool
    ids_key: str = _AUX_IDS
    takes_embedding: bool = False

    @property
    def num_aux(self) -> int:
        """The number of the target's layers whose hidden states the head reads."""
        return _DEFAULT_NUM_AUX if self.aux_ids is None else len(self.aux_ids)

    @property
    def numbers_fused(self) -> int:
        has_norms = self.norm_before_fc or self.fc_norm
        return self.num_aux * self.target_hidden_size if has_norms else 0

    def width_read(self, layer: int) -> int:
        """Return 2 * H for a layer that reads embedding and hidden state, and H for others."""
        return self.hidden_size * (2 if layer == 0 or self.is_wide else 1)

    def renamed(self, name: str) -> str | None:
        """Translate the name of a checkpoint's tensor to the name that `shapes` uses, which is that
        of speculators and Model-Optimizer. SafeAILab and SpecForge call the first layer `midlayer`.
        Returns None if the head does not need the tensor."""
        own = _MIDDLE.sub("layers.0.", name.removeprefix("model."))
        is_taken = own == EMBEDDING and self.takes_embedding
        return None if is_taken or _HARMLESS.search(own) else own

    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        width, features = self.hidden_size, self.num_aux * self.target_hidden_size
        found: dict[str, tuple[int, ...]] = {
            "fc.weight": (width, features),
            EMBEDDING: (self.vocab_size, width),
        }
        if not self.ties_head:
            found[HEAD] = (self.draft_vocab_size, width)
        if self.norm_before_fc:
            found["input_norm.weight"] = (features,)
        for index in range(self.num_aux if self.fc_norm else 0):
            found[f"fc_norm.{index}.weight"] = (self.target_hidden_size,)
        for layer in range(len(self.windows)):
            if self.width_read(layer) > width:
                found[f"layers.{layer}.hidden_norm.weight"] = (width,)
        return found

    def feature_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the indices of the target's hidden states that the head reads, numbered as in
        transformers.

        Raises `SetupError` if the indices are not in ascending order or a state does not exist. The
        target's last hidden state is refused as well, because transformers returns it after the
        final norm.
        """
        n = num_target_layers
        found: tuple[int, ...] = (2, n // 2, n - 3)
        if self.aux_ids is not None:
            found = tuple(i + (self.counting == "outputs") for i in self.aux_ids)
        if sorted(set(found)) != list(found) or not 0 <= found[0] <= found[-1] < n:
            told = f"no {self.ids_key}, so the default three are used"
            if self.aux_ids:
                told = f"{self.ids_key}: {shown(list(self.aux_ids))}, {self.counting} of layers"
            raise SetupError(
                f"the {self.noun} {self.name} reads hidden states {shown(list(found))} of a "
                f"target that has {n} layers (config.json has {told})",
                "the head belongs to another target, or numbers its layers differently; "
                "speculation.eagle3_layers replaces them",
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """The settings of a P-EAGLE head, which drafts all tokens of a round in one pass.

    mask_id: the mask token. It stands in for tokens that are not known yet. Its row reads
    `mask_hidden` instead of the target's features.
    most_drafted: the maximum number of proposals in a round.
    """

    noun: ClassVar[str] = "P-EAGLE head"
    carries: ClassVar[bool] = False

    mask_id: int
    most_drafted: int = 1

    @property
    def facts(self) -> dict[str, str]:
        return {"masks": f"mask token {self.mask_id}"}

    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        features = self.num_aux * self.target_hidden_size
        # zero-argument super() fails in a dataclass with slots
        return Eagle3Config.own_shapes(self) | {"mask_hidden": (1, 1, features)}

    @property
    def sizes_held(self) -> dict[str, int]:
        """Maps `mask_hidden` to H, because the head keeps only the projection to H values that
        `Head.fuse` computes from it."""
        return {"mask_hidden": self.hidden_size}

    def passes(self, k: int) -> Passes:
        return Passes(1, k + 1)

    def carried_bytes(self, itemsize: int) -> int:
        """Return the number of bytes that `WaitingHead` keeps for each block of the cache: up to
        `most_drafted` + 1 rows of H values that wait for the next pass, and an int64 that counts
        them. itemsize: the number of bytes per value."""
        return (self.most_drafted + 1) * self.hidden_size * itemsize + 8


Config = TypeVar("Config", bound=Eagle3Config)


def overridden(config: Config, keys: Eagle3Keys, num_target_layers: int) -> Config:
    """Apply the recipe's `eagle3_layers` or, if it is not set, `eagle3_counting` to a head's
    config. Returns the config unchanged if neither is set. Raises a `UsageError` that names the
    recipe's key if its value does not fit."""
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
                f"{told}: the target has {num_target_layers} layers, so hidden states 0 to {last} "
                "exist",
                "hidden state i is the input of layer i",
            )
        told = f"speculation.eagle3_layers: in place of the config's, which names {named}"
        others = (*others, Other(told, own))
        return replace(config, aux_ids=layers, counting="inputs", others=others)
    if keys.eagle3_counting is not None:
        if ids is None:
            raise UsageError(
                f"speculation.eagle3_counting: the config of the head {config.name} names no "
                "layers to which it could apply",
                "set speculation.eagle3_layers instead",
            )
        counting = keys.eagle3_counting
        told = f"speculation.eagle3_counting: {counting}, but the config itself names {named}"
        return replace(config, counting=counting, others=(*others, Other(told, own)))
    return config


def read_head_config(name: str, folder: Path) -> Eagle3Config:
    """Read the settings of the head in `folder`. Raises `SetupError` for a head of a different
    kind, or with unsupported settings."""
    raw = head_config_file(name, folder)
    dialect = dialect_of(raw)
    if dialect is None:
        raise SetupError(
            f"{name} is not an EAGLE-3 head",
            "its config.json has no eagle_config, speculators_model_type, draft_vocab_size or "
            "architecture with Eagle3 in its name",
        )
    return _read(Eagle3Config, dialect, name, folder, raw)


def read_peagle_config(name: str, folder: Path) -> PEagleConfig:
    """Read the settings of the P-EAGLE head in `folder`. Raises the same errors as
    `read_head_config`."""
    raw = head_config_file(name, folder)
    is_nested = first_seen(speculator("peagle", "eagle3"), raw) is not None
    others: Dialect = "model-optimizer" if raw.get("eagle_config") else "flat"
    found = next((raw[sign.key] for sign in MASK if sign.seen(raw) is not None), None)
    dialect: Dialect = "speculators" if is_nested else others
    return _read(PEagleConfig, dialect, name, folder, raw, mask_id=found)


def _read(
    kind: type[Config], dialect: Dialect, name: str, folder: Path, raw: dict[str, Any], **own: Any
) -> Config:
    """Read a head's settings. kind: the class to return. own: values for the fields that only this
    class has."""
    settings = HeadSettings(kind.noun, name, raw, raw)
    with reading(kind.noun, name):
        nested = raw.get("eagle_config") or {}
        if nested.get("use_aux_hidden_state") is False:
            key = "eagle_config.use_aux_hidden_state"
            raise settings.bad(key, False, "it is not an EAGLE-3 head")
        if (steps := nested.get("parallel_draft_step") or 1) != 1:
            raise settings.bad("eagle_config.parallel_draft_step", steps, "only 1 is supported")
        settings = replace(settings, body=_body(settings, dialect))
        if "mask_id" in own:
            settings.token_id(" or ".join(sign.key for sign in MASK), own["mask_id"])
        common, norms = settings.common(), ("norm_before_residual", "norm_before_fc", "fc_norm")
        flags: dict[str, Any] = {key: settings.flag(key) for key in norms}
        if flags["norm_before_fc"] and flags["fc_norm"]:
            raise settings.bad("norm_before_fc", True, "fc_norm is true as well")
        # SpecForge copies tie_word_embeddings from the target and stores an output matrix anyway.
        stored = (n.removeprefix("model.").startswith("lm_head.") for n in tensor_names(folder))
        has_all_ids = common["draft_vocab_size"] == common["vocab_size"]
        is_tied = bool(settings.body.get("tie_word_embeddings", False))
        ids_key, aux_ids, counting = _aux_ids(settings, dialect)
        return kind(
            **common,
            **flags,
            **own,
            windows=_windows(settings, int(common["body"].num_hidden_layers)),
            others=tuple(_others(raw, dialect, kind)),
            ids_key=ids_key,
            aux_ids=aux_ids,
            counting=counting,
            feeds_norm=settings.flag("norm_output"),
            ties_head=is_tied and has_all_ids and not any(stored),
            is_wide=dialect == "deepspec",
        )


def _body(settings: HeadSettings, dialect: Dialect) -> dict[str, Any]:
    """Return the settings of the layers, with a supported `model_type`."""
    raw = settings.raw
    body = settings.nested() if dialect == "speculators" else raw
    kind = body.get("model_type", "llama")
    # SpecForge's configs for phi4 and QwQ have the target's model type, although the layers of this
    # class are llama's.
    classes = raw.get("architectures") or ()
    if kind not in CONFIGS and body is raw and "LlamaForCausalLMEagle3" in classes:
        kind = "llama"
    if kind not in CONFIGS:
        raise settings.bad("model_type", kind, f"{' and '.join(CONFIGS)} are supported")
    return body | {"model_type": kind}


def _aux_ids(
    settings: HeadSettings, dialect: Dialect
) -> tuple[str, tuple[int, ...] | None, Counting]:
    """Return the config's key for the ids of the target's layers, the ids, and their meaning. The
    ids are None if the config has none. An id means the input of its layer, as in vLLM and
    speculators, or the output of its layer, as in Model-Optimizer, SGLang and DeepSpec."""
    counting: Counting = "inputs"
    raw = settings.raw
    key, ids = _AUX_IDS, raw.get(_AUX_IDS)
    if dialect == "deepspec":
        key, ids, counting = "target_layer_ids", raw["target_layer_ids"], "outputs"
    nested = (raw.get("eagle_config") or {}).get(_AUX_IDS)
    if ids is None and nested:
        key, ids, counting = f"eagle_config.{_AUX_IDS}", nested, "outputs"
    if not ids:
        return key, None, "inputs"
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        raise settings.bad(key, ids, "it must be a list of layers")
    if sorted(set(ids)) != ids:
        raise settings.bad(key, ids, "the layers must be in ascending order, without duplicates")
    return key, tuple(ids), counting


def _windows(settings: HeadSettings, layers: int) -> tuple[int, ...]:
    body = settings.body
    if body["model_type"] == "qwen3":
        settings.refuse_late_windows()
    kinds = body.get("layer_types") or ["full_attention"] * layers
    if len(kinds) < layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise settings.bad("layer_types", kinds, f"it must name attention of {layers} layers")
    # In qwen3, even `sliding_attention` layers have a window only if `use_sliding_window` is true.
    is_used = body.get("use_sliding_window", body["model_type"] != "qwen3")
    if "sliding_attention" not in kinds[:layers] or not is_used:
        return (0,) * layers
    window = settings.count(body, "sliding_window")
    return tuple(window if kind == "sliding_attention" else 0 for kind in kinds[:layers])


def _others(raw: dict[str, Any], dialect: Dialect, kind: type[Eagle3Config]) -> Iterator[Other]:
    if (raw.get("eagle_config") or {}).get(_AUX_IDS) and not raw.get(_AUX_IDS):
        told = f"eagle_config.{_AUX_IDS}: read as outputs of layers, as SGLang does"
        yield Other(told, {"counting": "inputs"})
    is_silent = dialect == "speculators" and "norm_before_residual" not in raw
    if is_silent and kind is Eagle3Config:  # every tool reads it as false for P-EAGLE
        told = "norm_before_residual: not given, read as false; vLLM takes true"
        yield Other(told, {"norm_before_residual": True})
    if dialect != "speculators" and raw.get("norm_output"):
        told = (
            "norm_output: read as vLLM and SGLang do, so steps are fed normed hidden states; "
            "SpecForge trains on hidden states before the norm"
        )
        yield Other(told, {"feeds_norm": False})
