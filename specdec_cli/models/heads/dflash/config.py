"""Read the settings of a DFlash or DSpark drafter, in any of the config formats that tools write.

z-lab and SpecForge write a flat qwen3 config with a section `dflash_config`. speculators puts the
layers' settings into `transformer_layer_config`. DeepSpec writes all keys at the top level.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from specdec_cli.errors import SetupError
from specdec_cli.models.config_file import head_config_file
from specdec_cli.models.draft import Passes
from specdec_cli.models.heads.base import EMBEDDING, HEAD, HeadConfig, Other
from specdec_cli.models.heads.settings import NO_WINDOWS, HeadSettings, reading
from specdec_cli.recipe.choices.forms import DSPARK, first_seen, speculator
from specdec_cli.text import shown

# The accepted values of `model_type`. It may be copied from the target's config; the layers are
# always qwen3's.
_KINDS = "qwen3", "llama", None
_HARMLESS = re.compile(r"(^|[.])rotary_emb[.]|^verifier_")
MARKOV_EMBEDDING, MARKOV_OUT = (f"markov_head.markov_w{i}.weight" for i in (1, 2))
CONFIDENCE = "confidence_head.proj"
# Some Markov types read the hidden state as well as the previous token. They have an extra
# projection: the name of its tensors (without `.weight` or `.bias`), and its shape, given the width
# of the Markov head's embedding and the hidden width.
MARKOV_TYPES: dict[str, tuple[str, Callable[[int, int], tuple[int, ...]]] | None] = {
    "vanilla": None,
    "gated": ("markov_head.gate_proj", lambda rank, width: (rank, width + rank)),
    "rnn": ("markov_head.joint_proj", lambda rank, width: (3 * rank, 2 * rank + width)),
}
# Keys that select variants of the network in some tools, each with the values that select the
# standard network. All other values are refused. If the tuple is empty, the key must be missing.
_OFF = "use_swa", "causal", "is_causal", "shift_label", "add_swa_attention_sink_bias"
_SCALES = "attention_value_scale", "input_embedding_scale", "output_multiplier"
_VARIANTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(_OFF, (False,)),
    **dict.fromkeys(_SCALES, (1.0,)),
    "is_neox_style": (True,),
    "final_logit_softcapping": (0,),
    "attention_mode": ("gqa", "mha"),
    "attention_modes": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig(HeadConfig):
    """The settings of a DFlash or DSpark drafter.

    block_size: the number of rows per pass in training.
    mask_id: the id of the mask token, which a row embeds if its own token is not known yet.
    layer_ids: the indices of the target's hidden states that the drafter reads. Hidden state i is
        the input of layer i. None if the config names none.
    anchor_predicts: whether every row predicts the token after its own, including the row of the
        last known token (the anchor). If false, the anchor predicts nothing, and every other row
        predicts its own token.
    keeps_width: whether all passes have `block_size` rows, however many tokens are drafted.
    markov_rank: r, the width of the Markov head's embedding; 0 without a Markov head.
    markov_type: the type of Markov head, one of MARKOV_TYPES.
    confidence_width: the number of values that the confidence head reads; 0 without one.
    """

    noun: ClassVar[str] = "DFlash drafter"
    shift: ClassVar[int] = 0
    carries: ClassVar[bool] = False

    block_size: int
    mask_id: int
    layer_ids: tuple[int, ...] | None
    anchor_predicts: bool
    keeps_width: bool = False
    markov_rank: int = 0
    markov_type: str = "vanilla"
    confidence_width: int = 0

    @property
    def max_k(self) -> int:
        return self.block_size - (not self.anchor_predicts)

    @property
    def has_confidence(self) -> bool:
        return self.confidence_width > 0

    def rows_for(self, k: int) -> int:
        """Return the number of rows in the pass that drafts k tokens."""
        if self.keeps_width:
            return self.block_size
        return k if self.anchor_predicts else k + 1

    @property
    def num_features(self) -> int:
        """The number of the target's hidden states that the drafter reads."""
        return len(self.windows) if self.layer_ids is None else len(self.layer_ids)

    @property
    def facts(self) -> dict[str, str]:
        anchor = "predicts" if self.anchor_predicts else "predicts nothing"
        told = f"block_size {self.block_size}, mask_token_id {self.mask_id}, the anchor {anchor}"
        rank = f", a {self.markov_type} Markov head of rank {self.markov_rank}"
        return {"block": told + rank * (self.markov_rank > 0)}

    def key_values(self) -> list[list[str]]:
        """Return the names of each layer's key and value projections. They read
        the context as well as the block's rows."""
        own = [f"layers.{i}.self_attn." for i in range(len(self.windows))]
        return [[f"{layer}{x}_proj.weight" for x in "kv"] for layer in own]

    def products(self) -> list[list[str]]:
        # zero-argument super() fails in a dataclass with slots
        own = [names for names in HeadConfig.products(self) if names != [MARKOV_EMBEDDING]]
        return [*own, *self.key_values()]

    def passes(self, k: int) -> Passes:
        rows = self.rows_for(k)
        return Passes(1, rows, ahead=rows - 1)

    def renamed(self, name: str) -> str | None:
        own = name.removeprefix("model.").replace("midlayer.", "layers.0.", 1)
        return None if _HARMLESS.search(own) else own

    def own_shapes(self) -> dict[str, tuple[int, ...]]:
        width, rank = self.hidden_size, self.markov_rank
        found = {
            "fc.weight": (width, self.num_features * self.target_hidden_size),
            "hidden_norm.weight": (width,),
            EMBEDDING: (self.vocab_size, width),
            HEAD: (self.draft_vocab_size, width),
        }
        if rank:
            found[MARKOV_EMBEDDING] = (self.vocab_size, rank)
            found[MARKOV_OUT] = (self.draft_vocab_size, rank)
        if rank and (joint := MARKOV_TYPES[self.markov_type]) is not None:
            name, shape = joint[0], joint[1](rank, width)
            found |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        if self.confidence_width:
            found[f"{CONFIDENCE}.weight"] = (1, self.confidence_width)
            found[f"{CONFIDENCE}.bias"] = (1,)
        return found

    def feature_layers(self, num_target_layers: int) -> tuple[int, ...]:
        """Return the indices of the target's hidden states that the drafter reads, numbered as in
        transformers. Raises `SetupError` for hidden states that do not exist, and for the last one,
        because transformers returns it after the final norm."""
        last, found = num_target_layers, self.layer_ids
        if found is None:
            count = self.num_features
            found = (last // 2 + 1,)
            if count > 1:
                # As in z-lab's code: the 1 inside `round` matters, because Python rounds halves to
                # even numbers.
                found = tuple(1 + round(1 + i * (last - 4) / (count - 1)) for i in range(count))
        if sorted(set(found)) != list(found) or not 0 <= found[0] <= found[-1] < last:
            raise SetupError(
                f"the {self.noun} {self.name} reads hidden states {shown(list(found))} of a target "
                f"that has {last} layers (target_layer_ids or aux_hidden_state_layer_ids of its "
                "config.json)",
                "the drafter belongs to another target",
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig(DFlashConfig):
    """The settings of a DSpark drafter. They differ from DFlash's only in the name that messages
    use."""

    noun: ClassVar[str] = "DSpark drafter"


def read_dflash_config(name: str, folder: Path) -> DFlashConfig:
    """Read the settings of the drafter in `folder`. Raises `SetupError` for impossible or
    unsupported settings."""
    raw = head_config_file(name, folder)
    kind = DFlashConfig if first_seen(DSPARK, raw) is None else DSparkConfig
    with reading(kind.noun, name):
        return _read(kind, name, raw)


def _read(kind: type[DFlashConfig], name: str, raw: dict[str, Any]) -> DFlashConfig:
    is_nested = first_seen(speculator("dflash", "dspark"), raw) is not None
    is_dspark = kind is DSparkConfig
    # The drafter's own keys may be at the top level or in `dflash_config`, which takes precedence.
    # A key that is null counts as missing.
    places = raw, HeadSettings(kind.noun, name, raw, raw).section("dflash_config")
    own = {key: value for keys in places for key, value in keys.items() if value is not None}
    settings = HeadSettings(kind.noun, name, own, raw)
    body = settings.nested() if is_nested else raw
    settings, told = replace(settings, body=body | {"model_type": "qwen3"}), body.get("model_type")
    if told not in _KINDS:
        raise settings.bad("model_type", told, "only layers of qwen3 are supported")
    for key, plain in _VARIANTS.items():
        if key in own and own[key] not in plain:
            raise settings.bad(key, own[key], "that variant of the network is not supported")
    if set(types := body.get("layer_types") or ()) - {"full_attention"}:
        raise settings.bad("layer_types", types, NO_WINDOWS)
    settings.refuse_late_windows()
    common = settings.common()
    layer = common["body"]
    key, default = "sample_from_anchor", is_dspark
    others: tuple[Other, ...] = ()
    if is_nested and is_dspark and key not in own:
        told = f"{key}: not given, read as true, as speculators does; vLLM takes false"
        others = (Other(told, {"anchor_predicts": False}),)
    return kind(
        **common,
        windows=(0,) * int(layer.num_hidden_layers),
        others=others,
        block_size=settings.count(own, "block_size", 8 if is_nested else None),
        mask_id=settings.token_id("mask_token_id", own.get("mask_token_id")),
        layer_ids=_layer_ids(settings, is_nested, is_dspark),
        anchor_predicts=settings.flag(key) if key in own else default,
        **(_heads(settings, is_nested, int(layer.hidden_size)) if is_dspark else {}),
    )


def _layer_ids(settings: HeadSettings, is_nested: bool, is_dspark: bool) -> tuple[int, ...] | None:
    """Return the indices of the target's hidden states that the drafter reads; None if the config
    does not name layers.

    Hidden state i is the input of layer i, and speculators' configs use this index. The configs of
    other tools name the layer whose output is read, which is layer i - 1. So -1, which DeepSpec's
    configs may contain, stands for the output of the embedding.
    """
    key = "aux_hidden_state_layer_ids" if is_nested else "target_layer_ids"
    ids, least = settings.raw.get(key), 0 if is_nested or not is_dspark else -1
    # The configs of speculators and DeepSpec must name layers. DeepSpec's are recognised as DSpark
    # configs without `dflash_config`.
    if ids is None and not is_nested and (not is_dspark or "dflash_config" in settings.raw):
        return None
    if not isinstance(ids, list) or not ids or any(type(i) is not int or i < least for i in ids):
        raise settings.bad(key, ids, "it must be a list of layers")
    return tuple(i + (not is_nested) for i in ids)


def _heads(settings: HeadSettings, is_nested: bool, width: int) -> dict[str, Any]:
    """Read the Markov head's rank and type, and the width of the confidence head's input."""
    own = settings.raw
    rank = own.get("markov_rank", 256 if is_nested else 0)
    if type(rank) is not int or rank < 0:
        raise settings.bad("markov_rank", rank, "it must be a number")
    kind = own.get("markov_head_type") or "vanilla"
    if not isinstance(kind, str) or kind not in MARKOV_TYPES:
        raise settings.bad("markov_head_type", kind, f"{', '.join(MARKOV_TYPES)} are supported")
    if type(alpha := own.get("confidence_head_alpha", 0)) not in (int, float):
        raise settings.bad("confidence_head_alpha", alpha, "it must be a number")
    key, both = "enable_confidence_head", "confidence_head_with_markov"
    is_sure = settings.flag(key) if key in own else is_nested or alpha > 0
    reads_both = (settings.flag(both) if both in own else is_nested) and rank
    found = width + rank * bool(reads_both)
    return {"markov_rank": rank, "markov_type": kind, "confidence_width": found * bool(is_sure)}
