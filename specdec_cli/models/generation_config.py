"""Translate the sampling settings in a model's generation_config.json, or in an old model's
config.json, into recipe keys."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from specdec_cli.errors import SetupError, UsageError
from specdec_cli.models.config_file import json_object
from specdec_cli.models.resolve import model_place
from specdec_cli.recipe import Recipe, SamplingSection
from specdec_cli.recipe.fields import MAX_COUNT
from specdec_cli.text import of_many, shown

FILE, CONFIG = "generation_config.json", "config.json"
# The defaults of transformers' `generate` for keys that the file lacks. `_DRAW` applies only if
# `do_sample` is true.
_PROCESSING: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "suppress_tokens": (),
    "min_new_tokens": 0,
}
_DRAW: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 1.0}
# Keys that change the generated text but are not supported here, each with the value that has no
# effect. None and False never have an effect.
_UNSUPPORTED_DRAW: dict[str, Any] = {
    "min_p": 0,
    "top_h": None,
    "typical_p": 1,
    "epsilon_cutoff": 0,
    "eta_cutoff": 0,
}
_UNSUPPORTED: dict[str, Any] = {
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1,
    "bad_words_ids": [],
    "sequence_bias": {},
    "begin_suppress_tokens": [],
    "min_length": 0,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "num_beams": 1,
    "penalty_alpha": 0,
    "dola_layers": None,
    "token_healing": False,
    "watermarking_config": None,
    "stop_strings": [],
}


_KEYS = {"do_sample", *_PROCESSING, *_DRAW, *_UNSUPPORTED, *_UNSUPPORTED_DRAW}
_GIVE = "leave sampling.from out, and give the values that you want"
_FROM = "_read_from"  # key for the name of the file that was read, if it is not FILE


def generation_config(place: Path) -> dict[str, Any]:
    """Return the contents of a model's generation_config.json. Old checkpoints have no such file,
    and `generate` then reads the same keys from config.json. For them, return these keys and their
    values from config.json; the result is empty if there are none."""
    file, older = place / FILE, place / CONFIG
    if file.is_file():
        return json_object(file, str(file))
    config = json_object(older, str(older)) if older.is_file() else {}
    parts = [one for one in (config.get("text_config"), config) if isinstance(one, dict)]
    found = {key: one[key] for one in parts for key in _KEYS if one.get(key) is not None}
    return found and {**found, _FROM: CONFIG}


def file_of(stored: Mapping[str, Any]) -> str:
    """Return the name of the file from which the values `stored` were read."""
    return str(stored.get(_FROM, FILE))


def recommended(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of the recipe's `sampling` that the file sets, with their values. Keys of
    random sampling, such as temperature, are ignored unless the file sets `do_sample`, because
    `generate` is greedy without it."""
    known = {**_PROCESSING, **(_DRAW if stored.get("do_sample") else {})}
    found = {key: stored[key] for key in known if stored.get(key) is not None}
    return {key: tuple(v) if isinstance(v, list) else v for key, v in found.items()}


def unsupported(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in the file that change what `generate` would write but are not supported
    here."""
    known = {**_UNSUPPORTED, **(_UNSUPPORTED_DRAW if stored.get("do_sample") else {})}
    values = {key: stored[key] for key in known if stored.get(key) not in (None, False)}
    return {key: value for key, value in values.items() if value != known[key]}


def with_sampling(recipe: Recipe) -> Recipe:
    """Return the recipe with the sampling settings from its target's files, if `sampling.from` is
    `model`; otherwise return the recipe unchanged.

    Raises `UsageError` if the files have no such settings or unsupported ones, or if the recipe
    itself sets one of them to a different value. Raises `SetupError` if the file is damaged.
    """
    asked, target = recipe.sampling, recipe.target
    if asked.source == "recipe":
        return recipe
    stored = generation_config(
        model_place(target.model, target.revision, target.file, weights=False)
    )
    if not stored:
        raise UsageError(f"sampling.from is model, but {target.model} has no {FILE}")
    if others := unsupported(stored):
        raise UsageError(
            f"sampling.from is model, and {file_of(stored)} of {target.model} has unsupported "
            f"settings: {in_words(others)}",
            _GIVE,
        )
    draw = _DRAW if stored.get("do_sample") else {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    taken = {**_PROCESSING, **draw, **recommended(stored)}
    try:
        checked = SamplingSection.model_validate({**taken, "max_new_tokens": MAX_COUNT})
    except ValidationError as error:
        keys = of_many([str(found["loc"][0]) for found in error.errors()], "value")
        told = f"{file_of(stored)} of {target.model}: cannot be used: {keys}"
        raise SetupError(told, _GIVE) from None
    values = {key: getattr(checked, key) for key in taken}
    given = {key: getattr(asked, key) for key in taken if key in asked.model_fields_set}
    if differing := {key: value for key, value in given.items() if value != values[key]}:
        raise UsageError(
            f"sampling.from is model, but the recipe has values of its own: {in_words(differing)}",
            "leave out either",
        )
    if checked.min_new_tokens > asked.max_new_tokens:
        raise UsageError(
            f"sampling.from is model, and {file_of(stored)} of {target.model} has min_new_tokens "
            f"{checked.min_new_tokens}, but sampling.max_new_tokens is {asked.max_new_tokens}",
            f"pass --max-new-tokens {checked.min_new_tokens} or more",
        )
    return recipe.model_copy(
        update={"sampling": asked.model_copy(update={**values, "source": "recipe"})}
    )


def in_words(values: Mapping[str, Any]) -> str:
    """Return keys and values as text, such as `temperature 0.7, top_k 20`."""
    return ", ".join(f"{key} {shown(value)}" for key, value in values.items())
