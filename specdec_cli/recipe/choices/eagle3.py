"""EAGLE-3 heads: their keys in a recipe, their settings in vLLM and SGLang, and how to recognise a
head from its config.json alone."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from pydantic import ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from specdec_cli.recipe.choices import forms
from specdec_cli.recipe.choices.base import MethodChoice, Setting, VllmConfig, drafted, sglang_steps
from specdec_cli.recipe.choices.forms import DraftForm, first_seen, named, speculator
from specdec_cli.recipe.fields import CountOrZero, Section, entry

Counting = Literal["inputs", "outputs"]
Dialect = Literal["flat", "model-optimizer", "speculators", "deepspec"]


class Eagle3Keys(Section):
    """Keys that override the parts of an EAGLE-3 head's config that tools interpret differently."""

    eagle3_layers: tuple[CountOrZero, ...] | None = entry(
        None,
        "hidden states that an EAGLE-3 head reads, in transformers' numbering (i is the input of "
        "layer i); null takes them from the head's config",
    )
    eagle3_counting: Counting | None = entry(
        None,
        "whether layer ids in an EAGLE-3 head's config mean inputs or outputs of layers; null "
        "decides by the config's format",
    )

    @field_validator("eagle3_layers")
    @classmethod
    def _layers_ascend(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and (
            not value or any(later <= earlier for earlier, later in pairwise(value))
        ):
            raise PydanticCustomError("order", "should be numbers in ascending order")
        return value

    @field_validator("eagle3_counting")
    @classmethod
    def _layers_count_by_themselves(
        cls, value: Counting | None, info: ValidationInfo
    ) -> Counting | None:
        if value is not None and info.data.get("eagle3_layers") is not None:
            raise PydanticCustomError(
                "contradiction", "should be null where eagle3_layers replaces the config's ids"
            )
        return value


FORM = DraftForm(
    "an EAGLE-3 head",
    (forms.EAGLE3,),
    (
        *(forms.MASK, forms.EAGLE, forms.PEAGLE, forms.DSPARK, forms.DFLASH, forms.PARD2),
        speculator("eagle3", others=True),
    ),
)


def dialect_of(config: Mapping[str, Any]) -> Dialect | None:
    """Return the format of an EAGLE-3 head's config.json; None if the config is not that of an
    EAGLE-3 head."""
    if FORM.seen(config) is None:
        return None
    if first_seen(speculator("eagle3"), config) is not None:
        return "speculators"
    if named("eagle3").seen(config) is not None and "target_layer_ids" in config:
        return "deepspec"
    return "model-optimizer" if isinstance(config.get("eagle_config"), Mapping) else "flat"


def _to_vllm(setting: Setting, draft: str | None) -> VllmConfig:
    notes = []
    if any(setting("speculation", key) for key in ("eagle3_layers", "eagle3_counting")):
        notes.append(
            "Measured with layers that the recipe chose (speculation.eagle3_layers, "
            "eagle3_counting). vLLM reads them from the head's config.json, so change them there."
        )
    return drafted("eagle3", "head", *notes)(setting, draft)


EAGLE3 = MethodChoice(
    "a head that reads the target's hidden states",
    keys=Eagle3Keys,
    weights_from="draft",
    to_vllm=_to_vllm,
    to_sglang=sglang_steps("EAGLE3"),
    form=FORM,
)
