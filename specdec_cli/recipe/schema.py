"""The recipe: its sections, the constraints between them, and the table of all keys.

This module only checks values; `source` reads YAML and `resolve` merges overrides.
"""

from typing import Any, Self, get_args

from pydantic import BaseModel, ValidationInfo, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from specdec_cli.recipe.choices.registry import (
    METHODS,
    NONE,
    method_in,
    weights_from,
    without_draft,
)
from specdec_cli.recipe.fields import Section
from specdec_cli.recipe.sections import (
    CacheSection,
    DataSection,
    DraftSection,
    EngineSection,
    LengthSection,
    LoadSection,
    ModelSection,
    RunSection,
    SamplingSection,
    SpeculationSection,
)
from specdec_cli.text import counted, shown


def _check_ranks_inside(method: object, target: object, draft: object) -> None:
    """Raise an error if a draft in the target's checkpoint has another number of ranks than the
    target. One rank is always allowed, because it is the default and dumped recipes contain it."""
    sections = (section if isinstance(section, dict) else {} for section in (target, draft))
    theirs, ours = (section.get("tensor_parallel_size", 1) for section in sections)
    if weights_from(method) == "target" and type(ours) is int and ours not in (1, theirs):
        told = (
            f"is {ours}, but the draft of {method} is in the target, which has "
            f"{counted(theirs, 'rank')} (target.tensor_parallel_size)"
        )
        key = "draft.tensor_parallel_size"
        raise PydanticCustomError("ranks", "{told}", {"key": key, "told": told})


class Recipe(Section):
    """Everything that a run depends on, except the machine."""

    # Order matters: a field's validator sees the fields above it.
    target: ModelSection
    draft: DraftSection | None = None
    speculation: SpeculationSection = SpeculationSection()
    sampling: SamplingSection = SamplingSection()
    cache: CacheSection = CacheSection()
    run: RunSection = RunSection()
    engine: EngineSection = EngineSection()
    load: LoadSection = LoadSection()
    data: DataSection | None = None

    @property
    def proposer(self) -> str | None:
        """The name of the draft if the method uses the recipe's draft model, or else the name of
        the method if it works without a draft. None if neither is the case. The name does not
        depend on k.

        If a plugin's method uses the draft, the name is METHOD=DRAFT, because the draft alone would
        not say how it is used."""
        method = self.speculation.method
        if weights_from(method) == "draft" and self.draft is not None:
            model = self.draft.model
            return model if METHODS[method].code is None else f"{method}={model}"
        return method if without_draft(method) else None

    def changed(self, section: str, **values: object) -> Self:
        """Return a copy of the recipe with some keys of one section changed."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    @model_validator(mode="before")
    @classmethod
    def _method_without_draft(cls, data: Any) -> Any:
        """Set `speculation.method` for recipes without a draft model.

        If `draft.model` is the name of a method that needs no draft, such as prompt lookup, use it
        and drop the draft section. If it is METHOD=DRAFT, use this method and this draft. Raises an
        error if the recipe names another method as well.

        If there is no draft section, use the method "none", which is plain decoding, in two cases:
        no method is set, or the method needs a draft but k is 0.

        Raises an error if a draft in the target's checkpoint has other ranks than the target.
        """
        if not isinstance(data, dict):
            return data
        speculation, draft = data.get("speculation", {}), data.get("draft")
        if not isinstance(speculation, dict):
            return data
        named = draft.get("model") if isinstance(draft, dict) else None
        method, model = method_in(named), str(named).partition("=")[2]
        if isinstance(draft, dict) and method not in (None, named):
            if (other := speculation.get("method", method)) != method:
                context = {"key": "draft.model", "method": method, "other": shown(other)}
                told = "names the method {method}, but speculation.method is {other}"
                raise PydanticCustomError("draft", told, context)
            draft, speculation = {**draft, "model": model}, {**speculation, "method": method}
            data, named = {**data, "draft": draft, "speculation": speculation}, model
        is_method = isinstance(named, str) and without_draft(named)
        written = speculation.get("method", named if is_method else None)
        _check_ranks_inside(written, data.get("target"), draft)
        if is_method and written == named:
            return {**data, "draft": None, "speculation": {**speculation, "method": named}}
        if draft is not None:
            return data
        is_plain = speculation.get("num_speculative_tokens") == 0
        if "method" not in speculation or (weights_from(written) == "draft" and is_plain):
            return {**data, "speculation": {**speculation, "method": NONE}}
        return data

    @field_validator("draft")
    @classmethod
    def _ranks_suit_target(
        cls, value: DraftSection | None, info: ValidationInfo
    ) -> DraftSection | None:
        target = info.data.get("target")
        if value is None or target is None:
            return value
        ours, theirs = value.tensor_parallel_size, target.tensor_parallel_size
        if theirs % ours:
            key = "tensor_parallel_size"
            told = (
                f"draft.tensor_parallel_size ({ours}) should divide "
                f"target.tensor_parallel_size ({theirs})"
            )
        elif ours != theirs and "lm_head" in value.share:
            key = "share"
            told = (
                f"lm_head cannot be borrowed: the target's is split over {theirs} ranks "
                f"(target.tensor_parallel_size), but draft.tensor_parallel_size is {ours}"
            )
        else:
            return value
        raise PydanticCustomError("ranks", "{told}", {"key": key, "told": told})

    @field_validator("speculation")
    @classmethod
    def _has_its_draft(cls, value: SpeculationSection, info: ValidationInfo) -> SpeculationSection:
        lacks_draft = "draft" in info.data and info.data["draft"] is None
        is_needed = weights_from(value.method) == "draft" and value.num_speculative_tokens > 0
        if lacks_draft and is_needed:
            raise PydanticCustomError(
                "draft",
                "{method} needs a draft section, but draft is null",
                {"key": "method", "method": value.method},
            )
        return value


def section_models() -> dict[str, type[BaseModel]]:
    """Return the class of each section, by the section's name."""
    kinds = {name: info.annotation for name, info in Recipe.model_fields.items()}
    return {name: (get_args(kind) or (kind,))[0] for name, kind in kinds.items()}


# Mappings that accept keys which the schema does not list: options of plugins, variables of chat
# templates, environment variables of servers, and latency objectives.
OPEN_SECTIONS = ("speculation.options.", "data.template.", "engine.env.", "load.slo.")
INNER_SECTIONS: dict[str, type[BaseModel]] = {"speculation.length": LengthSection}


def keys_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a section, by their keys in a recipe."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def key_fields() -> dict[str, FieldInfo]:
    """Map every key of a recipe, written with dots (`run.seed`), to its field, in schema order."""
    found: dict[str, FieldInfo] = {}
    for section, model in section_models().items():
        for key, info in keys_of(model).items():
            inner = INNER_SECTIONS.get(f"{section}.{key}")
            if inner is None:
                found[f"{section}.{key}"] = info
            else:
                found |= {f"{section}.{key}.{k}": i for k, i in inner.model_fields.items()}
    return found
