"""The engine with an EAGLE-3 head: the target's own text, and the reference's accepted counts."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_cli.core.kv_cache import BlockAllocator, KVCache
from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.engine.loop import Engine
from specdec_cli.experiment.forecasts import with_recorded
from specdec_cli.methods.step_head import StepHead
from specdec_cli.models.heads.base import EMBEDDING, HEAD
from specdec_cli.models.heads.checkpoint import read_weights
from specdec_cli.models.heads.description import check_target
from specdec_cli.models.heads.eagle3.config import read_head_config
from specdec_cli.models.heads.eagle3.head import Eagle3Head
from specdec_cli.models.heads.paged import PagedHead
from tests import lossless
from tests.drafting import rounds_of
from tests.eagle3 import Head, Reference, changed, save_head
from tests.eagle3_pair import (
    NEW_TOKENS,
    PROMPTS,
    Pair,
    expected_rounds,
    save_pair,
    states,
)
from tests.rounds import LARGEST, same_rounds, text_of
from tests.support import CPU, VOCAB, decode, greedy_text, paged_model, reference

SIGNIFICANT = 1e-4


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The head is in speculators' form, and borrows the target's embedding."""
    return save_pair(tmp_path_factory.mktemp("pair"))


Rounds = Callable[[int], list[list[tuple[int, int]]]]


@pytest.fixture(scope="module")
def rounds_at(pair: Pair) -> Rounds:
    """The reference's rounds of every prompt at a k, made once."""
    return cache(lambda k: [expected_rounds(pair.target, pair.head, p, k) for p in PROMPTS])


def eagle_engine(
    target: Path,
    folder: Path,
    num_layers: int,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> Engine:
    """An engine over a saved target and head; changes: to the head's settings."""
    num_blocks, max_len = options.pop("num_blocks", 200), options.pop("max_len", 256)
    config = changed(read_head_config("head", folder), **(changes or {}))
    layers = config.feature_layers(num_layers)
    model = paged_model(target, num_blocks, 4, fused=True, hidden_layers=layers)
    check_target(config, model.module.config.hidden_size, model.vocab_size, num_layers)
    lent = {
        EMBEDDING: model.module.get_input_embeddings().weight.data,
        HEAD: model.module.get_output_embeddings().weight.data,
    }
    weights = read_weights(config, folder, torch.float32, CPU, lent)
    cache = KVCache(config.cache_layers(), num_blocks, 4, torch.float32, CPU)
    head = PagedHead(Eagle3Head(config, weights, 256), cache)
    settings = {"batch_size": 1, "max_model_len": 256, "prefill_chunk": 2048} | options
    allocator = BlockAllocator(num_blocks, 4)
    proposer = StepHead(head, layers, max_len)
    return Engine(
        target=model, proposer=proposer, allocator=allocator, eos_ids=frozenset(), **settings
    )


SLOW = pytest.mark.slow
SETTINGS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "refills": {"batch_size": 2},
    "chunks": {"batch_size": 3, "prefill_chunk": 3},
    "preemption": {"batch_size": 4, "num_blocks": 17},
    "ahead": {"batch_size": 3, "runs_ahead": True},
}


@pytest.mark.each_value
@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("case", SETTINGS)
def test_greedy_text_and_rounds(pair: Pair, rounds_at: Rounds, case: str, k: int) -> None:
    target, folder, _ = pair
    engine = eagle_engine(target, folder, 4, **SETTINGS[case])
    seqs = decode(engine, PROMPTS, k, max_new_tokens=NEW_TOKENS)
    assert list(map(rounds_of, seqs)) == rounds_at(k)
    for seq, prompt in zip(seqs, PROMPTS, strict=True):
        assert seq.output_ids == greedy_text(target, prompt, NEW_TOKENS)
    accepted = [a for seq in seqs for a in seq.accepted_per_round]
    assert 0 in accepted and k in accepted, "the case has to see all kinds of rounds"
    if case == "preemption":
        assert sum(s.num_preemptions for s in seqs) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"feeds_norm": True},
        {"aux_ids": (0, 1, 2)},
        pytest.param({"norm_before_residual": True}, marks=pytest.mark.slow),
        pytest.param(
            {"rope": {"rope_type": "default", "rope_theta": 20.0}}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_wrong_wiring_costs_acceptance(
    pair: Pair, rounds_at: Rounds, changes: dict[str, Any]
) -> None:
    """It never changes the text, so only the rounds can show it."""
    target, folder, _ = pair
    seqs = decode(eagle_engine(target, folder, 4, changes), PROMPTS, 4, max_new_tokens=NEW_TOKENS)
    assert [s.output_ids for s in seqs] == [greedy_text(target, p, NEW_TOKENS) for p in PROMPTS]
    wanted = sum(a for rounds in rounds_at(4) for _, a in rounds)
    assert sum(sum(s.accepted_per_round) for s in seqs) < wanted


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 5},
        pytest.param({"prefill_chunk": 3}, marks=SLOW),
        {"num_blocks": 17},
        {"max_len": 17, "batch_size": 5},
    ],
    ids=["whole", "chunks", "few blocks", "the head ends"],
)
def test_greedy_replay_is_exact(pair: Pair, options: dict[str, Any]) -> None:
    """Predictions from the texts of one length are the rounds of every length."""
    target, folder, _ = pair
    engine = eagle_engine(target, folder, 4, **options)
    params = SamplingParams(max_new_tokens=NEW_TOKENS)
    prompts = [*PROMPTS, [7]]
    seqs = decode(engine, prompts, LARGEST, max_new_tokens=NEW_TOKENS)
    texts = [text_of(engine, seq, params) for seq in seqs]
    for seq, text in zip(seqs, texts, strict=True):
        assert with_recorded(text, rounds_of(seq)) == (text, 0)
    for k in (1, 3, LARGEST):
        same_rounds(decode(engine, prompts, k, max_new_tokens=NEW_TOKENS), texts, k)


def test_chances_of_sampled_tokens_are_the_reference_s(pair: Pair) -> None:
    target, folder, head = pair
    engine = eagle_engine(target, folder, 4)
    prompt, count, temperature = PROMPTS[0], 12, 0.7
    params = SamplingParams(temperature=temperature, max_new_tokens=count)
    (seq,) = decode(engine, [prompt], 3, temperature=temperature, max_new_tokens=count)
    found = engine.forecast(Request(0, tuple(prompt)), seq.output_ids, LARGEST, params)
    assert found.ahead is not None and found.overlap is not None
    oracle, plain, text = reference(target), Reference(head), seq.tokens
    with torch.no_grad():
        p = (oracle(torch.tensor([text])).logits[0] / temperature).softmax(-1)
    features = plain.fuse(states(oracle, head, text))
    for n in range(len(prompt), len(text)):
        rows, chances = features[: n - 1], found.ahead[n - len(prompt)]
        assert len(chances) == min(LARGEST, len(text) - n)
        for place, chance in enumerate(chances):
            out = plain.rows(rows, torch.tensor(text[1 : n + place]))[-1:]
            q = torch.zeros(VOCAB)
            q[head.ids] = (plain.logits(out)[0] / temperature).softmax(-1)
            token = text[n + place]
            wanted = (q[token] / p[n + place - 1, token]).clamp(max=1.0)
            assert chance == pytest.approx(float(wanted), abs=1e-4)
            if place == 0:
                overlap = torch.minimum(p[n - 1], q).sum()
                assert found.overlap[n - len(prompt)] == pytest.approx(float(overlap), abs=1e-4)
            rows = torch.cat((rows, out))


@pytest.mark.parametrize("draft_vocab", [pytest.param(8, marks=SLOW), 5])
def test_sampled_text_follows_the_target(draft_vocab: int, tmp_path: Path) -> None:
    """Joint distribution of the first tokens, also where the head cannot propose all of them."""
    target, _ = lossless.save_eight(tmp_path)
    head = Head(
        hidden=32,
        target_hidden=32,
        heads=2,
        kv_heads=1,
        vocab=8,
        draft_vocab=draft_vocab,
        outputs=(-1,),
    )
    folder = save_head(tmp_path / "head", head, "speculators")
    engine = eagle_engine(target, folder, 1, batch_size=1000, num_blocks=4000)
    params = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=4, seed=1)
    found = lossless.engine_trial(engine, target, [3, 1, 4, 5], 3, params, 4000)
    assert lossless.adjusted(found) > SIGNIFICANT


assert VOCAB == 97, "heads of these tests are for this vocabulary"
