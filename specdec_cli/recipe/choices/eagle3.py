"""An EAGLE-3 head in a recipe, and in vLLM's config. A head is known by its config alone."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from specdec_cli.recipe.choices.base import DraftForm, MethodChoice, Setting, VllmConfig
from specdec_cli.recipe.fields import CountOrZero, Section

Counting = Literal["inputs", "outputs"]
Dialect = Literal["flat", "model-optimizer", "speculators", "deepspec"]


class Eagle3Keys(Section):
    """The keys that override conventions which tools read differently."""

    eagle3_layers: tuple[CountOrZero, ...] | None = Field(
        default=None,
        description="hidden states that an EAGLE-3 head reads, as transformers counts them (i is "
        "the input of layer i); null: by the head's config",
    )
    eagle3_counting: Counting | None = Field(
        default=None,
        description="whether layer ids in an EAGLE-3 head's config mean inputs or outputs of "
        "layers; null: by the config's form",
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


def dialect_of(config: Mapping[str, Any]) -> Dialect | None:
    """The form in which a config.json describes an EAGLE-3 head; None if it describes none."""
    settings = config.get("speculators_config")
    algorithm = settings.get("algorithm") if isinstance(settings, dict) else None
    if (algorithm := config.get("speculators_model_type", algorithm)) is not None:
        return "speculators" if algorithm == "eagle3" else None
    architectures = config.get("architectures")
    names = [str(a) for a in architectures] if isinstance(architectures, list) else []
    is_named = any("eagle3" in architecture.lower() for architecture in names)
    if is_named and "target_layer_ids" in config:
        return "deepspec"
    if isinstance(config.get("eagle_config"), dict):
        return "model-optimizer"
    return "flat" if is_named or "draft_vocab_size" in config else None


def _to_vllm(setting: Setting, draft: str | None) -> VllmConfig:
    config = {"method": "eagle3", "model": draft}
    notes = []
    if str(draft).startswith("demo:"):
        notes.append("demo: models come with specdec; vLLM needs a folder or a Hugging Face id.")
    if any(setting("speculation", key) for key in ("eagle3_layers", "eagle3_counting")):
        notes.append(
            "Measured with layers that the recipe chose (speculation.eagle3_layers, "
            "eagle3_counting). vLLM takes them from the head's config.json: change them there."
        )
    if setting("sampling", "temperature") not in (None, 0):
        config["draft_sample_method"] = "probabilistic"
        notes.append(
            "Measured with proposals sampled from the head. vLLM drafts greedily by default, and "
            "accepts less so at this temperature; draft_sample_method asks for the same as here "
            "(leave it out where a version does not know it)."
        )
    return VllmConfig(config, tuple(notes))


EAGLE3 = MethodChoice(
    "a head that reads the target's hidden states",
    weights_from="draft",
    to_vllm=_to_vllm,
    form=DraftForm("EAGLE-3 head", lambda config: dialect_of(config) is not None),
)
