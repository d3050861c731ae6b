"""The engine with an EAGLE-3 head: the target's own text, and the reference's accepted counts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from specdec_cli.core.kv_cache import BlockAllocator, KVCache
from specdec_cli.core.types import SamplingParams, Sequence
from specdec_cli.engine.loop import Engine
from specdec_cli.methods.eagle3 import Eagle3
from specdec_cli.models.eagle3.config import read_head_config
from specdec_cli.models.eagle3.head import Eagle3Head
from specdec_cli.models.eagle3.paged import PagedHead
from specdec_cli.models.eagle3.weights import Borrowed, check_target, read_weights
from tests import lossless
from tests.eagle3 import Head, Reference, save_head
from tests.support import CPU, VOCAB, decode, greedy_reference, paged_model, reference, save_tiny

NEW_TOKENS = 24
PROMPTS = [[5, 9, 3, 11, 60], [7, 30], [4, 8, 15, 16, 23, 42, 50, 61, 12, 90, 33], [44, 2, 71, 6]]
SIGNIFICANT = 1e-4


def trained(head: Head, oracle: Any, texts: list[list[int]], steps: int) -> Head:
    """The head, trained on `texts` to propose four tokens: some of its proposals stand then."""
    with torch.inference_mode(False):
        tensors = {n: t.clone().requires_grad_(n != "d2t") for n, t in head.tensors.items()}
        weights = [t for t in tensors.values() if t.requires_grad]
        plain = Reference(replace(head, tensors=tensors))
        adam = torch.optim.Adam(weights, lr=3e-3)
        inputs = [states(oracle, head, text) for text in texts]
        for step in range(steps):
            text, features = texts[step % len(texts)], inputs[step % len(texts)]
            # Every row's first proposal, and a chain of three more from one place.
            given, following = plain.fuse(features[:-2]), torch.tensor(text[1:-1])
            goal = torch.tensor(text[2:])
            loss = cross_entropy(plain.logits(plain.rows(given, following)), goal)
            n = 3 + 7 * step % (len(text) - 8)
            given, following = given[: n - 1], following[: n - 1]
            for place in range(n, n + 4):
                out = plain.rows(given, following)[-1:]
                loss = loss + cross_entropy(
                    plain.logits(out), torch.tensor(text[place : place + 1])
                )
                given = torch.cat((given, out))
                following = torch.tensor(text[1 : place + 1])
            adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            adam.step()
    return replace(head, tensors={n: t.detach() for n, t in tensors.items()})


def states(oracle: Any, head: Head, tokens: list[int]) -> torch.Tensor:
    """Features [T, F] by transformers."""
    with torch.no_grad():
        out = oracle(torch.tensor([tokens]), output_hidden_states=True)
    return torch.cat([out.hidden_states[i + 1][0] for i in head.outputs], dim=1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Head]:
    """A target and a head in speculators' form, which borrows the target's embedding."""
    folder = tmp_path_factory.mktemp("pair")
    target = save_tiny(folder / "target", "llama", num_hidden_layers=4)
    oracle = reference(target)
    # The head never sees the last text.
    texts = [p + greedy_reference(oracle, p, NEW_TOKENS + 8) for p in PROMPTS[:-1]]
    head = Head(hidden=64, target_hidden=64, heads=4, kv_heads=2, head_dim=16, outputs=(0, 1, 2))
    head.tensors["embed_tokens.weight"] = oracle.get_input_embeddings().weight.detach().clone()
    head = trained(head, oracle, texts, 150)
    embedding = {"embed_tokens.weight": oracle.get_input_embeddings().weight.detach().clone()}
    head = replace(head, tensors=head.tensors | embedding)
    saved = save_head(folder / "head", head, "speculators", without=("embed_tokens.weight",))
    return target, saved, head


def eagle_engine(
    target: Path,
    folder: Path,
    num_layers: int,
    changes: dict[str, Any] | None = None,
    **options: Any,
) -> Engine:
    """An engine over a saved target and head; changes: to the head's settings."""
    num_blocks = options.pop("num_blocks", 200)
    config = replace(read_head_config("head", folder), **(changes or {}))
    layers = config.feature_layers(num_layers)
    model = paged_model(target, num_blocks, 4, fused=True, hidden_layers=layers)
    check_target(config, model.module.config.hidden_size, model.vocab_size, num_layers)
    lent = Borrowed(
        model.module.get_input_embeddings().weight.data,
        model.module.get_output_embeddings().weight.data,
    )
    weights = read_weights(config, folder, torch.float32, CPU, lent)
    cache = KVCache(config.cache_layers, num_blocks, 4, torch.float32, CPU)
    head = PagedHead(Eagle3Head(config, weights, 256), cache)
    settings = {"batch_size": 1, "max_model_len": 256, "prefill_chunk": 2048} | options
    allocator = BlockAllocator(num_blocks, 4)
    proposer = Eagle3(head, layers, 256)
    return Engine(model, proposer, allocator, eos_ids=frozenset(), **settings)


def expected_rounds(target: Path, head: Head, prompt: list[int], k: int) -> list[tuple[int, int]]:
    """(proposed, accepted) of each round of greedy decoding, without any cache."""
    oracle, plain = reference(target), Reference(head)
    text = prompt + greedy_reference(oracle, prompt, NEW_TOKENS)
    features, found, n = states(oracle, head, text), [], len(prompt)
    while n < len(text):
        count = min(k, len(text) - n - 1)
        if count:
            proposed, _ = plain.chain(features[: n - 1], text[:n], count)
            stand = next((i for i in range(count) if proposed[i] != text[n + i]), count)
            found.append((count, stand))
        n += found[-1][1] + 1 if count else 1
    return found


def rounds_of(seq: Sequence) -> list[tuple[int, int]]:
    return list(zip(seq.proposed_per_round, seq.accepted_per_round, strict=True))


SETTINGS: dict[str, dict[str, Any]] = {
    "one by one": {},
    "refills": {"batch_size": 2},
    "chunks": {"batch_size": 3, "prefill_chunk": 3},
    "preemption": {"batch_size": 4, "num_blocks": 17},
    "ahead": {"batch_size": 3, "runs_ahead": True},
}


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("case", SETTINGS)
def test_greedy_text_and_rounds(pair: tuple[Path, Path, Head], case: str, k: int) -> None:
    target, folder, head = pair
    engine = eagle_engine(target, folder, 4, **SETTINGS[case])
    seqs = decode(engine, PROMPTS, k, max_new_tokens=NEW_TOKENS)
    oracle = reference(target)
    for seq, prompt in zip(seqs, PROMPTS, strict=True):
        assert seq.output_ids == greedy_reference(oracle, prompt, NEW_TOKENS)
        assert rounds_of(seq) == expected_rounds(target, head, prompt, k)
    accepted = [a for seq in seqs for a in seq.accepted_per_round]
    assert 0 in accepted and k in accepted, "the case has to see all kinds of rounds"
    if case == "preemption":
        assert sum(s.num_preemptions for s in seqs) > 0


@pytest.mark.parametrize(
    "changes",
    [
        {"feeds_norm": True},
        {"rope": {"rope_type": "default", "rope_theta": 20.0}},
        {"aux_ids": (0, 1, 2)},
        {"norm_before_residual": True},
    ],
    ids=str,
)
def test_wrong_wiring_costs_acceptance(
    pair: tuple[Path, Path, Head], changes: dict[str, Any]
) -> None:
    """It never changes the text, and so has to be seen in the rounds."""
    target, folder, head = pair
    seqs = decode(eagle_engine(target, folder, 4, changes), PROMPTS, 4, max_new_tokens=NEW_TOKENS)
    oracle = reference(target)
    assert [s.output_ids for s in seqs] == [
        greedy_reference(oracle, p, NEW_TOKENS) for p in PROMPTS
    ]
    wanted = [expected_rounds(target, head, p, 4) for p in PROMPTS]
    assert sum(sum(s.accepted_per_round) for s in seqs) < sum(a for w in wanted for _, a in w)


@pytest.mark.parametrize("draft_vocab", [8, 5])
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
    engine = eagle_engine(target, folder, 1, batch_size=400, num_blocks=1600)
    params = SamplingParams(temperature=0.9, top_p=0.95, max_new_tokens=4, seed=1)
    found = lossless.engine_trial(engine, target, [3, 1, 4, 5], 3, params, 4000)
    assert lossless.adjusted(found) > SIGNIFICANT


assert VOCAB == 97, "heads of these tests are for this vocabulary"
