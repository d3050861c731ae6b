"""The settings diff: whether two runs have the same settings and the same models."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]


def first_difference(ours: Any, theirs: Any, key: str = "") -> tuple[str, Any, Any] | None:
    """The first dotted key at which two documents differ, with both values."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for name in [*ours, *(n for n in theirs if n not in ours)]:
            inner = f"{key}.{name}" if key else str(name)
            if found := first_difference(ours.get(name), theirs.get(name), inner):
                return found
        return None
    return None if ours == theirs else (key, ours, theirs)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first key at which two settings differ, with both values.

    same_name: one name stands for two models. same_model: two names stand for one model.
    """

    key: str
    theirs: Any
    ours: Any
    same_name: bool = False
    same_model: bool = False


def settings_difference(there: Document, now: Document) -> Difference | None:
    """The first difference between two settings, or None.

    Models with equal fingerprints are the same under any name; names count if a fingerprint is
    missing. The drafts' names also count, since they label
    records.
    """
    there, now = copy.deepcopy(there), copy.deepcopy(now)
    for key, theirs, ours in _models(there, now):
        prints = theirs.pop("weights", None), ours.pop("weights", None)
        if None in prints or theirs.get("load_format") != ours.get("load_format"):
            continue
        if prints[0] == prints[1]:
            ours["model"] = theirs["model"]
            if "file" in ours:
                ours["file"] = theirs.get("file")
        elif theirs["model"] == ours["model"]:
            return Difference(f"{key}.model", theirs["model"], ours["model"], same_name=True)
    found = first_difference(there, now)
    if found is None:
        return None
    key, was, is_now = found
    # The recipes' own sections agree by then: they come first.
    same_model = key in ("draft", "drafts")
    return Difference(key.removeprefix("recipe."), was, is_now, same_model=same_model)


def _models(there: Document, now: Document) -> Iterator[tuple[str, Document, Document]]:
    """Keys and sections of the models that both settings have in the same place."""
    was, is_now = there.get("recipe"), now.get("recipe")
    if not isinstance(was, dict) or not isinstance(is_now, dict):
        return
    pairs = [(key, was.get(key), is_now.get(key)) for key in ("target", "draft")]
    lists = was.get("drafts") or [], is_now.get("drafts") or []
    pairs += [("draft", *pair) for pair in zip(*lists, strict=False)]
    for key, theirs, ours in pairs:
        if isinstance(theirs, dict) and isinstance(ours, dict):
            yield key, theirs, ours
