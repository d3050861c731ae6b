"""Block verification in the running engine: lossless, and longer than rejection sampling.

`tests/ops/sampling/test_block_verify.py` tests the exact law of the rule.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_cli.acceptance.base import AcceptanceRule
from specdec_cli.acceptance.block import Block
from specdec_cli.acceptance.rejection import Rejection
from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.engine import round as round_module
from tests import lossless
from tests.engine.test_pipeline import PROMPTS, told
from tests.support import decode, make_engine, ngram_engine

SIGNIFICANT = 1e-4
PROMPT = [3, 1, 4, 5]
PARAMS = {
    "T": SamplingParams(temperature=0.9, max_new_tokens=4, seed=1),
    "all": SamplingParams(temperature=0.9, top_k=5, top_p=0.9, max_new_tokens=4, seed=4),
}


def p_value(tiny: tuple[Path, Path], params: SamplingParams, k: int, rule: AcceptanceRule) -> float:
    engine = make_engine(*tiny, batch_size=1000, num_blocks=2500, rule=rule)
    found = lossless.engine_trial(engine, tiny[0], PROMPT, k, params, 4000)
    return lossless.adjusted(found)


@pytest.mark.each_value
@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_engine_follows_transformers(
    tiny: tuple[Path, Path], params: SamplingParams, k: int
) -> None:
    """Compares the joint distribution of the first tokens of 4000 runs, each of several rounds."""
    assert p_value(tiny, params, k, Block()) > SIGNIFICANT


@pytest.mark.parametrize("rule", [Rejection(), Block()], ids=["rejection", "block"])
def test_numbers_are_a_rounds_own_iff_the_rule_looks_ahead(
    tiny: tuple[Path, Path], rule: AcceptanceRule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers used twice would change the law: `tests/ops/sampling/test_block_verify.py`."""
    asked: list[bool] = []

    def noted(*given: Any, by_round: bool) -> Any:
        asked.append(by_round)
        return noise(*given, by_round=by_round)

    noise = round_module.round_noise
    monkeypatch.setattr(round_module, "round_noise", noted)
    decode(make_engine(*tiny, rule=rule), [PROMPT], 3, max_new_tokens=9, temperature=0.9)
    assert asked and set(asked) == {rule.looks_ahead}


def test_more_is_accepted_than_by_rejection_sampling(pair: tuple[Path, Path]) -> None:
    """With the same prompts and draft the rule never accepts less in expectation; here it accepts
    several per cent more."""
    accepted = {}
    for rule in (Rejection(), Block()):
        engine = make_engine(*pair, batch_size=96, num_blocks=3000, rule=rule)
        requests = [Request(i, tuple(PROMPTS[i % len(PROMPTS)])) for i in range(96)]
        params = SamplingParams(temperature=1.2, max_new_tokens=48)
        metrics = engine.run(requests, 5, params).metrics
        accepted[type(rule)] = metrics.mean_acceptance_length
    assert accepted[Block] > 1.01 * accepted[Rejection]


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "drawn"])
def test_batch_order_and_rounds_ahead_change_nothing(
    pair: tuple[Path, Path], settings: dict[str, Any], device: torch.device
) -> None:
    found = []
    for batch_size, runs_ahead in ((1, False), (3, False), (3, True)):
        engine = make_engine(
            *pair, batch_size=batch_size, runs_ahead=runs_ahead, rule=Block(), device=device
        )
        requests = [Request(i, tuple(p)) for i, p in enumerate(PROMPTS)]
        found.append(told(engine.run(requests, 4, SamplingParams(max_new_tokens=21, **settings))))
    assert found[0] == found[1] == found[2]


def test_greedy_text_is_the_same_as_by_rejection(pair: tuple[Path, Path]) -> None:
    texts = [
        [s.output_ids for s in decode(make_engine(*pair, rule=rule), PROMPTS, 4, max_new_tokens=20)]
        for rule in (Rejection(), Block())
    ]
    assert texts[0] == texts[1]


def test_proposals_that_are_not_drawn(tiny: tuple[Path, Path]) -> None:
    engine = ngram_engine(tiny[0], batch_size=1000, num_blocks=4500, rule=Block())
    found = lossless.engine_trial(engine, tiny[0], [3, 1, 4, 1, 3, 1, 4], 3, PARAMS["T"], 4000)
    assert lossless.adjusted(found) > SIGNIFICANT


@pytest.mark.usefixtures("smaller_demo")
def test_a_recipe_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A sweep with this rule has points without predictions."""
    from specdec_cli.app import main

    options = ["sweep-k", "demo-sampled", "--k", "0,3", "--limit", "3", "--max-new-tokens", "8"]
    options += ["--set", "run.repeats=1", "--set", "speculation.acceptance=block", "--json"]
    assert main(options) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["recipe"]["speculation"]["acceptance"] == "block"
    assert [p["status"] for p in document["points"]] == ["ok", "ok"]
    assert document["points"][1]["predicted_speedup"] is None
    assert "acceptance" not in document["environment"], "lossless: nothing to remark"
