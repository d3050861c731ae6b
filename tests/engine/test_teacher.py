"""Forecasts from a pass over a written text, compared with rounds that were really run."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.demo import demo_path
from specdec_cli.engine.build import build
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.plan import plan
from specdec_cli.experiment.forecasts import expected_rounds, with_recorded
from specdec_cli.prompts import read_prompts
from specdec_cli.recipe import load_recipe
from tests.rounds import LARGEST, same_rounds, text_of
from tests.support import decode, make_engine, ngram_engine, reference, save_tiny

PROMPTS = [[5, 9, 11, 3], [7], list(range(20, 32))]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that is the target with noise on its weights."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("pair")
    target, draft = save_tiny(folder / "target", "llama"), folder / "draft"
    model = AutoModelForCausalLM.from_pretrained(target)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(draft)
    return target, draft


@pytest.mark.parametrize(
    "max_model_len, draft_max_len, ends",
    [
        (256, 512, frozenset()),
        (24, 512, frozenset()),
        # cli/test_sweep_k.py replays texts past the end of a draft's context.
        pytest.param(256, 20, frozenset(), marks=pytest.mark.slow),
        (256, 512, frozenset(range(0, 97, 11))),
    ],
    ids=["plain", "model ends", "draft ends", "eos"],
)
def test_greedy_replay_is_exact(
    pair: tuple[Path, Path], max_model_len: int, draft_max_len: int, ends: frozenset[int]
) -> None:
    lengths = {"max_model_len": max_model_len, "draft_max_len": draft_max_len}
    engine = make_engine(*pair, batch_size=3, eos_ids=ends, **lengths)
    params = SamplingParams(max_new_tokens=24)
    seqs = decode(engine, PROMPTS, LARGEST, max_new_tokens=24)
    accepted = [a for s in seqs for a in s.accepted_per_round]
    assert 0 < sum(accepted) < sum(p for s in seqs for p in s.proposed_per_round)
    texts = [text_of(engine, seq, params) for seq in seqs]
    for seq, text in zip(seqs, texts, strict=True):
        rounds = zip(seq.proposed_per_round, seq.accepted_per_round, strict=True)
        assert with_recorded(text, rounds) == (text, 0)
    for k in range(LARGEST + 1):
        same_rounds(decode(engine, PROMPTS, k, max_new_tokens=24), texts, k)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_lookup_replay_is_exact(pair: tuple[Path, Path], temperature: float) -> None:
    """n-gram proposals are certain, so given the text nothing is random."""
    engine = ngram_engine(pair[0])
    settings: dict[str, Any] = {"max_new_tokens": 40, "temperature": temperature}
    params = SamplingParams(**settings)
    seqs = decode(engine, PROMPTS, LARGEST, **settings)
    assert sum(a for s in seqs for a in s.accepted_per_round) > 0
    texts = [text_of(engine, seq, params) for seq in seqs]
    same_rounds(seqs, texts, LARGEST)
    if temperature == 0.0:
        for k in range(LARGEST):
            same_rounds(decode(engine, PROMPTS, k, **settings), texts, k)


def test_acceptance_of_sampled_tokens_is_that_of_transformers_models(
    pair: tuple[Path, Path],
) -> None:
    engine = make_engine(*pair)
    params = SamplingParams(temperature=0.7, max_new_tokens=30)
    seq = decode(engine, [PROMPTS[0]], 3, temperature=0.7, max_new_tokens=30)[0]
    found = engine.forecast(Request(0, tuple(PROMPTS[0])), seq.output_ids, LARGEST, params)
    with torch.no_grad():
        p, q = (
            (reference(m)(torch.tensor([seq.tokens])).logits[0] / 0.7).softmax(-1) for m in pair
        )
    rows = torch.arange(seq.num_prompt_tokens - 1, len(seq.tokens) - 1)
    written = torch.tensor(seq.output_ids)
    accept = (q[rows, written] / p[rows, written]).clamp(max=1.0)
    overlap = torch.minimum(p, q)[rows].sum(-1)
    assert found.accept == pytest.approx(accept.tolist(), abs=1e-4)
    assert found.overlap == pytest.approx(overlap.tolist(), abs=1e-4)


@pytest.mark.slow  # the chances of each token are compared above
def test_sampled_prediction_is_right_in_the_mean(pair: tuple[Path, Path]) -> None:
    """Compares rounds at k = 2 with the rounds expected from texts that were written at k = 6."""
    engine = make_engine(*pair, num_blocks=2000, batch_size=160)
    settings: dict[str, Any] = {"temperature": 0.7, "max_new_tokens": 16}
    count = 320
    prompts = [PROMPTS[0]] * count
    seqs = decode(engine, prompts, LARGEST, **settings)
    params = SamplingParams(**settings)
    expected = [expected_rounds([text_of(engine, s, params)], 2).total for s in seqs]
    really = [
        len(s.accepted_per_round) + s.rounds_without_proposal
        for s in decode(engine, prompts, 2, seed=1, **settings)
    ]
    a, b = torch.tensor(expected), torch.tensor(really, dtype=torch.float)
    error = ((a.var() + b.var()) / count).sqrt()
    assert abs(a.mean() - b.mean()) < 4 * error
    assert error < 0.025 * b.mean()  # so a bias of 10 % would show


@cache
def demo_engine(temperature: float) -> tuple[Engine, Any]:
    recipe = load_recipe(
        "demo",
        {
            "run.device": "cpu",
            "run.batch_size": 4,
            "speculation.num_speculative_tokens": LARGEST,
            "sampling.temperature": temperature,
            "sampling.max_new_tokens": 24,
        },
    )
    planned = plan(recipe)
    return build(planned, 256), planned


@pytest.mark.slow  # tiny pairs replay above, and bundled ones in sweeps
def test_greedy_replay_of_the_demo_pair() -> None:
    engine, planned = demo_engine(0.0)
    prompts = read_prompts([], str(demo_path("demo:prompts")), None)[::50]
    requests = [
        Request(i, tuple(planned.tokenizer.encode(p.text, add_special_tokens=True)))
        for i, p in enumerate(prompts)
    ]
    seqs = engine.run(requests, LARGEST, planned.params).seqs
    texts = [text_of(engine, seq, planned.params) for seq in seqs]
    for k in range(LARGEST + 1):
        same_rounds(engine.run(requests, k, planned.params).seqs, texts, k)
