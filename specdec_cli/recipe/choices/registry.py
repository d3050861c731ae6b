"""The methods, acceptance rules and length policies that a recipe may name, built-in or from a
plugin.

To add one, register it here and write its code in a module of the same name. If it has its own
recipe keys or a `DraftForm`, define them in a module next to this one. This module avoids heavy
imports such as torch.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from specdec_cli.recipe.choices.adaptive import ADAPTIVE, AdaptiveKeys
from specdec_cli.recipe.choices.base import Choice, MethodChoice, RuleChoice, WeightsFrom
from specdec_cli.recipe.choices.confidence import CONFIDENCE, HEAD, ConfidenceKeys
from specdec_cli.recipe.choices.dflash import DFLASH, DSPARK, BlockKeys
from specdec_cli.recipe.choices.draft_model import DRAFT_MODEL
from specdec_cli.recipe.choices.eagle3 import EAGLE3, Eagle3Keys
from specdec_cli.recipe.choices.forms import DraftForm
from specdec_cli.recipe.choices.mtp import MTP, MTP_MODULE, MtpKeys
from specdec_cli.recipe.choices.ngram import NGRAM, NgramKeys
from specdec_cli.recipe.choices.pard import PARD
from specdec_cli.recipe.choices.peagle import PEAGLE
from specdec_cli.recipe.choices.synthetic import SYNTHETIC, SyntheticKeys
from specdec_cli.recipe.choices.typical import TYPICAL, TypicalKeys
from specdec_cli.recipe.choices.unbuilt import UNBUILT

Chosen = TypeVar("Chosen", bound=Choice)

NONE = "none"  # the method that decodes without speculation

METHODS: dict[str, MethodChoice] = {
    "draft_model": DRAFT_MODEL,
    "dflash": DFLASH,
    "dspark": DSPARK,
    "eagle3": EAGLE3,
    "mtp": MTP,
    "mtp_module": MTP_MODULE,
    "ngram": NGRAM,
    "pard": PARD,
    "peagle": PEAGLE,
    NONE: MethodChoice("plain decoding"),
}
RULES: dict[str, RuleChoice] = {
    "rejection": RuleChoice("lossless"),
    "block": RuleChoice("lossless, accepts or rejects proposals jointly"),
    "typical": TYPICAL,
    "synthetic": SYNTHETIC,
}
POLICIES: dict[str, Choice] = {
    "fixed": Choice("k tokens every round"),
    "confidence": CONFIDENCE,
    "head": HEAD,
    "adaptive": ADAPTIVE,
}
# The choices by the key of `speculation` that names one of them.
CHOICES: Mapping[str, Mapping[str, Choice]] = {
    "method": METHODS,
    "acceptance": RULES,
    "length.policy": POLICIES,
}


class MethodAndRuleKeys(TypicalKeys, NgramKeys, Eagle3Keys, MtpKeys, BlockKeys, SyntheticKeys):
    """Keys of `speculation` that belong to one method or acceptance rule."""


class PolicyKeys(AdaptiveKeys, ConfidenceKeys):
    """Keys of `speculation.length` that belong to one length policy."""


def chooser_of(key: str) -> str | None:
    """Return the key of `speculation` whose value decides whether `key` is read; None if it is
    always read."""
    for chooser, choices in CHOICES.items():
        if any(key in choice.keys.model_fields for choice in choices.values()):
            return chooser
    return None


def add(choices: dict[str, Chosen], name: str, choice: Chosen) -> None:
    """Register `choice`, so that recipes can name it. Raises ValueError if the name is taken."""
    if name in choices:
        raise ValueError(f"{name!r} is registered already")
    choices[name] = choice


_MIXED = DraftForm("a draft of contradictory kinds", ())


class Fitting(NamedTuple):
    """A kind of draft whose description matches a config.json.

    seen: the config key that shows this, with its value, for messages.
    method: the method that runs drafts of this kind; None if specdec has none.
    """

    form: DraftForm
    seen: str
    method: str | None


def fitting_forms(config: Mapping[str, Any]) -> list[Fitting]:
    """Return the kinds of drafts whose description matches a config.json; [] for an ordinary model.

    A config may have the required keys of a kind, but also keys that rule this kind out. If so, and
    if no other kind matches, the result is a single `Fitting` that has no method and describes a
    draft of contradictory kinds.
    """
    forms: list[tuple[DraftForm, str | None]] = [(form, None) for form in UNBUILT]
    forms += [(choice.form, name) for name, choice in METHODS.items() if choice.form is not None]
    found = [Fitting(form, form.seen(config) or "", method) for form, method in forms]
    found = [fits for fits in found if fits.seen]
    # If no kind matches, report a config that has all required keys of a kind, but also a key that
    # rules this kind out.
    told = ((form.claimed(config), form.barred(config)) for form, method in forms if method)
    signs = [f"{own} and {other}" for own, other in told if own and other]
    return found or [Fitting(_MIXED, sign, None) for sign in signs[:1]]


def weights_from(method: object) -> WeightsFrom:
    """Return `weights_from` of the method with this name; `none` for an unknown name."""
    return METHODS[method].weights_from if isinstance(method, str) and method in METHODS else "none"


def without_draft(name: str | None) -> bool:
    """Return True if `name` is a method that proposes tokens but needs no draft, such as ngram."""
    return name in METHODS and name != NONE and weights_from(name) != "draft"


def method_in(draft: object) -> str | None:
    """Return the method that a draft's name contains: that of METHOD=DRAFT, or the whole name if it
    is a method that needs no draft. Otherwise returns None."""
    method, is_both, _ = str(draft).partition("=")
    is_method = weights_from(method) == "draft" if is_both else without_draft(method)
    return method if is_method else None


def is_given(rule: object) -> bool:
    """Return True if the acceptance rule with this name takes acceptance rates from the recipe."""
    return isinstance(rule, str) and rule in RULES and RULES[rule].is_given
