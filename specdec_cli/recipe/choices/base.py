"""Facts about a method or a rule that are known before anything heavy is imported."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Setting = Callable[[str, str], Any]  # a recipe's value by section and key, None where it has none


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """A method's part of vLLM's `speculative_config`, and what its reader has to know."""

    config: dict[str, Any]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DraftForm:
    """A kind of drafts that only one method runs.

    noun: names one in messages. fits: whether a config.json describes one.
    """

    noun: str
    fits: Callable[[Mapping[str, Any]], bool]


@dataclass(frozen=True, slots=True)
class MethodChoice:
    """needs_draft: whether the recipe names a draft model. to_vllm: makes vLLM's config from a
    recipe and the draft's name; None if vLLM has no such method. form: of its drafts; None for
    models that transformers knows. is_plugin: whether a plugin added it.
    """

    needs_draft: bool = False
    to_vllm: Callable[[Setting, str | None], VllmConfig] | None = None
    form: DraftForm | None = None
    is_plugin: bool = False


@dataclass(frozen=True, slots=True)
class RuleChoice:
    """is_given: whether the recipe, not the target, says what is accepted. is_plugin: whether a
    plugin added it."""

    is_given: bool = False
    is_plugin: bool = False


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """is_plugin: whether a plugin added it."""

    is_plugin: bool = False
