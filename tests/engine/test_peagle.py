"""P-EAGLE heads: rounds against a plain reference, which computes every row again."""

from dataclasses import dataclass, replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from specdec_cli.core.batch import Rectangle, padded_batch
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.engine.build import build
from specdec_cli.engine.plan import Plan
from specdec_cli.errors import SetupError
from specdec_cli.lengths.fixed import FixedLength
from specdec_cli.models.heads.eagle3.head import Eagle3Head, WaitingHead
from specdec_cli.recipe.choices.peagle import PEAGLE
from tests import drafting, lossless
from tests.cli.generate_helpers import word_tokenizer
from tests.drafting import rounds_of, run, schedules
from tests.eagle3 import Head, Reference, save_head
from tests.eagle3_pair import NEW_TOKENS, PROMPTS, states
from tests.support import VOCAB, greedy_reference, greedy_text, reference, save_tiny

MASK, K = 95, 4
SETTINGS = schedules(17)


@dataclass(frozen=True)
class Pair:
    """The folders of a target and of a head, and the head."""

    target: Path
    folder: Path
    head: Head


def masked(plain: Reference, features: Tensor, tokens: list[int], k: int, mask: int) -> Tensor:
    """Logits [k, Vd] of the tokens after `tokens`. features: [n - 1, F]."""
    own = plain.fuse(plain.weight("mask_hidden").view(1, -1))
    given = torch.cat((plain.fuse(features), own.expand(k - 1, -1)))
    rows = plain.rows(given, torch.tensor([*tokens[1:], *[mask] * (k - 1)]))
    return plain.logits(rows[-k:])


def save_pair(folder: Path, steps: int = 60, vocab: int = VOCAB, **settings: Any) -> Pair:
    target = save_tiny(folder / "target", "llama", num_hidden_layers=4, vocab_size=vocab)
    word_tokenizer(target, [f"w{i}" for i in range(vocab)])
    oracle, mask = reference(target), min(MASK, vocab - 1)
    sizes: dict[str, Any] = {
        "hidden": 64,
        "target_hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 16,
    }
    settings = {
        "outputs": (0, 1, 2),
        "layers": 2,
        "norm_before_fc": True,
        "vocab": vocab,
    } | settings
    head = Head(**sizes, **settings)
    made = torch.Generator().manual_seed(1)
    head.tensors["mask_hidden"] = torch.randn(1, 1, 192, generator=made)
    head.tensors["embed_tokens.weight"] = oracle.get_input_embeddings().weight.detach().clone()
    if steps:
        head = _trained(head, oracle, steps)
    own = {"speculators_model_type": "peagle", "speculators_config": {"algorithm": "peagle"}}
    saved = save_head(folder / "head", head, "speculators", **own, mask_token_id=mask)
    return Pair(target, saved, head)


def _trained(head: Head, oracle: Any, steps: int) -> Head:
    texts = [p + greedy_reference(oracle, p, NEW_TOKENS + 8) for p in PROMPTS[:-1]]
    inputs = [states(oracle, head, text) for text in texts]
    places = torch.full((head.vocab,), -100)
    places[head.ids] = torch.arange(head.draft_vocab)
    with torch.inference_mode(False), torch.enable_grad():
        names = [n for n in head.tensors if n not in ("d2t", "embed_tokens.weight")]
        for name in names:
            head.tensors[name].requires_grad_()
        plain = Reference(head)
        adam = torch.optim.Adam([head.tensors[n] for n in names], lr=3e-3)
        for step in range(steps):
            text, features = texts[step % 3], inputs[step % 3]
            loss = torch.zeros(())
            for n in range(2 + step % 4, len(text) - K, 4):
                goals = places[torch.tensor(text[n : n + K])]
                if (goals >= 0).any():
                    logits = masked(plain, features[: n - 1], text[:n], K, MASK)
                    loss = loss + cross_entropy(logits, goals)
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
    return replace(head, tensors={n: t.detach() for n, t in head.tensors.items()})


def expected_rounds(pair: Pair, prompt: list[int], *ks: int) -> list[tuple[int, int]]:
    """ks: of the rounds, in turn. Those that propose nothing are left out."""
    oracle, plain = reference(pair.target), Reference(pair.head)
    text = prompt + greedy_text(pair.target, prompt, NEW_TOKENS)
    features, found, n, lengths = states(oracle, pair.head, text), [], len(prompt), cycle(ks)
    while n < len(text):
        count, stand = min(next(lengths), len(text) - n - 1), 0
        if count:
            logits = masked(plain, features[: n - 1], text[:n], count, MASK)
            drafts = pair.head.ids[logits.argmax(1)].tolist()
            stand = next((i for i in range(count) if drafts[i] != text[n + i]), count)
            found.append((count, stand))
        n += stand + 1
    return found


class Turns(FixedLength):
    """Rounds of these lengths in turn."""

    def __init__(self, *ks: int) -> None:
        self.ks, self.left = ks, cycle(ks)

    def lengths(self, k: int) -> tuple[int, ...]:
        return tuple(sorted(set(self.ks)))

    def next_k(self, *about: Any) -> int:
        return next(self.left)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return save_pair(tmp_path_factory.mktemp("peagle"), draft_vocab=80)


def planned(pair: Pair, k: int = K, **more: Any) -> Plan:
    return drafting.planned(pair.target, pair.folder, k, **more)


@pytest.mark.parametrize("case", SETTINGS)
def test_text_and_rounds_are_those_of_the_reference(pair: Pair, case: str) -> None:
    seqs = run(planned(pair, **SETTINGS[case]), PROMPTS)
    for seq, prompt in zip(seqs, PROMPTS, strict=True):
        assert seq.output_ids == greedy_text(pair.target, prompt, NEW_TOKENS)
        assert rounds_of(seq) == expected_rounds(pair, prompt, K)
    assert len({a for seq in seqs for a in seq.accepted_per_round}) > 2
    assert (sum(s.num_preemptions for s in seqs) > 0) == (case == "preemption")


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_round_takes_one_pass_of_the_head(
    pair: Pair, is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """True rows and masks go together, whether or not a round proposes; on a GPU with padding."""
    passes: list[int] = []

    def counted(self: Eagle3Head, ids: Tensor, *more: Any) -> Any:
        passes.append(len(ids))
        return forward(self, ids, *more)

    def padded(self: WaitingHead, what: Rectangle, state: BatchState) -> Any:
        return padded_batch(what, state, self.cache.block_size, VOCAB), None

    forward = Eagle3Head.__call__
    monkeypatch.setattr(Eagle3Head, "__call__", counted)
    if is_padded:
        monkeypatch.setattr(WaitingHead, "_batch", padded)
    found, ks = planned(pair), (4, 0, 0, 2, 4, 0, 1, 3)
    for prompt in PROMPTS:
        passes.clear()
        engine = build(found, 12)
        engine.policy = Turns(*ks)
        (seq,) = engine.run([Request(0, tuple(prompt))], K, found.params).seqs
        assert seq.output_ids == greedy_text(pair.target, prompt, NEW_TOKENS)
        assert rounds_of(seq) == expected_rounds(pair, prompt, *ks)
        rounds = len(seq.proposed_per_round) + seq.rounds_without_proposal
        assert len(passes) == rounds + (len(prompt) > 1)  # that of the prompt
        assert not is_padded or set(passes[-len(ks) :]) == {K + 1 + max(k - 1, 0) for k in ks}


def test_one_k_predicts_the_others(pair: Pair) -> None:
    """Rounds of a smaller k are told by the drafts of a larger one."""
    engine, requests = build(planned(pair, 6), 12), []
    requests = [Request(i, tuple(p)) for i, p in enumerate(PROMPTS)]
    seqs = engine.run(requests, 3, planned(pair).params).seqs
    for seq, request in zip(seqs, requests, strict=True):
        told = engine.forecast(request, seq.output_ids, 6, planned(pair).params)
        assert told.ahead is not None and told.only_k is None
        start = 0
        for proposed, accepted in rounds_of(seq):
            chances = islice(told.ahead[start], proposed)
            assert accepted == (*(round(c) for c in chances), 0).index(0)
            start += accepted + 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no mask": ({"mask_token_id": None}, "pard_token or ptd_token_id is null: .* 97 ids"),
    "mask id": ({"mask_token_id": 97}, "mask_token_id or .* is 97: it must be one of 97 ids"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_is_refused_by_its_key(pair: Pair, case: str, tmp_path: Path) -> None:
    changes, told = REFUSED[case]
    own = {"speculators_model_type": "peagle", "speculators_config": {"algorithm": "peagle"}}
    folder = save_head(tmp_path / "head", pair.head, "speculators", **(own | changes))
    with pytest.raises(SetupError, match=told):
        planned(replace(pair, folder=folder))
    folder = save_head(
        tmp_path / "other", pair.head, "speculators", ("mask_hidden",), **own, mask_token_id=9
    )
    with pytest.raises(SetupError, match="1 missing tensor, first mask_hidden"):
        planned(replace(pair, folder=folder))


def test_a_flat_config_and_dummy_weights(pair: Pair, tmp_path: Path) -> None:
    """SpecForge's class, and an EAGLE-3 class with a token for masks."""
    first = run(planned(pair), PROMPTS)
    for kind in ("PEagleDraftModel", "LlamaForCausalLMEagle3"):
        own = {"architectures": [kind], "ptd_token_id": MASK}
        folder = save_head(tmp_path / kind, pair.head, "safeailab", **own)
        other = replace(pair, folder=folder)
        assert list(map(rounds_of, run(planned(other), PROMPTS))) == list(map(rounds_of, first))
        assert all(run(planned(other, draft__load_format="dummy"), PROMPTS))


def test_facts_of_a_run(pair: Pair) -> None:
    found = planned(pair)
    assert found.recipe.speculation.method == "peagle"
    assert found.execution["draft_masks"] == "mask token 95"
    assert "draft_conventions" not in found.execution
    paged: Any = build(found, 12).proposer.head  # type: ignore[union-attr]
    held = paged.cache.num_bytes + paged.rows.nbytes + paged.counts.nbytes
    assert found.draft is not None and found.draft.block_bytes(4) * paged.cache.num_blocks == held
    told = PEAGLE.to_vllm(lambda *key: None, "d")  # type: ignore[misc]
    assert told.config == {"method": "eagle3", "model": "d", "parallel_drafting": True}


def test_sampled_text_follows_the_target(tmp_path: Path) -> None:
    """Joint distribution of the first tokens."""
    small = save_pair(tmp_path, steps=0, vocab=8, draft_vocab=6)
    more = {"sampling.temperature": 0.9, "sampling.top_p": 0.95, "sampling.max_new_tokens": 4}
    found = planned(small, 3, run__batch_size=1000, cache__num_blocks=4000, **more)
    params = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=4, seed=1, ignore_eos=True)
    engine = build(found, 12)
    told = lossless.engine_trial(engine, small.target, [3, 1, 4, 5], 3, params, 4000)
    assert lossless.adjusted(told) > 1e-4
