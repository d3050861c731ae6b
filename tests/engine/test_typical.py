"""Typical acceptance: its definition, its gain, and the label on every number."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_cli.acceptance.base import AcceptanceRule
from specdec_cli.acceptance.rejection import Rejection
from specdec_cli.acceptance.typical import Typical
from specdec_cli.core.types import Request, SamplingParams
from tests import lossless
from tests.engine.test_pipeline import PROMPTS, told
from tests.support import decode, make_engine, ngram_engine

LABEL = "the text does not follow the target's distribution"


def test_the_definition_word_for_word() -> None:
    """Distributions are sharp and flat, and some of their tokens are masked."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 3, 20, generator=generator) * torch.linspace(0.1, 6, 40)[:, None, None]
    logits[:, 1, 10:] = float("-inf")
    probs, tokens = logits.softmax(-1), torch.randint(0, 20, (40, 3), generator=generator)
    for threshold, alpha in ((0.09, 0.3), (0.3, 0.1), (1.0, 1.0)):
        found = Typical(threshold, alpha).stands(probs, tokens)
        for b in range(40):
            for i in range(3):
                row = probs[b, i].tolist()
                entropy = -sum(p * math.log(p) for p in row if p > 0)
                least = min(threshold, alpha * math.exp(-entropy))
                assert found[b, i] == (row[int(tokens[b, i])] > least)
    assert 0.1 < Typical(0.09, 0.3).stands(probs, tokens).float().mean() < 0.9


def test_likely_proposals_that_were_not_drawn_stand_more_often(pair: tuple[Path, Path]) -> None:
    """Rejection sampling accepts such a proposal with probability p. Of proposals drawn from a good
    draft it accepts more than this rule does, since it also accepts unlikely ones."""
    lengths = {}
    prompts = [[8, 9] * 10, [5, 6, 7] * 6, [11] * 9]
    for rule in (Rejection(), Typical(0.09, 0.3)):
        engine = ngram_engine(pair[0], batch_size=60, num_blocks=2000, rule=rule)
        requests = [Request(i, tuple(prompts[i % 3])) for i in range(60)]
        result = engine.run(requests, 4, SamplingParams(temperature=0.7, max_new_tokens=40))
        lengths[type(rule)] = result.metrics.mean_acceptance_length
    assert lengths[Typical] > 1.05 * lengths[Rejection]


def test_it_is_lossy(tmp_path: Path) -> None:
    """The rule fails the chi-square test that lossless rules pass."""
    tiny = lossless.save_eight(tmp_path)
    engine = make_engine(*tiny, batch_size=1000, num_blocks=2500, rule=Typical(0.09, 0.3))
    params = SamplingParams(temperature=0.9, max_new_tokens=4, seed=1)
    found = lossless.engine_trial(engine, tiny[0], [3, 1, 4, 5], 3, params, 4000)
    assert lossless.adjusted(found) < 1e-4


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "drawn"])
def test_batches_and_rounds_ahead_change_nothing(
    pair: tuple[Path, Path], settings: dict[str, Any], device: torch.device
) -> None:
    found = []
    rule: AcceptanceRule = Typical(0.09, 0.3)
    for batch_size, runs_ahead in ((1, False), (3, True)):
        sizes = {"batch_size": batch_size, "runs_ahead": runs_ahead, "device": device}
        engine = make_engine(*pair, rule=rule, **sizes)
        requests = [Request(i, tuple(p)) for i, p in enumerate(PROMPTS)]
        found.append(told(engine.run(requests, 4, SamplingParams(max_new_tokens=21, **settings))))
    assert found[0] == found[1]
    if not settings:
        seqs = decode(make_engine(*pair, device=device), PROMPTS, 4, max_new_tokens=21)
        assert [row[0] for row in found[0]] == [s.output_ids for s in seqs]


@pytest.mark.usefixtures("smaller_demo")
def test_every_number_is_labelled(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Labels are in the terminal and document of `generate`, and in a sweep's warnings, report and
    environment."""
    from specdec_cli.app import main

    rule = ["--set", "speculation.acceptance=typical", "--max-new-tokens", "8"]
    generate = ["generate", "--prompt", "def f(x):", *rule]
    assert main([*generate[:1], "demo-sampled", *generate[1:]]) == 0
    assert f"typical acceptance: likely proposals pass, so {LABEL}" in capsys.readouterr().err
    assert main([*generate[:1], "demo", *generate[1:]]) == 0
    assert LABEL not in capsys.readouterr().err, "greedy text is the target's"
    run = tmp_path / "run"
    sweep = ["sweep-k", "demo-sampled", "--k", "0,3", "--limit", "2", "--set", "run.repeats=1"]
    assert main([*sweep, *rule, "-o", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert LABEL in document["environment"]["acceptance"]
    assert document["points"][1]["predicted_speedup"] is None
    assert LABEL in (run / "report.html").read_text().replace("&#39;", "'")
    assert any(LABEL in warning["message"] for warning in document["warnings"])
