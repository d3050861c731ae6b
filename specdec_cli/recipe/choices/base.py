"""Descriptions of the methods, acceptance rules and length policies that a recipe may choose.

This module avoids heavy imports. A built-in choice is implemented in the module of the same name in
`methods`, `acceptance` or `lengths`; a plugin's implementation is in the description's `code`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from specdec_cli.recipe.choices.forms import DraftForm
from specdec_cli.recipe.fields import Section

WeightsFrom = Literal["none", "draft", "target"]

Setting = Callable[[str, str], Any]  # (section, key) -> value in the recipe; None if not set
# Takes k and returns the values of SGLang's flags, by flag name without the prefix --speculative-.
SglangValues = Callable[[int], dict[str, str | int]]


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """The keys of vLLM's `speculative_config` for a method, and notes for the user about them."""

    config: dict[str, Any]
    notes: tuple[str, ...] = ()


# Makes a method's config from a recipe's settings and the draft's name.
VllmMaker = Callable[[Setting, str | None], VllmConfig]


def drafted(method: str, noun: str, *notes: str, **more: object) -> VllmMaker:
    """Return a `VllmMaker` for a method with a draft. If the recipe samples, the config also makes
    vLLM sample its proposals, and a note explains this.

    noun: the word for the draft in that note.
    notes: further notes on this method.
    more: further config keys of this method.
    """

    def config_of(setting: Setting, draft: str | None) -> VllmConfig:
        config, found = {"method": method, "model": draft}, [*notes]
        if setting("sampling", "temperature") not in (None, 0):
            config["draft_sample_method"] = "probabilistic"
            found.append(
                f"Measured with proposals sampled from the {noun}. vLLM drafts greedily by "
                "default, which lowers acceptance at this temperature. draft_sample_method "
                "selects sampling as here (leave it out if your version does not support it)."
            )
        return VllmConfig(config | more, tuple(found))

    return config_of


def sglang_block(algorithm: str) -> SglangValues:
    """Return a function that makes SGLang's settings for a method that drafts k tokens at once."""
    return lambda k: {"algorithm": algorithm, "num-draft-tokens": k + 1}


def sglang_steps(algorithm: str) -> SglangValues:
    """Return a function that makes SGLang's settings for a method that drafts k tokens in k steps
    of one token each."""
    return lambda k: sglang_block(algorithm)(k) | {"num-steps": k, "eagle-topk": 1}


@dataclass(frozen=True, slots=True)
class Choice:
    """A method, acceptance rule or length policy.

    what: a short description for the recipe reference.
    keys: the section of the recipe's keys that only this choice, and choices with the same section,
        read. Plugins may read all keys.
    code: a plugin's `methods.Method`, its `acceptance.Rule`, or a function that makes its policy
        from the recipe's `speculation`; None for a built-in choice.
    """

    what: str = ""
    keys: type[Section] = field(default=Section, kw_only=True)
    code: Any = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class MethodChoice(Choice):
    """A method of proposing tokens.

    weights_from: where the method's weights are: `draft`, in the draft that the recipe names;
        `target`, in the target's own files; `none`, it has no weights.
    to_vllm: makes vLLM's config; None if vLLM has no such method.
    to_sglang: makes SGLang's settings; None if SGLang has no such method.
    form: how to recognise the method's drafts by their config; None if they are ordinary
        transformers models.
    draws: whether it draws proposals from distributions, so that a length policy can stop after a
        drawn token. True for all methods of plugins.
    may_remember: whether the method, a plugin's, may keep data about the texts of earlier runs.
    """

    weights_from: WeightsFrom = "none"
    to_vllm: VllmMaker | None = None
    to_sglang: SglangValues | None = None
    form: DraftForm | None = None
    draws: bool = True
    may_remember: bool = False


def sglang_flags(
    choice: MethodChoice, k: int, draft: str | None, weights: tuple[str | None, str | None]
) -> list[tuple[str, str]]:
    """Return SGLang's flags for a method that SGLang supports, as pairs of name and value.

    draft: the draft's folder or id; None if there is no draft.
    weights: the recipe's `target.weights` and `draft.weights`.
    """
    assert choice.to_sglang is not None
    found = choice.to_sglang(k)
    if choice.weights_from == "draft" and draft is not None:
        found["draft-model-path"] = draft
        if "fp8" in weights:  # without the flag, SGLang quantises the draft like the target
            found["draft-model-quantization"] = "fp8" if weights[1] == "fp8" else "unquant"
    return [(f"--speculative-{name}", str(value)) for name, value in found.items()]


def fp8_flags(weights: object, cache: object) -> list[tuple[str, str]]:
    """Return the flags for fp8 weights and an fp8 KV cache. They are the same in vLLM and SGLang.
    weights: the recipe's `target.weights`. cache: its `cache.dtype`."""
    flags = [("--quantization", "fp8", weights), ("--kv-cache-dtype", "fp8_e4m3", cache)]
    return [(flag, value) for flag, value, form in flags if form == "fp8"]


@dataclass(frozen=True, slots=True)
class RuleChoice(Choice):
    """An acceptance rule.

    is_given: whether acceptance rates come from the recipe, as in synthetic acceptance, and not
        from the target's probabilities.
    check: raises `PydanticCustomError` if this rule's keys in the recipe contradict each other or
        k; None if they cannot.
    """

    is_given: bool = False
    check: Callable[[Any, int], None] | None = None
