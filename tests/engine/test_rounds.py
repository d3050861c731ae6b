"""The arithmetic of a round, on fakes and on real tiny models."""

from pathlib import Path

import pytest
import torch

from specdec_cli.acceptance.base import draw_next
from specdec_cli.core.batch import Span
from specdec_cli.core.candidates import Noise, TargetOutput
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.types import Request, SamplingParams, Sequence
from specdec_cli.engine import loop
from specdec_cli.errors import UsageError
from specdec_cli.models.paged import PagedModel
from tests.drafting import rounds_of
from tests.engine.fakes import (
    FakeDraft,
    FakeModel,
    Rule,
    Scripted,
    continuation,
    fake_engine,
    first,
    random_prompt,
    run_checked,
    sometimes,
    target_rule,
    wrong,
)
from tests.support import (
    VOCAB,
    assisted_rounds,
    decode,
    greedy_reference,
    make_engine,
    reference,
    save_tiny,
)

PROMPT_LENGTHS = [1, 9, 2, 17, 5, 4]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_round_without_proposals_marks_logits_that_are_not_finite(temperature: float) -> None:
    logits = torch.tensor([[[0.0, 3.0, 1.0]], [[0.0, float("nan"), 1.0]], [[9.0, 0.0, 0.0]]])
    noise = Noise(torch.empty(3, 0), torch.empty(3, 0), torch.full((3, 1), 0.5))
    params = SamplingParams(temperature=temperature)
    verdict = draw_next(TargetOutput(logits), params, noise if temperature else None)
    assert verdict.token_ids.tolist() == [[1], [-1], [0]]
    assert verdict.num_accepted.tolist() == [0, -1, 0]


@pytest.mark.parametrize("draft", [target_rule, wrong, sometimes], ids=["right", "wrong", "mixed"])
@pytest.mark.parametrize("k", [0, 1, 2, 5])
@pytest.mark.parametrize("batch_size", [1, 3], ids=["b1", "b3"])
def test_every_round_obeys_the_arithmetic(draft: Rule, k: int, batch_size: int) -> None:
    engine = fake_engine(draft, batch_size=batch_size)
    prompts = [random_prompt(n) for n in PROMPT_LENGTHS]
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    run = engine.start(requests, k, SamplingParams(max_new_tokens=13))
    run_checked(engine, run)
    for seq, prompt in zip(run.seqs, prompts, strict=True):
        assert seq.output_ids == continuation(target_rule, prompt, 13)
        assert seq.finish_reason == "length"
        assert sum(seq.accepted_per_round) + len(seq.accepted_per_round) + (
            seq.rounds_without_proposal
        ) == len(seq.output_ids)
        if draft is target_rule:
            assert seq.accepted_per_round == seq.proposed_per_round
        if draft is wrong:
            assert set(seq.accepted_per_round) <= {0}
    assert engine.allocator.num_used == 0


def test_compiling_ahead_leaves_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes no blocks and changes no later run. A prompt that does not fit is left out. Kernels
    are compiled on the processors that a CPU quota leaves."""
    ran = []
    monkeypatch.setattr(loop, "num_cores", lambda: 3)
    monkeypatch.setattr(
        loop, "compile_ahead", lambda run, device, threads: ran.append((run(), threads))
    )
    engine = fake_engine(sometimes, batch_size=3)
    engine.compile_ahead([1, 9, 10**6], 3, SamplingParams(max_new_tokens=8))
    assert ran == [(None, 3)] and engine.allocator.num_used == 0
    prompts = [random_prompt(n) for n in PROMPT_LENGTHS]
    for seq, prompt in zip(decode(engine, prompts, 3, max_new_tokens=13), prompts, strict=True):
        assert seq.output_ids == continuation(target_rule, prompt, 13)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_right_for_the_first_j(k: int) -> None:
    """If a draft is right j times and then wrong, every full round accepts j proposals."""
    prompt = random_prompt(6)
    for j in range(k + 1):
        engine = fake_engine(first(j, len(prompt), k))
        (seq,) = decode(engine, [prompt], k, max_new_tokens=30)
        full = [a for p, a in rounds_of(seq) if p == k]
        assert full and set(full) == {j}
        assert seq.output_ids == continuation(target_rule, prompt, 30)


def test_draft_lags_two_tokens_exactly_after_full_acceptance() -> None:
    engine = fake_engine(sometimes)
    prompt = random_prompt(5)
    (seq,) = decode(engine, [prompt], 3, max_new_tokens=60)
    assert isinstance(engine.proposer, FakeDraft)
    want = [2 if accepted == proposed else 1 for proposed, accepted in rounds_of(seq)]
    assert engine.proposer.caught_up == [1, *want[:-1]]
    assert set(want) == {1, 2}, "the case is not what this test is about"


@pytest.mark.parametrize(
    ("k", "new_tokens", "want"),
    [
        (4, 1, []),
        (4, 2, [1]),
        (4, 3, [2]),
        (4, 5, [4]),
        (4, 6, [4]),
        (4, 7, [4, 1]),
        (1, 5, [1, 1]),
        (1, 4, [1, 1]),
    ],
)
def test_proposals_stop_one_short_of_the_limit(k: int, new_tokens: int, want: list[int]) -> None:
    """With a draft that is always right, k_i = min(k, remaining - 1)."""
    (seq,) = decode(fake_engine(target_rule), [random_prompt(3)], k, max_new_tokens=new_tokens)
    assert seq.proposed_per_round == want
    assert seq.rounds_without_proposal == new_tokens - sum(want) - len(want)
    assert len(seq.output_ids) == new_tokens


def test_max_model_len_hit_inside_a_draft() -> None:
    engine = fake_engine(target_rule, max_model_len=12)
    prompt = random_prompt(5)
    (seq,) = decode(engine, [prompt], 4, max_new_tokens=100)
    assert seq.proposed_per_round == [4, 1], "7 new tokens fit: 4 + 1, then 1 + 1"
    assert len(seq.tokens) == 12 and seq.finish_reason == "length"


def test_draft_with_a_shorter_context_stops_proposing() -> None:
    engine = fake_engine(target_rule, draft_max_len=13)
    prompt = random_prompt(5)
    (seq,) = decode(engine, [prompt], 4, max_new_tokens=20)
    assert seq.proposed_per_round == [4, 3], "at 5 and at 10 tokens; at 14 nothing"
    assert seq.rounds_without_proposal == 20 - 9
    assert seq.output_ids == continuation(target_rule, prompt, 20)


def test_prompt_longer_than_the_drafts_context() -> None:
    engine = fake_engine(target_rule, draft_max_len=13)
    prompt = random_prompt(30)
    (seq,) = decode(engine, [prompt], 4, max_new_tokens=5)
    assert seq.proposed_per_round == [] and seq.rounds_without_proposal == 5
    assert isinstance(engine.proposer, FakeDraft) and engine.proposer.cache.cells == {}


def test_one_batch_holds_every_proposal_length() -> None:
    """Sequences near their end, near the draft's context, and far from both: k_i 0..4 at once."""
    engine = fake_engine(wrong, batch_size=6, draft_max_len=40)
    prompts = [random_prompt(n) for n in (40, 39, 38, 37, 35, 5)]
    seqs = decode(engine, prompts, 4, max_new_tokens=8)
    assert isinstance(engine.proposer, FakeDraft)
    assert engine.proposer.lens_seen[0] == [0, 1, 2, 3, 4, 4]
    assert engine.proposer.lens_seen[3] == [0, 0, 0, 0, 2, 4]
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.output_ids == continuation(target_rule, prompt, 8)


@pytest.mark.parametrize("idle", [1, 2, 3, 7])
def test_draft_catches_up_after_rounds_without_proposals(idle: int) -> None:
    """Prefill feeds all tokens except the last, which the next round feeds as usual."""
    engine = fake_engine(sometimes, batch_size=2)
    engine.policy = Scripted(3, *[0] * idle)
    prompts = [random_prompt(4), random_prompt(11)]
    seqs = decode(engine, prompts, 3, max_new_tokens=40)
    assert isinstance(engine.proposer, FakeDraft)
    assert engine.proposer.caught_up and set(engine.proposer.caught_up) <= {1, 2}
    prefilled = engine.proposer.fake.prefill_sizes
    assert len(prefilled) > 3 if idle > 1 else len(prefilled) >= 1
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.output_ids == continuation(target_rule, prompt, 40)
        assert seq.rounds_without_proposal > 3


def test_no_rounds_for_an_empty_prompt() -> None:
    engine = fake_engine()
    seqs = decode(engine, [[], [5]], 2, max_new_tokens=4)
    assert seqs[0].finish_reason == "error" and "no tokens" in (seqs[0].error or "")
    assert seqs[1].finish_reason == "length" and len(seqs[1].output_ids) == 4


@pytest.mark.parametrize("length", [12, 13], ids=["exactly", "over"])
def test_prompt_without_room_for_a_token_is_an_error(length: int) -> None:
    engine = fake_engine(max_model_len=12)
    seqs = decode(engine, [random_prompt(length), random_prompt(11)], 2, max_new_tokens=4)
    assert seqs[0].finish_reason == "error"
    assert str(length) in (seqs[0].error or "") and "12" in (seqs[0].error or "")
    assert len(seqs[1].output_ids) == 1 and seqs[1].finish_reason == "length"


@pytest.mark.parametrize("chunk", [1, 3, 7, 2048])
def test_chunked_prefill_feeds_the_same_tokens(chunk: int) -> None:
    engine = fake_engine(sometimes, batch_size=3, prefill_chunk=chunk)
    prompts = [random_prompt(n) for n in (23, 1, 9, 2, 30)]
    seqs = decode(engine, prompts, 3, max_new_tokens=9)
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.output_ids == continuation(target_rule, prompt, 9)
    assert isinstance(engine.target, FakeModel)
    assert max(engine.target.prefill_sizes) <= chunk
    assert sum(engine.target.prefill_sizes) == sum(len(p) - 1 for p in prompts)


def test_plain_decoding_needs_no_draft() -> None:
    engine = fake_engine(None, batch_size=2)
    prompts = [random_prompt(n) for n in (3, 8, 1)]
    seqs = decode(engine, prompts, 0, max_new_tokens=6)
    assert [s.output_ids for s in seqs] == [continuation(target_rule, p, 6) for p in prompts]
    assert all(s.rounds_without_proposal == 6 and not s.proposed_per_round for s in seqs)
    with pytest.raises(UsageError, match="built for k up to 0"):
        engine.start([Request(0, (1,))], 1, SamplingParams())


# Real models from here on.


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("target"), "llama", seed=0)


@pytest.fixture(scope="module")
def noised_folder(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with noise on its weights: a draft that is sometimes right."""
    model = reference(target_folder)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.12 * parameter.std() * noise)
    folder = tmp_path_factory.mktemp("noised")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def unrelated_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("unrelated"), "llama", seed=1)


@pytest.mark.parametrize("k", [2, 5, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 3, 4))])
def test_rounds_equal_transformers_assisted_generation(
    k: int, target_folder: Path, noised_folder: Path, unrelated_folder: Path
) -> None:
    oracle = reference(target_folder)
    total = proposals = 0
    for draft in (noised_folder, unrelated_folder):
        assistant = reference(draft)
        engine = make_engine(target_folder, draft)
        for prompt in (random_prompt(1), random_prompt(7), random_prompt(20)):
            want = assisted_rounds(oracle, assistant, prompt, k, 32)
            (seq,) = decode(engine, [prompt], k, max_new_tokens=32)
            assert seq.output_ids == want[0]
            assert rounds_of(seq) == want[1]
            if draft is noised_folder:
                total += sum(seq.accepted_per_round)
                proposals += sum(seq.proposed_per_round)
    assert 0 < total < proposals, "the noised draft should be right sometimes"


@pytest.mark.each_value
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("width", [VOCAB + 31, VOCAB - 14], ids=["wider", "narrower"])
def test_draft_with_another_padded_vocabulary(
    family: str, width: int, noised_folder: Path, target_folder: Path, tmp_path: Path
) -> None:
    target = target_folder if family == "llama" else save_tiny(tmp_path / "t", family)
    draft = save_tiny(tmp_path / "d", family, vocab_size=width)
    oracle = reference(target)
    engine = make_engine(target, draft, batch_size=2)
    asked = [[VOCAB - 1, 5, VOCAB - 2], [VOCAB - 1], random_prompt(12)]
    want = [greedy_reference(oracle, p, 20) for p in asked]
    assert any(t >= VOCAB - 14 for row in want for t in row), "no id the narrow draft lacks"
    for k in (1, 4):
        assert [s.output_ids for s in decode(engine, asked, k, max_new_tokens=20)] == want


def test_a_narrower_draft_proposes_no_id_that_it_lacks() -> None:
    """All its logits are low, so an id without a logit would otherwise be the likeliest."""
    own, count = VOCAB - 14, 500
    logits = torch.linspace(-30.0, -20.0, own).repeat(count, 1)
    caps, noise = torch.ones(count, dtype=torch.int64), torch.linspace(0.0, 0.9999, count)[:, None]
    for temperature in (0.0, 0.5, 500.0):
        params = SamplingParams(temperature=temperature)
        drawn = Drafting(1, params, caps, VOCAB, noise).draw(logits)
        assert drawn.max() == own - 1
        assert drawn.min() == (0 if temperature == 500.0 else drawn.min())


def test_same_weights_in_a_wider_vocabulary_accept_everything(
    target_folder: Path, tmp_path: Path
) -> None:
    """Padding rows must change neither proposals nor acceptances."""
    model = reference(target_folder)
    model.resize_token_embeddings(VOCAB + 31, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[VOCAB:] = 100.0  # would win every argmax if it were not cut off
    model.save_pretrained(tmp_path)
    engine = make_engine(target_folder, tmp_path)
    (seq,) = decode(engine, [random_prompt(9)], 4, max_new_tokens=30)
    assert seq.accepted_per_round == seq.proposed_per_round


def test_a_draft_reads_ids_that_it_lacks_as_its_last(target_folder: Path) -> None:
    """The target has more padding. Ids that the draft has are read as they are."""
    plain, foreign = (
        make_engine(target_folder, None).target,
        make_engine(target_folder, None).target,
    )
    foreign.foreign_ids = True

    def logits(model: PagedModel, *ids: int) -> torch.Tensor:
        seq = Sequence(0, [*ids], len(ids), 99, block_table=[1, 2])
        return model.forward([Span(seq, 0, len(ids))], [1]).logits

    assert torch.equal(logits(foreign, 5, VOCAB - 2, 7), logits(plain, 5, VOCAB - 2, 7))
    assert torch.equal(logits(foreign, 5, VOCAB + 3, 7), logits(plain, 5, VOCAB - 1, 7))


@pytest.mark.parametrize("chunk", [1, 3, 7])
def test_chunked_prefill_writes_the_same_text(
    chunk: int, target_folder: Path, noised_folder: Path
) -> None:
    asked = [random_prompt(n) for n in (1, 8, 19, 2)]
    whole = decode(
        make_engine(target_folder, noised_folder, batch_size=3), asked, 3, max_new_tokens=24
    )
    engine = make_engine(target_folder, noised_folder, batch_size=3, prefill_chunk=chunk)
    parts = decode(engine, asked, 3, max_new_tokens=24)
    assert [s.output_ids for s in parts] == [s.output_ids for s in whole]
    assert [s.accepted_per_round for s in parts] == [s.accepted_per_round for s in whole]


def test_real_draft_catches_up_by_any_amount(target_folder: Path) -> None:
    """The same weights accept everything if the draft's cache is right after idle rounds."""
    engine = make_engine(target_folder, target_folder, batch_size=3)
    asked = [random_prompt(n) for n in (2, 9, 14)]
    engine.policy = Scripted(3, 0, 1, 0, 0, 2, 0, 0, 0)
    seqs = decode(engine, asked, 3, max_new_tokens=40)
    oracle = reference(target_folder)
    for seq, prompt in zip(seqs, asked, strict=True):
        assert seq.output_ids == greedy_reference(oracle, prompt, 40)
        assert seq.accepted_per_round == seq.proposed_per_round


def test_real_draft_with_a_shorter_context(target_folder: Path, tmp_path: Path) -> None:
    """Positions past the draft's table would crash drafts like gpt2, so it must not be asked."""
    target = save_tiny(tmp_path / "target", "gpt2", n_positions=64)
    draft = save_tiny(tmp_path / "draft", "gpt2", n_positions=16)
    engine = make_engine(target, draft, batch_size=2, max_model_len=64, draft_max_len=16)
    asked = [random_prompt(5), random_prompt(20)]
    want = [greedy_reference(reference(target), p, 30) for p in asked]
    seqs = decode(engine, asked, 4, max_new_tokens=30)
    assert [s.output_ids for s in seqs] == want
    assert seqs[0].proposed_per_round and not seqs[1].proposed_per_round
