"""The bundled pair: a part of `scripts/proofs/greedy.py`, and properties of the models.

The whole proof is 200 prompts x 64 tokens x k 0..6 x three drafts x two batch sizes; see
docs/correctness.md.
"""

import json
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec_cli.core.types import Request
from specdec_cli.demo import demo_path
from specdec_cli.engine.build import build
from specdec_cli.engine.loop import RunResult
from specdec_cli.engine.plan import plan
from specdec_cli.recipe import load_recipe
from tests.support import greedy_reference

NEW_TOKENS = 24
DRAFTS: dict[str, dict[str, object]] = {
    "demo": {"draft.model": "demo:draft"},
    "distilled": {"draft.model": "demo:draft-distilled"},
    "unrelated": {"draft.model": "demo:draft", "draft.load_format": "dummy"},
    "same": {"draft.model": "demo:target"},
}


@cache
def prompts() -> list[str]:
    """Every 20th bundled prompt: ten prompts from all categories."""
    lines = demo_path("demo:prompts").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines[::20]]


@cache
def reference() -> tuple[Any, Any]:
    folder = demo_path("demo:target")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder)


@cache
def written_alone() -> list[list[int]]:
    model, tokenizer = reference()
    eos = model.generation_config.eos_token_id
    return [
        greedy_reference(model, tokenizer(text)["input_ids"], NEW_TOKENS, eos) for text in prompts()
    ]


def test_penalties_are_those_of_generate() -> None:
    model, tokenizer = reference()
    settings: dict[str, Any] = {"repetition_penalty": 1.25, "suppress_tokens": [199, 261]}
    settings["min_new_tokens"] = 9
    ids = [tokenizer(text)["input_ids"] for text in prompts()[::3]]
    want = [greedy_reference(model, prompt, NEW_TOKENS, 0, **settings) for prompt in ids]
    assert want != written_alone()[::3]
    sampling = {f"sampling.{key}": value for key, value in settings.items()}
    for k in (0, 4):
        found = run("demo", k, 2, prompts()[::3], **sampling)
        assert [s.output_ids for s in found.seqs] == want


def run(
    draft: str, k: int, batch_size: int, texts: list[str] | None = None, **more: object
) -> RunResult:
    """Decode `texts`, or all prompts."""
    overrides: dict[str, object] = {
        "target.model": "demo:target",
        "run.device": "cpu",
        "run.batch_size": batch_size,
        "speculation.num_speculative_tokens": k,
        "sampling.max_new_tokens": NEW_TOKENS,
        **DRAFTS[draft],
        **more,
    }
    planned = plan(load_recipe(None, overrides))
    ids = [tuple(planned.tokenizer.encode(text)) for text in texts or prompts()]
    engine = build(planned, max(map(len, ids)))
    requests = [Request(i, prompt) for i, prompt in enumerate(ids)]
    return engine.run(requests, planned.k, planned.params)


CASES = [("demo", 0), *((draft, k) for draft in ("demo", "unrelated", "same") for k in (1, 3, 6))]
FOR_ONE = [("demo", 3)]
# Drafts of real weights meet one k in CI; tiny models meet them all in test_greedy.py.
IN_CI = [("demo", 3), ("same", 6)]


@pytest.mark.parametrize(
    ("draft", "k", "batch_size"),
    [
        *(
            pytest.param(draft, k, 4, marks=() if (draft, k) in IN_CI else pytest.mark.slow)
            for draft, k in CASES
        ),
        # A sequence alone is a batch without neighbours, refills or ragged ends.
        *(
            pytest.param(draft, k, 1, marks=() if (draft, k) in FOR_ONE else pytest.mark.slow)
            for draft, k in CASES
        ),
    ],
)
def test_greedy_equals_the_target_alone(draft: str, k: int, batch_size: int) -> None:
    seqs = run(draft, k, batch_size).seqs
    assert [s.output_ids for s in seqs] == written_alone()


@pytest.mark.parametrize("draft", ["demo", "distilled"])
def test_acceptance_is_what_the_pair_is_bundled_for(draft: str) -> None:
    """Acceptance is neither near none nor near all, and falls along the draft."""
    metrics = run(draft, 4, 4).metrics
    assert 0.4 < metrics.acceptance_rate_per_pos[0] < 0.98
    assert metrics.acceptance_rate_per_pos == sorted(metrics.acceptance_rate_per_pos, reverse=True)


def test_acceptance_at_temperature_one_is_the_overlap_of_p_and_q() -> None:
    """The rate at the first position is E sum min(p, q) over the contexts of the drafts."""
    result = run("demo", 1, 4, **{"sampling.temperature": 1.0, "sampling.ignore_eos": True})
    target, _ = reference()
    draft = AutoModelForCausalLM.from_pretrained(demo_path("demo:draft"), dtype=torch.float32)
    overlaps, accepted = [], []
    with torch.inference_mode():
        for seq in result.seqs:
            ids = torch.tensor([seq.tokens])
            p = target(ids).logits[0].softmax(-1)
            q = draft(ids).logits[0].softmax(-1)
            n = seq.num_prompt_tokens
            for a in seq.accepted_per_round:
                overlaps.append(float(torch.minimum(p[n - 1], q[n - 1]).sum()))
                accepted.append(a)
                n += a + 1
    overlap = torch.tensor(overlaps)
    # Each acceptance is a Bernoulli trial with its context's overlap.
    deviation = float((overlap * (1 - overlap)).sum().sqrt())
    assert abs(sum(accepted) - float(overlap.sum())) < 3 * deviation
    assert len(accepted) > 100
