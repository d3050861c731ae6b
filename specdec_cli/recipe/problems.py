"""Writes messages for errors in a recipe, and suggests the key that was probably meant.

It needs only the schema and pydantic's error records. Callers add the file and line, or the
command-line option, that a value came from.
"""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from pydantic_core import ErrorDetails

from specdec_cli.recipe.schema import key_fields, keys_of, section_models
from specdec_cli.recipe.source import KeyPath, dotted
from specdec_cli.text import one_line, shown

# Other names for keys: their names in other tools, and the names of specdec's own options.
_OTHER_NAMES = {
    "k": "num_speculative_tokens",
    "tp": "tensor_parallel_size",
    "max_tokens": "max_new_tokens",
    "temp": "temperature",
    "name": "model",
}
# Keys whose values may also come from plugins.
_OF_PLUGINS = ("speculation.method", "speculation.acceptance", "speculation.length.policy")
_NOTHING = ("none", "no", "off", "false")


def place(error: ErrorDetails) -> KeyPath:
    """Return the path of the key that an error is about."""
    path: KeyPath = error["loc"]
    if error["type"] == "missing" and len(path) == 1:
        # Only the section `target` is required. Name its required key, which the user has to write.
        return (*path, "model")
    key = error.get("ctx", {}).get("key")
    return (*path, *key.split(".")) if isinstance(key, str) else path


def describe(error: ErrorDetails) -> str:
    """Describe the error in the terms of a recipe, not in those of pydantic."""
    path, value = error["loc"], error["input"]
    match error["type"]:
        case "missing":
            return "is required"
        case "extra_forbidden":
            if len(path) == 1 and path[0] in key_fields():
                return "should be a section with the key in it, not one name with a dot"
            return unknown_key(dotted(path))
        case "model_type" | "model_attributes_type" | "dict_type":
            is_nothing = path == ("draft",) and str(value).lower() in _NOTHING
            guess = " (did you mean null?)" if is_nothing else ""
            if path[-1:] in (("target",), ("draft",)) and isinstance(value, str) and not guess:
                guess = f", such as {{model: {one_line(value)}}}"
            return f"should be a section of keys, not {shown(value)}{guess}"
        case "int_type" | "int_from_float" | "int_parsing":
            return f"should be a whole number, not {shown(value)}"
        case "float_type" | "float_parsing":
            return f"should be a number, not {shown(value)}"
        case "finite_number":
            return f"should be a finite number, not {shown(value)}"
        case "bool_type":
            return f"should be true or false, not {shown(value)}"
        case "string_type":
            # Revisions such as 1.0 and 012 would change if they were read as numbers.
            quote = " (put it in quotes)" if isinstance(value, int | float) else ""
            return f"should be text, not {shown(value)}{quote}"
        case "string_unicode":
            return "should be valid Unicode text"
        case "string_too_short":
            return "should not be empty"
        case "tuple_type":
            return f"should be a list, not {shown(value)}"
        case "string_pattern_mismatch":
            info = key_fields().get(dotted(path))
            return f"should be {info.description if info else 'otherwise'}, not {shown(value)}"
        case "literal_error":
            choices = re.findall(r"'([^']*)'", str(error["ctx"]["expected"]))
            plugged = "; a plugin's needs --plugin" if dotted(path) in _OF_PLUGINS else ""
            either = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
            said = f"should be {either}, not {shown(value)}{_guess(value, choices)}"
            return f"{said}{plugged}"
        case "greater_than" | "greater_than_equal" | "less_than" | "less_than_equal":
            return f"{error['msg'].removeprefix('Input ')}, not {shown(value)}"
    return error["msg"].removeprefix("Input ")


def unknown_key(key: str) -> str:
    """Return the message for an unknown key. It names the most similar valid key; if that key is
    close enough, it asks "did you mean ...?"."""
    if key.rpartition(".")[2] == "<<":
        return "merge keys are not supported: write the keys out"
    nearest, is_close = nearest_key(key)
    return f"unknown key ({f'did you mean {nearest}?' if is_close else f'nearest key: {nearest}'})"


def nearest_key(key: str) -> tuple[str, bool]:
    """Return the most similar valid key, and True if it is close enough to be the intended one."""
    section, _, last = key.lower().replace("-", "_").rpartition(".")
    last = _OTHER_NAMES.get(last, last)
    models = section_models()
    keys = list(key_fields())
    if section in models:
        siblings = {name: f"{section}.{name}" for name in keys_of(models[section])}
    else:
        siblings = {name: name for name in models}
    by_last: dict[str, str] = {}
    for candidate in keys:
        by_last.setdefault(candidate.rpartition(".")[2], candidate)
    if last in siblings:
        return siblings[last], True
    if last in by_last:
        return by_last[last], True
    if begun := [name for name in siblings if last and last in name.split("_")]:
        return siblings[begun[0]], True
    for names in (siblings, by_last, {name: name for name in models}):
        if close := get_close_matches(last, names, n=1):
            return names[close[0]], True
    if section not in models and (close := get_close_matches(section, models, n=1)):
        return close[0], True
    return siblings[get_close_matches(last, siblings, n=1, cutoff=0.0)[0]], False


def _guess(value: object, choices: Iterable[str]) -> str:
    close = get_close_matches(str(value).lower(), list(choices), n=1, cutoff=0.51)
    return f" (did you mean {close[0]}?)" if close else ""
