"""Recognises kinds of drafts from config.json alone, by the keys that each kind must or must not
have."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from specdec_cli.text import shown

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Sign:
    """A config key that identifies a kind of draft. key: its name, with dots if it is nested.
    counts: returns True if the key's value identifies this kind."""

    key: str
    counts: Callable[[Any], bool] = lambda value: value is not None

    def seen(self, config: Mapping[str, Any]) -> str | None:
        """Return the key and its value for a message; None if the config does not have this
        sign."""
        value: Any = config
        for part in self.key.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is _ABSENT or not self.counts(value):
            return None
        return self.key if isinstance(value, Mapping) else f"{self.key}: {shown(value)}"


@dataclass(frozen=True, slots=True)
class DraftForm:
    """A kind of draft other than an ordinary model.

    noun: its name in messages, with an article.
    must: groups of signs. A config of this kind has at least one sign of each group.
    must_not: groups of signs of other kinds. A config of this kind has none of these signs.
    """

    noun: str
    must: tuple[tuple[Sign, ...], ...]
    must_not: tuple[tuple[Sign, ...], ...] = ()

    def seen(self, config: Mapping[str, Any]) -> str | None:
        """Return the sign that shows that a config is of this kind; None if it is not."""
        return None if self.barred(config) is not None else self.claimed(config)

    def claimed(self, config: Mapping[str, Any]) -> str | None:
        """Return the sign by which a config claims to be of this kind, even if it also has signs of
        other kinds; None if it does not claim this."""
        found = [first_seen(group, config) for group in self.must]
        return None if None in found else found[0]

    def barred(self, config: Mapping[str, Any]) -> str | None:
        """Return the sign of another kind that rules this kind out; None if there is none."""
        return first_seen(tuple(chain.from_iterable(self.must_not)), config)


def first_seen(signs: tuple[Sign, ...], config: Mapping[str, Any]) -> str | None:
    """Return a message text for the first of the signs that a config has; None if it has none."""
    return next((told for sign in signs if (told := sign.seen(config)) is not None), None)


def speculator(*names: str, others: bool = False) -> tuple[Sign, ...]:
    """Return signs that a config of the speculators library has if it names one of the kinds
    `names` or, with `others`, any other kind."""
    keys = "speculators_model_type", "speculators_config.algorithm"
    return tuple(valued(key, *names, others=others) for key in keys)


def named(pattern: str) -> Sign:
    """Return a sign that a config has if a class name in its `architectures`, in lower case,
    contains a match of the regular expression `pattern`."""

    def counts(value: Any) -> bool:
        names = [str(name).lower() for name in value] if isinstance(value, list) else []
        return any(re.search(pattern, name) for name in names)

    return Sign("architectures", counts)


def valued(key: str, *values: str, others: bool = False) -> Sign:
    """Return a sign that a config has if the value of `key` is one of `values` or, with `others`,
    if it is any other value except null."""
    return Sign(key, lambda value: value is not None and (value in values) != others)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value > 0


EAGLE3 = (
    *speculator("eagle3"),
    named("eagle3"),
    Sign("eagle_config", lambda value: isinstance(value, Mapping)),
    Sign("draft_vocab_size", lambda _: True),
)
# EAGLE-1, EAGLE-2 and HASS. Only converted heads have these signs; the original config of such a
# head looks like that of an ordinary one-layer Llama.
EAGLE = (*speculator("eagle"), valued("model_type", "eagle"), named("(?<!p)eagle(?!3)"))
PEAGLE = (*speculator("peagle"), named("peagle"))
DSPARK = (
    *speculator("dspark"),
    named("dspark"),
    valued("dflash_config.projector_type", "dspark"),
    Sign("markov_rank", _is_count),
    Sign("dflash_config.markov_rank", _is_count),
)
DFLASH = (
    *speculator("dflash"),
    named("dflash|museglimmerassistant"),
    Sign("dflash_config", lambda value: isinstance(value, Mapping)),
)
# DFlash 2, Domino and other successors of DFlash.
BEYOND_DFLASH = (
    named(r"dflash\d|domino"),
    valued("dflash_config.projector_type", "dflash", "dspark", others=True),
)
# Keys for the id of a mask token. Drafts that propose all tokens in one pass have such a token.
MASK = tuple(map(Sign, ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")))
PARD2 = (valued("spd_type", "pard2"), Sign("pard2_target_layers"))
BEYOND_PARD = (*PARD2, valued("spd_type", "pard", others=True))
