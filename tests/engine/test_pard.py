"""PARD drafts: rounds against transformers' forward over tokens and masks, without any cache."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.functional import cross_entropy

from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import Plan
from specdec_cli.errors import ExitCode, SetupError
from specdec_cli.recipe.choices.pard import PARD
from tests import drafting, lossless
from tests.cli.generate_helpers import word_tokenizer
from tests.drafting import NEW_TOKENS, rounds_of, run, schedules
from tests.eagle3_pair import PROMPTS
from tests.support import VOCAB, greedy_reference, greedy_text, reference, save_noised, save_tiny

MASK, K = 95, 4
SETTINGS = schedules(17)


class Pair(NamedTuple):
    """The folders of a target and its draft."""

    target: Path
    folder: Path


def save_pair(folder: Path, steps: int = 25, vocab: int = VOCAB) -> Pair:
    target = save_tiny(folder / "target", "llama", vocab_size=vocab)
    word_tokenizer(target, [f"w{i}" for i in range(vocab)])
    draft = save_noised(folder / "draft", target)
    oracle, model = reference(target), reference(draft)
    texts = [p + greedy_reference(oracle, p, NEW_TOKENS + 8) for p in PROMPTS[:-1]] if steps else []
    with torch.inference_mode(False), torch.enable_grad():
        adam = torch.optim.Adam(model.parameters(), lr=2e-3)
        for step in range(steps):
            text, loss = texts[step % 3], torch.zeros(())
            for n in range(2 + step % 4, len(text) - K, 4):
                goals = torch.tensor(text[n : n + K])
                loss = loss + cross_entropy(masked(model, text[:n], K), goals)
            adam.zero_grad()
            loss.backward()
            adam.step()
    model.save_pretrained(draft)
    return Pair(target, changed(draft, pard_token=min(MASK, vocab - 1), spd_type="pard"))


def masked(model: Any, tokens: list[int], k: int) -> torch.Tensor:
    """Logits [k, V] of the tokens after `tokens`."""
    out = model(torch.tensor([[*tokens, *[MASK] * (k - 1)]]))
    found: torch.Tensor = out.logits[0, -k:]
    return found


def changed(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def expected_rounds(pair: Pair, prompt: list[int], k: int) -> list[tuple[int, int]]:
    model, found, n = reference(pair.folder), [], len(prompt)
    text = prompt + greedy_text(pair.target, prompt, NEW_TOKENS)
    while n < len(text):
        count, stand = min(k, len(text) - n - 1), 0
        if count:
            with torch.no_grad():
                drafts = masked(model, text[:n], count).argmax(1).tolist()
            stand = next((i for i in range(count) if drafts[i] != text[n + i]), count)
            found.append((count, stand))
        n += stand + 1
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("pard"))


def planned(pair: Pair, k: int = K, **more: Any) -> Plan:
    return drafting.planned(pair.target, pair.folder, k, **more)


@pytest.mark.parametrize("case", SETTINGS)
def test_text_and_rounds_are_those_of_the_model(pair: Pair, case: str) -> None:
    seqs = run(planned(pair, **SETTINGS[case]), PROMPTS)
    for seq, prompt in zip(seqs, PROMPTS, strict=True):
        assert seq.output_ids == greedy_text(pair.target, prompt, NEW_TOKENS)
        assert rounds_of(seq) == expected_rounds(pair, prompt, K)
    assert {a for seq in seqs for a in seq.accepted_per_round} >= {0, 1, 2}
    assert (sum(s.num_preemptions for s in seqs) > 0) == (case == "preemption")


@pytest.mark.parametrize("policy", ["adaptive", "confidence"])
def test_lengths_of_each_sequence(pair: Pair, policy: str) -> None:
    keys = {"speculation.length.policy": policy, "speculation.length.choices": [0, 1, 2]}
    seqs = run(planned(pair, run__batch_size=3, **keys), PROMPTS)
    texts = [greedy_text(pair.target, p, NEW_TOKENS) for p in PROMPTS]
    assert [s.output_ids for s in seqs] == texts


def test_one_k_predicts_the_others(pair: Pair) -> None:
    engine, params = build(planned(pair, 6), 12), planned(pair).params
    requests = [Request(i, tuple(p)) for i, p in enumerate([*PROMPTS, [7]])]
    for seq, request in zip(engine.run(requests, 3, params).seqs, requests, strict=True):
        told = engine.forecast(request, seq.output_ids, 6, params)
        assert told.ahead is not None and told.only_k is None
        start = 0
        for proposed, accepted in rounds_of(seq):
            chances = told.ahead[start][:proposed]
            assert accepted == (*(round(c) for c in chances), 0).index(0)
            start += accepted + 1


@pytest.mark.parametrize("token", [None, 97, "x"])
def test_a_draft_without_a_token_for_masks_is_refused(
    pair: Pair, token: Any, tmp_path: Path
) -> None:
    folder = changed(shutil.copytree(pair.folder, tmp_path / "draft"), pard_token=token)
    with pytest.raises(SetupError, match=r"pard_token is .* must be a token id below 97") as found:
        planned(pair._replace(folder=folder))
    assert found.value.code == ExitCode.ENVIRONMENT and "\n" not in found.value.message


def test_facts_of_a_run(pair: Pair) -> None:
    found = planned(pair)
    assert found.recipe.speculation.method == "pard"
    assert found.draft is not None and found.draft.passes(K).count == 1
    told = PARD.to_vllm(lambda *key: None, "d")  # type: ignore[misc]
    assert told.config == {"method": "draft_model", "model": "d", "parallel_drafting": True}


def test_sampled_text_follows_the_target(tmp_path: Path) -> None:
    """Joint distribution of the first tokens."""
    small = save_pair(tmp_path, steps=0, vocab=8)
    more = {"sampling.temperature": 0.9, "sampling.top_p": 0.95, "sampling.max_new_tokens": 4}
    found = planned(small, 3, run__batch_size=1000, cache__num_blocks=4000, **more)
    params = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=4, seed=1, ignore_eos=True)
    told = lossless.engine_trial(build(found, 12), small.target, [3, 1, 4, 5], 3, params, 4000)
    assert lossless.adjusted(told) > 1e-4
