"""Emitted tokens follow the target's distribution, and the same seed repeats them.

A part of `scripts/proofs/sampling.py`, with fewer draws where noted. All seeds are fixed, so a test
that passes once always passes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from specdec_cli.acceptance.base import AcceptanceRule
from specdec_cli.acceptance.block import Block
from specdec_cli.core.batch import Rectangle
from specdec_cli.core.candidates import Candidates, Noise
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.sampling import round_noise
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.engine import round as round_module
from specdec_cli.engine.loop import Engine
from specdec_cli.methods.draft_model import DraftModel
from tests import lossless
from tests.lossless import (
    CORRECT,
    FAULTS,
    LOOKUP_FAULTS,
    Pair,
    Planted,
    Rule,
    chi_square,
    label,
    lookup_pair,
    random_pair,
    tied_pair,
)
from tests.support import make_engine, ngram_engine, save_tiny

DRAWS = 20_000
SIGNIFICANT = 1e-4
POWER_PAIRS = [9, 10, 11, 17, 23]  # each of the filters, and each temperature
PROMPT = [3, 1, 4, 5]
ECHO = [3, 1, 4, 1, 3, 1, 4]  # has a match at once, and one after most continuations


@cache
def noisy_pair(number: int, k: int) -> tuple[Pair, Noise]:
    pair = random_pair(number)
    return pair, lossless.pair_noise(pair, k, DRAWS)


def trial(number: int, k: int, rule: Rule) -> dict[str, float]:
    pair, noise = noisy_pair(number, k)
    return lossless.trial(pair, rule, k, noise)


def test_chi_square_is_scipys() -> None:
    generator = torch.Generator().manual_seed(0)
    for bins in (2, 5, 300):
        probs = torch.rand(1, bins, generator=generator).double() + 0.5
        probs /= probs.sum()
        drawn = torch.multinomial(probs[0], 100 * bins, replacement=True, generator=generator)
        counts = drawn.bincount(minlength=bins)
        want = stats.chisquare(counts.numpy(), (100 * bins * probs[0]).numpy()).pvalue
        assert chi_square(counts[None], probs) == pytest.approx(want, rel=1e-9)


def test_chi_square_merges_small_bins() -> None:
    """3 and 4 make a bin of 7, 2 alone joins the smallest other bin, and rows add up."""
    merged = stats.chi2.sf((41 - 43) ** 2 / 43 + (50 - 50) ** 2 / 50 + (9 - 7) ** 2 / 7, 2)
    row, probs = torch.tensor([[41, 50, 4, 5]]), torch.tensor([[0.43, 0.5, 0.03, 0.04]])
    assert chi_square(row, probs) == pytest.approx(merged, rel=1e-6)

    joined = stats.chi2.sf((70 - 60) ** 2 / 60 + (30 - 40) ** 2 / 40, 1)
    other, more = torch.tensor([[70, 25, 5, 0]]), torch.tensor([[0.6, 0.38, 0.02, 0.0]])
    assert chi_square(other, more) == pytest.approx(joined, rel=1e-6)

    both = chi_square(torch.cat((row, other)), torch.cat((probs, more)))
    total = stats.chi2.isf(merged, 2) + stats.chi2.isf(joined, 1)
    assert both == pytest.approx(stats.chi2.sf(total, 3), rel=1e-6)


def test_chi_square_of_too_little_says_nothing_and_of_the_impossible_says_no() -> None:
    assert chi_square(torch.tensor([[2, 1, 0]]), torch.tensor([[0.4, 0.3, 0.3]])) == 1.0
    assert chi_square(torch.tensor([[0, 0, 0]]), torch.tensor([[0.4, 0.3, 0.3]])) == 1.0
    assert chi_square(torch.tensor([[900, 0, 1]]), torch.tensor([[0.5, 0.5, 0.0]])) == 0.0


@pytest.mark.parametrize("k", [0, 1, 4])
def test_faults_differ_from_the_project_by_nothing_else(k: int) -> None:
    """The rule that faults are planted in gives exactly the project's tokens, also for ragged
    lengths."""
    pair = random_pair(3)
    noise = lossless.pair_noise(pair, k, 2000)
    row = torch.arange(2000)
    noise = Noise(noise.draft[:, :k], noise.accept[:, :k], noise.sample[:, : k + 1])
    played = lossless.play(pair, CORRECT, row % lossless.VOCAB, row % (k + 1), noise)
    ours, project = Rule()(played), CORRECT(played)
    assert torch.equal(ours[0], project[0])
    assert torch.equal(ours[1], project[1])
    assert len(set(project[1].tolist())) == k + 1


@pytest.mark.parametrize("count", [20, pytest.param(40, marks=pytest.mark.slow)])
def test_pairs(count: int) -> None:
    """Tests the first token, every further one, the bonus, and the first two jointly; k = 1..4 in
    turn. Every filter meets every temperature in 20 pairs."""
    found = {n: trial(n, 1 + n % 4, CORRECT) for n in range(count)}
    rejected = {n: p for n, p in found.items() if lossless.adjusted(p) < SIGNIFICANT}
    assert not rejected
    for name in ("token 0", "joint"):
        assert stats.kstest([p[name] for p in found.values()], "uniform").pvalue > 0.01, name


@pytest.mark.parametrize("k", [1, 4])
def test_acceptance_rate_is_the_overlap(k: int) -> None:
    """The rate equals the sum of min(p, q), to the precision of 20 000 rounds."""
    for number in (0, 6, 12, 18, 24):
        pair, noise = noisy_pair(number, k)
        assert lossless.acceptance(pair, k, noise) > SIGNIFICANT


# The draws and the rule are these tests' own, so nothing but a change of them changes the outcome.
@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, marks=[pytest.mark.slow] * (n % 5 > 0)) for n, fault in enumerate(FAULTS)],
    ids=label,
)
def test_fault_is_caught(fault: Rule) -> None:
    """The tests above have power: at least 3 of 5 pairs show each fault."""
    caught = [n for n in POWER_PAIRS if lossless.adjusted(trial(n, 3, fault)) < SIGNIFICANT]
    assert len(caught) >= 3


def lookup_trial(number: int, k: int, rule: Rule) -> dict[str, float]:
    pair = lookup_pair(number)
    return lossless.trial(pair, rule, k, lossless.pair_noise(pair, k, DRAWS))


def test_proposals_that_are_not_drawn() -> None:
    """q is one-hot, as for prompt lookup: ten pairs, two for each filter; k = 1..4 in turn."""
    found = {n: lookup_trial(n, 1 + n % 4, CORRECT) for n in range(10)}
    assert not {n: p for n, p in found.items() if lossless.adjusted(p) < SIGNIFICANT}


@pytest.mark.parametrize("fault", LOOKUP_FAULTS[:2], ids=label)
def test_fault_is_caught_in_proposals_that_are_not_drawn(fault: Rule) -> None:
    caught = [n for n in (9, 17, 23) if lossless.adjusted(lookup_trial(n, 2, fault)) < SIGNIFICANT]
    assert len(caught) == 3


@pytest.mark.parametrize("k", [1, 3])
def test_ties_of_the_accept_noise(k: int) -> None:
    """If noise equals p / q exactly, `<` is lossless and `<=` is not."""
    for number in range(3):
        pair = tied_pair(number)
        noise = lossless.pair_noise(pair, k, DRAWS)
        assert lossless.adjusted(lossless.trial(pair, CORRECT, k, noise)) > SIGNIFICANT
        tied = lossless.trial(pair, lossless.AcceptTies(), k, noise)
        assert lossless.adjusted(tied) < SIGNIFICANT


def engine_p(
    tiny: tuple[Path, Path],
    params: SamplingParams,
    k: int,
    count: int = 4000,
    proposer: str = "draft",
    rule: AcceptanceRule | None = None,
) -> dict[str, float]:
    """p-values of the engine's first 1, 2 and 3 tokens against transformers' probabilities."""
    if proposer == "ngram":
        engine = ngram_engine(tiny[0], batch_size=1000, num_blocks=4500, rule=rule)
        return lossless.engine_trial(engine, tiny[0], ECHO, k, params, count)
    engine = make_engine(*tiny, batch_size=1000, num_blocks=2500, rule=rule)
    return lossless.engine_trial(engine, tiny[0], PROMPT, k, params, count)


ENGINE_PARAMS = {
    "T": SamplingParams(temperature=0.9, max_new_tokens=4, seed=1),
    "top-k": SamplingParams(temperature=0.9, top_k=5, max_new_tokens=4, seed=2),
    "top-p": SamplingParams(temperature=1.3, top_p=0.9, max_new_tokens=4, seed=3),
    "all": SamplingParams(temperature=0.9, top_k=5, top_p=0.9, max_new_tokens=4, seed=4),
}


def crossed(in_ci: set[tuple[str, int]], lengths: list[int]) -> list[Any]:
    """Every pair of sampling parameters and k; those that are not `in_ci` are slow."""
    pairs = [(name, k) for name in ENGINE_PARAMS for k in lengths]
    assert in_ci <= set(pairs)
    return [pytest.param(*pair, marks=() if pair in in_ci else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(
    ("params", "k"),
    crossed(
        {("all", 0), ("T", 1), ("top-p", 1), ("all", 3)},
        [0, 1, 2, 3],
    ),
)
def test_engine_follows_transformers(tiny: tuple[Path, Path], params: str, k: int) -> None:
    """Compares the joint distribution of the engine's tokens over 4000 runs of one prompt."""
    assert lossless.adjusted(engine_p(tiny, ENGINE_PARAMS[params], k)) > SIGNIFICANT


@pytest.mark.parametrize(("params", "k"), crossed({("all", 3)}, [1, 3]))
def test_engine_with_prompt_lookup_follows_transformers(
    tiny: tuple[Path, Path], params: str, k: int
) -> None:
    found = engine_p(tiny, ENGINE_PARAMS[params], k, proposer="ngram")
    assert lossless.adjusted(found) > SIGNIFICANT


# That the engine is caught at a fault is shown with few; all are caught in the trials above.
@pytest.mark.parametrize("fault", LOOKUP_FAULTS[:1], ids=label)
def test_fault_in_the_engine_with_prompt_lookup_is_caught(
    tiny: tuple[Path, Path], fault: Rule
) -> None:
    found = engine_p(tiny, ENGINE_PARAMS["all"], 2, proposer="ngram", rule=Planted(fault))
    assert lossless.adjusted(found) < SIGNIFICANT


@pytest.mark.parametrize(
    "fault",
    [
        lossless.ResampleFromTarget(),
        pytest.param(lossless.BonusFromDraft(), marks=pytest.mark.slow),
    ],
    ids=label,
)
def test_fault_in_the_engine_is_caught(tiny: tuple[Path, Path], fault: Rule) -> None:
    found = engine_p(tiny, ENGINE_PARAMS["all"], 2, rule=Planted(fault))
    assert lossless.adjusted(found) < SIGNIFICANT


class Blocks(DraftModel):
    """Draws from one pass's logits, rolled by a token a place, and ends blocks by `how`. "few"
    draws one token less than it may.

    Nothing that it proposes is fed: the next round lacks up to k + 1 tokens of its cache.
    """

    tail = 4
    how = ""

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        assert self.model is not None
        what = Rectangle(state.tail, draft.caps, -4, 2, self.max_len, True, state.draft_kv)
        logits = self.model.forward_slots(what, state).logits[:, 0]
        block = torch.stack([logits.roll(place, 1) for place in range(draft.k)], dim=1)
        is_sure = block.softmax(dim=2).amax(dim=2) > 0.25
        if "singly" in self.how:
            for place in range(draft.k - ("few" in self.how)):
                draft.draw(block[:, place])
            tokens = draft.candidates().token_ids
        else:
            tokens = draft.draw_all(block)
        before = tokens.roll(1, dims=1)
        before[:, 0] = state.tail[:, -1]
        if "before" in self.how:  # what is known of a place before its token
            draft.end_before(is_sure & (before % 3 != 0))
        if "after" in self.how:
            draft.end_after(tokens % 3 == 0)
        if "fault: its own draw" in self.how:
            draft.end_before(tokens % 3 == 0)
        if "fault: a later draw" in self.how:
            draft.end_before(before.roll(-2, dims=1) % 3 == 0)
        if "fault: not as drawn" in self.how:
            draft._logits[0] = draft._logits[0].roll(1, dims=1)
        found = draft.candidates()
        return replace(found, lens=draft.caps) if "fault: padding counts" in self.how else found

    def kv_after(self, n: int, k: int, accepted: int) -> int:
        return n


def blocks_p(
    tiny: tuple[Path, Path], how: str, rule: AcceptanceRule | None = None, name: str = "all"
) -> float:
    engine = make_engine(*tiny, batch_size=1000, num_blocks=2500, rule=rule)
    assert isinstance(engine.proposer, DraftModel)
    engine.proposer = Blocks(engine.proposer.model, engine.proposer.max_len)
    engine.proposer.how = how
    found = lossless.engine_trial(engine, tiny[0], PROMPT, 3, ENGINE_PARAMS[name], 4000)
    return lossless.adjusted(found)


RULES = {"rejection": None, "block": Block()}
CUTS = ["", "before", "after", "before, after", "singly, before, after", "singly, few"]
# Each kind of cut alone meets one rule in CI.
CUT_IN_CI = [("", "block"), ("before", "rejection"), ("after", "block")]
CUT_IN_CI += [("singly, before, after", "rejection"), ("singly, few", "rejection")]


@pytest.mark.parametrize(
    ("how", "rule"),
    [
        pytest.param(how, rule, marks=[pytest.mark.slow] * ((how, rule) not in CUT_IN_CI))
        for how in CUTS
        for rule in RULES
    ],
)
def test_blocks_drawn_at_once_follow_transformers(
    tiny: tuple[Path, Path], how: str, rule: str
) -> None:
    """An end may rest on a token that stays, or on what is known before its place is drawn."""
    assert blocks_p(tiny, how, RULES[rule]) > SIGNIFICANT


SLOW_FAULTS = ["fault: its own draw", "after, fault: not as drawn"]
SLOW_FAULTS += ["singly, few, fault: padding counts"]


@pytest.mark.parametrize(
    "how",
    [
        "fault: a later draw",
        *(pytest.param(how, marks=pytest.mark.slow) for how in SLOW_FAULTS),
    ],
)
def test_a_fault_in_a_block_is_caught(tiny: tuple[Path, Path], how: str) -> None:
    assert blocks_p(tiny, how) < SIGNIFICANT


def test_noise_of_another_round_in_the_engine_is_caught(
    tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault: numbers ignore the position, so every round of a sequence draws with the same."""

    def forgetful(seed: Any, index: Any, length: Any, *rest: Any, **more: Any) -> Noise:
        return round_noise(seed, index, torch.full_like(length, len(PROMPT)), *rest, **more)

    monkeypatch.setattr(round_module, "round_noise", forgetful)
    assert lossless.adjusted(engine_p(tiny, ENGINE_PARAMS["all"], 1)) < SIGNIFICANT


SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, max_new_tokens=16, seed=11)
Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Builds engines over one pair; the draft differs enough to be rejected at times."""
    folder = tmp_path_factory.mktemp("pair")
    target = save_tiny(folder / "target", "llama", seed=0, initializer_range=0.1)
    draft = save_tiny(folder / "draft", "llama", seed=1, initializer_range=0.1)
    return lambda **sizes: make_engine(target, draft, **sizes)


def requests(count: int = 8) -> list[Request]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 30, (count,), generator=generator).tolist()
    prompts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]
    return [Request(i, tuple(p)) for i, p in enumerate(prompts)]


def outputs(
    engine: Engine, asked: list[Request], k: int, params: SamplingParams = SAMPLED
) -> dict[int, list[int]]:
    """New tokens by prompt index."""
    seqs = engine.run(asked, k, params).seqs
    assert engine.allocator.num_used == 0
    return {s.index: s.output_ids for s in seqs}


@pytest.mark.parametrize("k", [0, pytest.param(1, marks=pytest.mark.slow), 4])
def test_sampled_output_depends_on_the_key_alone(make: Make, k: int) -> None:
    """Output does not depend on batch size, order, prefill chunks or preemption."""
    asked = requests()
    want = outputs(make(batch_size=1), asked, k)
    assert {len(tokens) for tokens in want.values()} == {16}
    for batch_size in (3, 8):
        assert outputs(make(batch_size=batch_size), asked, k) == want
    assert outputs(make(batch_size=3), asked[::-1], k) == want
    assert outputs(make(batch_size=3), asked[5:], k) == {i: want[i] for i in (5, 6, 7)}
    assert outputs(make(batch_size=8, prefill_chunk=5), asked, k) == want

    small = make(batch_size=8, num_blocks=24)
    seqs = small.run(asked, k, SAMPLED).seqs
    assert sum(s.num_preemptions for s in seqs) > 0
    assert {s.index: s.output_ids for s in seqs} == want


def test_proposals_are_accepted_and_rejected_in_these_runs(make: Make) -> None:
    """Without both, the comparisons above would show little."""
    seqs = make(batch_size=8).run(requests(), 4, SAMPLED).seqs
    accepted = {a for s in seqs for a in s.accepted_per_round}
    assert accepted >= {0, 1, 2}


def test_seed_and_index_change_the_output(make: Make) -> None:
    asked = requests()
    want = outputs(make(batch_size=8), asked, 3)
    for seed in (12, 11 + 2**32):
        other = outputs(make(batch_size=8), asked, 3, replace(SAMPLED, seed=seed))
        assert all(other[i] != want[i] for i in want)
    moved = [replace(r, index=r.index + 100) for r in asked]
    renumbered = outputs(make(batch_size=8), moved, 3)
    assert all(renumbered[i + 100] != want[i] for i in want)


def test_twenty_repeats_are_identical(make: Make) -> None:
    engine, asked = make(batch_size=4), requests(4)
    params = replace(SAMPLED, max_new_tokens=10)
    found = [outputs(engine, asked, 3, params) for _ in range(20)]
    assert found == [found[0]] * 20


def test_verdict_of_planted_rule_is_the_engines(make: Make) -> None:
    """Verdicts are equal token for token, so a planted fault is the engine's only change."""
    want = outputs(make(batch_size=3), requests(), 4)
    planted = Planted(Rule())
    assert outputs(make(batch_size=3, rule=planted), requests(), 4) == want
    assert any(len(set(lens)) > 1 for lens in planted.lens), "no round with mixed lengths"
