"""Requests and settings of scripts that build an engine themselves, as docs/python.md shows."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from specdec_cli.core.detokenize import StopFinder
from specdec_cli.core.logits_processors import LogitsProcessors
from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import plan
from specdec_cli.errors import UsageError
from specdec_cli.experiment.statistics.factors import ratio_of
from specdec_cli.experiment.statistics.stats import speed
from specdec_cli.recipe import load_recipe
from tests.engine.fakes import VOCAB, fake_engine
from tests.engine.test_stopping import PROMPT, WORDS, script
from tests.support import CPU

GOOD = Request(0, tuple(PROMPT))
SHORT = SamplingParams(max_new_tokens=2)


@pytest.mark.parametrize("token_id", [-1, VOCAB, 10**9])
@pytest.mark.parametrize("place", [0, -1])
def test_ids_that_the_target_does_not_have_end_their_prompt_alone(
    token_id: int, place: int
) -> None:
    """Without a check, a row of the embedding that is not there would be read as some other."""
    ids = list(PROMPT)
    ids[place] = token_id
    engine = fake_engine(script([20, 21]), script([20, 21]))
    found = engine.run([Request(0, tuple(ids)), replace(GOOD, index=1)], 1, SHORT).seqs
    assert [seq.finish_reason for seq in found] == ["error", "length"]
    told = f"token id {token_id}, but the vocabulary has ids 0 to {VOCAB - 1}"
    assert found[0].error is not None and told in found[0].error and not found[0].output_ids


def test_requests_of_one_index_find_their_own_stop_strings() -> None:
    """Tokens of one text would complete the other's: "ST" and "OP" are tokens 22 and 23."""
    prompts = PROMPT, [9, 9]
    texts = script([22, 20]), script([23, 20], prompts[1])
    engine = fake_engine(None, lambda ids: texts[ids[0] == 9](ids), batch_size=2)
    finders = [partial(StopFinder, WORDS, ids, ("STOP",)) for ids in prompts]
    requests = [Request(0, tuple(ids), f) for ids, f in zip(prompts, finders, strict=True)]
    found = engine.run(requests, 0, SHORT).seqs
    assert [seq.output_ids for seq in found] == [[22, 20], [23, 20]]
    assert {seq.finish_reason for seq in found} == {"length"}


@pytest.mark.parametrize(("stop", "told"), [("STOP", "one string"), (("STOP", ""), "empty")])
def test_stop_strings_that_end_every_text_are_refused(stop: Any, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        StopFinder(WORDS, PROMPT, stop)


def test_no_stop_string_ends_no_text() -> None:
    assert StopFinder(WORDS, PROMPT, ()).feed([20, 21, 22, 23]) is None


@pytest.mark.parametrize("k", [-1, 3, 50])
def test_an_engine_serves_every_k_up_to_the_planned_one(k: int) -> None:
    engine = fake_engine(script([20, 21]), script([20, 21]))
    engine.max_k = 2
    for fits in range(3):
        assert engine.run([GOOD], fits, SHORT).seqs[0].output_ids == [20, 21]
    with pytest.raises(UsageError, match=f"k is {k}, but"):
        engine.run([GOOD], k, SHORT)


def test_a_built_engine_knows_the_planned_k() -> None:
    keys = {"speculation.method": "ngram", "speculation.num_speculative_tokens": 2}
    recipe = load_recipe(None, {"run.device": "cpu", "cache.num_blocks": 4, **keys})
    engine = build(plan(recipe), longest_prompt=4)
    with pytest.raises(UsageError, match="built for k up to 2"):
        engine.run([GOOD], 3, SHORT)
    engine.proposer = None
    with pytest.raises(UsageError, match="built for k up to 0"):
        engine.run([GOOD], 1, SHORT)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_new_tokens", -1),
        ("seed", -1),
        ("seed", 1 << 63),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("inf")),
    ],
)
def test_settings_that_a_recipe_may_not_have_are_refused_by_name(key: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"^{key} is {value}, but it must be"):
        replace(SamplingParams(), **{key: value})


@pytest.mark.parametrize("count", [0, -1])
def test_a_run_without_new_tokens_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"max_new_tokens is {count}, but it must be 1 or more"):
        fake_engine(None).run([GOOD], 0, SamplingParams(max_new_tokens=count))


@pytest.mark.parametrize("token_id", [-1, VOCAB])
def test_suppressed_ids_that_the_target_does_not_have(token_id: int) -> None:
    params = SamplingParams(suppress_tokens=(3, token_id))
    with pytest.raises(UsageError, match=f"suppress_tokens: {token_id} is not a token id"):
        LogitsProcessors.of(params, (), VOCAB, torch.device(CPU))


def test_measures_of_other_prompts_have_no_ratio() -> None:
    with pytest.raises(ValueError, match="3 counts of tokens have 2 times"):
        speed([1, 2, 3], [0.1, 0.2])
    with pytest.raises(ValueError, match="measures of 2 and 1 prompts"):
        ratio_of(speed([1, 2], [0.1, 0.2]), speed([1], [0.1]))
