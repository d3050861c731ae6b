"""Finds the settings in which two runs differ, and names them for messages."""

import copy
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from specdec_cli import text
from specdec_cli.experiment.folders.record_lines import to_json

Document = dict[str, Any]


def first_difference(ours: Any, theirs: Any) -> tuple[str, Any, Any] | None:
    """Find the first dotted key at which two documents differ. Return it with both values, or None
    if the documents are equal."""
    return next(differences(ours, theirs), None)


def differences(ours: Any, theirs: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield each dotted key at which two documents differ, with both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in [*ours, *(n for n in theirs if n not in ours)]:
            inner = f"{key}.{name}" if key else str(name)
            yield from differences(ours.get(name), theirs.get(name), inner)
    elif ours != theirs:
        yield key, ours, theirs


@dataclass(frozen=True, slots=True)
class Difference:
    """A key at which two settings differ, with both values.

    same_name: whether both settings name the same model, but with different weights.
    same_model: whether both settings name the same model differently.
    others: further keys that differ, or the sections that contain them.
    """

    key: str
    theirs: Any
    ours: Any
    same_name: bool = False
    same_model: bool = False
    others: tuple[str, ...] = field(default=(), compare=False)


# The values of these keys are hashes, which tell users nothing. Messages name what was hashed.
DIGESTS = {"prompts.sha256": "the prompts", "prompts.categories": "the prompts' categories"}
_MOST_OTHERS = 4
# The words for settings whose keys are in no recipe. Other settings have their keys in the recipe.
_WORDS = {
    "batch_size": "--batch-size",
    "batch_sizes": "--batch-size",
    "batches": "--batches",
    "draft": "--draft",
    "draft.weights_as": "draft.weights",
    "draft_tps": "--draft-tp",
    "drafts": "--draft",
    "ks": "--k",
    "predict_only": "--predict-only",
    "prompts.count": "the number of prompts",
    "shard": "--shard",
    "target.weights_as": "target.weights",
    "target_tps": "--target-tp",
}


def key_in_words(key: str) -> str:
    """Name a setting for messages: by its option, or by its key in the recipe."""
    return _WORDS.get(key, key)


def value_in_words(key: str, value: Any) -> str:
    """Write the value of a setting for messages: as an option takes it, or else as JSON."""
    if key not in _WORDS or isinstance(value, bool):
        return to_json(value)
    parts = value if isinstance(value, list) else [value]
    between = "/" if key == "shard" else ","
    told = between.join(str(one) for one in parts if one is not None)
    return text.inert(told) or ("auto" if key.endswith("weights_as") else "none")


def settings_difference(
    there: Document, now: Document, typed: Collection[str] = ()
) -> Difference | None:
    """Find the first difference between the settings of two runs. Return None if they are equal.

    typed: keys or sections that the user gave explicitly. Differences in them are found first.

    Two models with equal weight fingerprints are the same model, whatever their names. If a
    fingerprint is missing, the names are compared. Names of drafts are always compared, because
    records are labelled with them. On another device fingerprints may differ for another reason: a
    server's models have fingerprints of their own.
    """
    there, now = copy.deepcopy(there), copy.deepcopy(now)
    recipes = [one["recipe"] for one in (there, now) if isinstance(one.get("recipe"), dict)]
    if not all("plugins" in recipe for recipe in recipes):  # older folders do not record them
        for recipe in recipes:
            recipe.pop("plugins", None)
    is_elsewhere = there.get("device") != now.get("device")
    for key, theirs, ours in _models(there, now):
        prints = theirs.pop("weights", None), ours.pop("weights", None)
        if None in prints or theirs.get("load_format") != ours.get("load_format"):
            continue
        if prints[0] == prints[1]:
            ours["model"] = theirs["model"]
            if "file" in ours:
                ours["file"] = theirs.get("file")
        elif theirs["model"] == ours["model"] and not is_elsewhere:
            return Difference(f"{key}.model", theirs["model"], ours["model"], same_name=True)

    def is_later(found: tuple[str, Any, Any]) -> bool:
        key = found[0].removeprefix("recipe.")
        return not any(key == one or key.startswith(f"{one}.") for one in typed)

    found = sorted(differences(there, now), key=is_later)
    if not found:
        return None
    key, was, is_now = found[0]
    names = there.get("drafts"), now.get("drafts")
    if key == "recipe.drafts" and names[0] != names[1]:
        key, was, is_now = "recipe.drafts", *names
    # Above, drafts with equal weights were given the same name in the recipe's sections. So if the
    # labels in `draft` or `drafts` differ but these sections do not, both name the same model.
    same_model = key in ("draft", "drafts") and not any(
        one[0].startswith("recipe.draft") for one in found
    )
    shown = key.removeprefix("recipe.")
    keys = (one[0].removeprefix("recipe.") for one in found[1:])
    sections = ("prompts" if one.startswith("prompts.") else one for one in keys)
    said = {shown, "prompts"} if shown.startswith("prompts.") else {shown}
    more = [one for one in dict.fromkeys(sections) if one not in said]
    others = tuple(more[:_MOST_OTHERS])
    return Difference(shown, was, is_now, same_model=same_model, others=others)


def _models(there: Document, now: Document) -> Iterator[tuple[str, Document, Document]]:
    """Yield the key and both sections of each model that both settings have: the target, the draft,
    and the entries of `drafts` with the same index."""
    was, is_now = there.get("recipe"), now.get("recipe")
    if not isinstance(was, dict) or not isinstance(is_now, dict):
        return
    pairs = [(key, was.get(key), is_now.get(key)) for key in ("target", "draft")]
    lists = was.get("drafts") or [], is_now.get("drafts") or []
    pairs += [("draft", *pair) for pair in zip(*lists, strict=False)]
    for key, theirs, ours in pairs:
        if isinstance(theirs, dict) and isinstance(ours, dict):
            yield key, theirs, ours
