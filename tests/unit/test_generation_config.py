"""The sampling that a model's generation_config.json asks for: taken, told of, or refused."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from transformers import GenerationConfig

from specdec_cli.backends.base import Prepared
from specdec_cli.core.types import SamplingParams
from specdec_cli.errors import SpecdecError, UsageError
from specdec_cli.experiment.preparing import other_sampling
from specdec_cli.models.generation_config import (
    _UNSUPPORTED,
    _UNSUPPORTED_DRAW,
    generation_config,
    recommended,
    unsupported,
    with_sampling,
)
from specdec_cli.recipe import Recipe, dump_recipe, load_recipe

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [5, 6]}
CODER = {"repetition_penalty": 1.1, "suppress_tokens": [1, 4], "min_new_tokens": 3}


def recipe(folder: Path, stored: dict[str, Any] | None, **sampling: Any) -> Recipe:
    (folder / "config.json").write_text("{}")
    if stored is not None:
        (folder / "generation_config.json").write_text(json.dumps(stored))
    keys = {f"sampling.{key}": value for key, value in sampling.items()}
    return load_recipe(None, {"target.model": str(folder), "sampling.from": "model", **keys})


@pytest.mark.parametrize(
    ("stored", "want"),
    [
        (QWEN, {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.0}),
        # `generate` keeps 50 tokens where the file does not say, and is greedy without do_sample.
        ({"do_sample": True, "top_p": 0.9}, {"temperature": 1.0, "top_k": 50, "top_p": 0.9}),
        ({"temperature": 0.6, "top_p": 0.9}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0}),
        (CODER, {**CODER, "suppress_tokens": (1, 4), "temperature": 0.0}),
        ({"num_beams": 1, "min_p": 0.1, "no_repeat_ngram_size": 0}, {"temperature": 0.0}),
    ],
)
def test_values_of_the_model(tmp_path: Path, stored: dict[str, Any], want: dict[str, Any]) -> None:
    found = with_sampling(recipe(tmp_path, stored))
    assert {key: getattr(found.sampling, key) for key in want} == want
    # What is recorded runs again alike, also if the file has changed meanwhile.
    assert found.sampling.source == "recipe" and with_sampling(found) == found
    (tmp_path / "again.yaml").write_text(dump_recipe(found))
    assert load_recipe(str(tmp_path / "again.yaml")) == found


def test_defaults_are_those_of_generate() -> None:
    """No value of transformers' own defaults counts as a request for something unsupported."""
    defaults = GenerationConfig()._get_default_generation_params()
    assert unsupported({**defaults, "do_sample": True}) == {}
    assert set(_UNSUPPORTED) | set(_UNSUPPORTED_DRAW) <= vars(GenerationConfig()).keys()
    assert unsupported({**vars(GenerationConfig()), "do_sample": True}) == {}
    assert defaults["top_k"] == 50 and defaults["temperature"] == defaults["top_p"] == 1.0


@pytest.mark.parametrize(
    ("stored", "given", "words"),
    [
        ({"no_repeat_ngram_size": 3}, {}, "unsupported settings: no_repeat_ngram_size 3"),
        ({"do_sample": True, "min_p": 0.05}, {}, "min_p 0.05"),
        ({"bad_words_ids": [[3]], "num_beams": 4}, {}, "bad_words_ids [[3]], num_beams 4"),
        (QWEN, {"temperature": 0.9}, "values of its own: temperature 0.9"),
        (CODER, {"suppress_tokens": (2,), "top_k": 4}, "suppress_tokens [2], top_k 4"),
        ({"repetition_penalty": 0}, {}, "cannot be used: 1 bad value: repetition_penalty"),
        ({"do_sample": True, "top_p": "high"}, {}, "1 bad value: top_p"),
        (None, {}, "has no generation_config.json"),
    ],
)
def test_refusals(
    tmp_path: Path, stored: dict[str, Any] | None, given: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecdecError, match=re.escape(words)) as told:
        with_sampling(recipe(tmp_path, stored, **given))
    is_files_fault = stored is not None and not given
    assert not is_files_fault or "leave sampling.from out" in str(told.value.hint)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("stored", [QWEN, CODER, {**QWEN, **CODER, "min_length": 4}, {}])
def test_old_models_have_the_keys_in_their_config(
    tmp_path: Path, stored: dict[str, Any], inner: bool
) -> None:
    """Without generation_config.json, as transformers' `generate` reads them."""
    whole = recipe(tmp_path, None)
    config = {"model_type": "llama", "vocab_size": 9, "top_k": None}
    config |= {"text_config": stored, "model_type": "gemma3"} if inner else stored
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = generation_config(tmp_path)
    theirs = GenerationConfig.from_model_config(config)
    for key in ("do_sample", *recommended({**found, "do_sample": True}), *unsupported(found)):
        want = getattr(theirs, key)
        assert stored.get(key) == want and found.get(key) == want, key
    assert bool(found) == bool(stored)
    if not stored or "min_length" in stored:
        words = "has no generation_config" if not stored else "config.json of .* min_length 4"
        with pytest.raises(SpecdecError, match=words):
            with_sampling(whole)
        return
    sampling = with_sampling(whole).sampling
    assert sampling.top_k == (20 if stored is QWEN else 0)
    assert sampling.repetition_penalty == (1.1 if stored is CODER else 1.0)
    plan = SimpleNamespace(generation_config=found, params=SamplingParams())
    (told,) = other_sampling(cast(Prepared, plan))
    assert told.message.startswith("the target's config.json recommends ")
    (tmp_path / "generation_config.json").write_text("{}")  # then config.json is not read for them
    assert generation_config(tmp_path) == {}


def test_a_value_that_is_the_models_too_is_no_contradiction(tmp_path: Path) -> None:
    found = with_sampling(recipe(tmp_path, QWEN, temperature=0.6, max_new_tokens=7))
    assert found.sampling.top_k == 20 and found.sampling.max_new_tokens == 7


def test_fewest_tokens_that_exceed_the_most(tmp_path: Path) -> None:
    assert with_sampling(recipe(tmp_path, CODER, max_new_tokens=3)).sampling.min_new_tokens == 3
    with pytest.raises(UsageError, match=r"has min_new_tokens 3, but sampling.max_new_tokens is 2"):
        with_sampling(recipe(tmp_path, CODER, max_new_tokens=2))
    with pytest.raises(UsageError, match=r"has min_new_tokens 300, but .* is 256"):
        with_sampling(recipe(tmp_path, {"min_new_tokens": 300}))


@pytest.mark.parametrize(
    ("stored", "params", "words"),
    [
        (QWEN, {}, "temperature 0.6, top_k 20, top_p 0.95, and temperature 0.0, top_k 0, top_p 1"),
        (QWEN, {"temperature": 0.6, "top_k": 20}, "recommends top_p 0.95, and top_p 1.0 is used"),
        (CODER, {}, "repetition_penalty 1.1, suppress_tokens [1, 4], min_new_tokens 3, and"),
        ({"no_repeat_ngram_size": 2}, {}, "asks for no_repeat_ngram_size 2, which is not"),
        ({**CODER, "typical_p": 0.9, "min_length": 4}, {}, "; it asks for min_length 4, which"),
        ({"eos_token_id": 3, "temperature": 0.6, "top_p": 0.9}, {}, None),
        ({**QWEN, **CODER}, {**recommended({**QWEN, **CODER})}, None),
        ({}, {"temperature": 0.7}, None),
    ],
)
def test_one_warning_names_what_differs(
    stored: dict[str, Any], params: dict[str, Any], words: str | None
) -> None:
    plan = SimpleNamespace(generation_config=stored, params=SamplingParams(**params))
    found = other_sampling(cast(Prepared, plan))
    assert len(found) == (words is not None)
    if words is not None:
        assert words in found[0].message and found[0].code == "generation_config"
