"""Facts about a method, a rule or a policy that are known before anything heavy is imported.

The code of a name is in the module of that name in `methods`, `acceptance` or `lengths`, unless a
plugin brought it: then the choice holds it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

WeightsFrom = Literal["none", "draft", "target"]

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
    """what: a few words for the recipe's reference. weights_from: where the method's weights are:
    in the draft that the recipe names, or in the target's own files. to_vllm: makes vLLM's config
    from a recipe and the draft's name; None if vLLM has no such method. form: of its drafts; None
    for models that transformers knows. code: a plugin's `methods.Method`.
    """

    what: str = ""
    weights_from: WeightsFrom = "none"
    to_vllm: Callable[[Setting, str | None], VllmConfig] | None = None
    form: DraftForm | None = None
    code: Any = None


@dataclass(frozen=True, slots=True)
class RuleChoice:
    """what: a few words for the recipe's reference. is_given: whether the recipe, not the target,
    says what is accepted. check: raises `PydanticCustomError` where this rule's keys contradict
    each other or k. code: a plugin's `acceptance.Rule`.
    """

    what: str = ""
    is_given: bool = False
    check: Callable[[Any, int], None] | None = None
    code: Any = None


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """what: a few words for the recipe's reference. code: makes a plugin's policy from the recipe's
    `speculation`.
    """

    what: str = ""
    code: Any = None
