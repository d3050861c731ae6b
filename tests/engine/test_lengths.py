"""Length policies: their choices, and that the text stays the target's."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specdec_cli.acceptance.base import AcceptanceRule
from specdec_cli.acceptance.block import Block
from specdec_cli.acceptance.rejection import Rejection
from specdec_cli.core.candidates import Candidates
from specdec_cli.core.drafting import Drafting
from specdec_cli.core.parallel import ALONE
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import SamplingParams
from specdec_cli.lengths.adaptive import Adaptive, expected_tokens
from specdec_cli.lengths.base import LastRounds, LengthPolicy
from specdec_cli.lengths.confidence import Confidence
from specdec_cli.lengths.costs import RoundCosts
from specdec_cli.methods.draft_model import DraftModel
from tests import lossless
from tests.drafting import rounds_of
from tests.engine.test_pipeline import PROMPTS
from tests.support import decode, greedy_reference, make_engine, reference

SIGNIFICANT = 1e-4
SAMPLED = SamplingParams(temperature=0.9, max_new_tokens=4, seed=1)


def last(*trials: tuple[int, int]) -> LastRounds:
    found = LastRounds()
    found.trials.extend([trial] for trial in trials)
    return found


def costs(**round_ms: float) -> RoundCosts:
    """Times of rounds of one slot, by `k0`, `k1`, ...; the first trial of each is slow."""
    found = RoundCosts(ALONE)
    for name, ms in round_ms.items():
        for seconds in (1.0, ms / 1e3, ms / 1e3, ms / 1e3):
            found.add(1, int(name[1:]), seconds)
    return found


# Adaptive: choices.


def test_expected_tokens_are_those_of_the_last_rounds() -> None:
    """Half of the rounds accept nothing, a quarter one of two, a quarter both; each round weighs
    nine tenths of the one after it, and the guess of 0.6 as much as the last one."""
    rounds = [(2, 0), (2, 0), (2, 1), (2, 2)] * 8
    weights = 0.9 ** np.arange(32)[::-1]
    accepted = np.array([a for _, a in rounds])
    first = (weights[accepted >= 1].sum() + 0.6) / (weights.sum() + 1)
    second = (weights[accepted == 2].sum() + first) / (weights[accepted >= 1].sum() + 1)
    want = [1.0, 1 + first, 1 + first + first * second]
    assert expected_tokens(last(*rounds), 2) == pytest.approx(want, abs=1e-9)
    # No round has reached the third place: its rate is that of the second.
    third = want[2] + first * second**2
    assert expected_tokens(last(*rounds), 3)[3] == pytest.approx(third, abs=1e-9)


@pytest.mark.parametrize(("before", "now", "want"), [(4, 0, 0), (0, 4, 4)])
def test_what_was_accepted_long_ago_counts_little(before: int, now: int, want: int) -> None:
    times = costs(k0=1.0, k1=1.5, k4=3.0)
    rounds = last(*[(4, before)] * 22, *[(4, now)] * 10)
    assert Adaptive((0, 1)).next_k((0, 1, 4), rounds, times, 1) == want


@pytest.mark.parametrize(
    ("accepted", "want"), [(0, 0), (1, 1), (4, 4)], ids=["nothing", "one", "everything"]
)
def test_the_length_that_promises_most_tokens_a_millisecond(accepted: int, want: int) -> None:
    """A draft step costs a tenth of a target pass."""
    times = costs(k0=1.0, k1=1.1, k4=1.4)
    rounds = last(*[(4, accepted)] * 24)
    assert Adaptive((0, 1)).next_k((0, 1, 4), rounds, times, 1) == want


def test_a_slow_draft_is_not_worth_it() -> None:
    rounds = last(*[(4, 4)] * 24)
    assert Adaptive((0, 1)).next_k((0, 4), rounds, costs(k0=1.0, k4=6.0), 1) == 0


def test_every_length_is_timed_first() -> None:
    policy, times = Adaptive((0, 2)), RoundCosts(ALONE)
    assert policy.lengths(5) == (0, 2, 5) and policy.lengths(1) == (0, 1)
    order = []
    for _ in range(12):
        order.append(policy.next_k((0, 2, 5), last(), times, 1))
        times.add(1, order[-1], 0.001)
    assert sorted(order) == [0] * 4 + [2] * 4 + [5] * 4
    assert times.unmeasured(1, (0, 2, 5)) is None
    assert times.unmeasured(4, (0, 2, 5)) is not None, "rounds of other slots take other times"


def test_costs_are_medians_without_the_round_that_warms_up() -> None:
    """Costs depend on the number of slots. All ranks use those that rank 0 measured."""
    other_rank = {0: 70.0, 2: 80.0}
    parallel: Any = SimpleNamespace(gather_objects=lambda mine: [mine, other_rank])
    costs = RoundCosts(parallel)
    for slots, second in ((1, 0.01), (4, 0.02)):
        for k in (0, 2):
            for took in (9.0, second * (k + 1), second * (k + 1), 5.0):
                costs.add(slots, k, took)
    assert costs.of(1, (0, 2)) == pytest.approx({0: 10.0, 2: 30.0})
    assert costs.of(4, (0, 2)) == pytest.approx({0: 20.0, 2: 60.0})


def test_after_a_while_without_proposals_it_looks_again() -> None:
    times, policy = costs(k0=1.0, k1=1.9, k4=5.0), Adaptive((0, 1))
    assert policy.next_k((0, 1, 4), last(*[(1, 0)] * 24), times, 1) == 0
    assert policy.next_k((0, 1, 4), last(*[(1, 0)] * 4, *[(0, 0)] * 23), times, 1) == 0
    assert policy.next_k((0, 1, 4), last(*[(1, 0)] * 4, *[(0, 0)] * 24), times, 1) == 1


# Confidence: where a draft stops.


def test_a_draft_stops_behind_the_token_that_it_is_unsure_of() -> None:
    logits = torch.tensor([[3.0, 0.0, 0.0], [0.1, 0.0, 0.0]])  # 0.91 and 0.36 for the best
    policy = Confidence(0.4)
    caps = torch.tensor([3, 3])
    drafting = Drafting(3, SamplingParams(), caps, 3, stop=policy.stop)
    for _ in range(3):
        drafting.draw(logits)
    assert drafting.candidates().lens.tolist() == [3, 1], "the unlikely token stays proposed"
    drafting = Drafting(3, SamplingParams(), caps, 3)
    for _ in range(3):
        drafting.draw(logits)
    assert drafting.candidates().lens.tolist() == [3, 3]


def test_a_threshold_of_nothing_is_a_fixed_length(pair: tuple[Path, Path]) -> None:
    found = []
    for policy in (None, Confidence(0.0), Confidence(1.0)):
        engine = make_engine(*pair, batch_size=3, policy=policy)
        found.append(decode(engine, PROMPTS, 4, max_new_tokens=20))
    fixed, never, always = ([rounds_of(s) for s in seqs] for seqs in found)
    assert fixed == never
    assert {p for s in always for p, _ in s} == {1}, "each first token is less than certain"
    texts = [[s.output_ids for s in seqs] for seqs in found]
    assert texts[0] == texts[1] == texts[2]


def test_unsure_drafts_are_shorter_and_better(pair: tuple[Path, Path]) -> None:
    rates = []
    for policy in (None, Confidence(0.5)):
        seqs = decode(make_engine(*pair, policy=policy), PROMPTS, 4, max_new_tokens=40)
        proposed = sum(p for s in seqs for p in s.proposed_per_round)
        rates.append((proposed, sum(a for s in seqs for a in s.accepted_per_round) / proposed))
    assert rates[1][0] < rates[0][0] and rates[1][1] > rates[0][1]


# The text.


class Dropping(DraftModel):
    """The planted fault: a token that the draft is unsure of is dropped because of its own draw."""

    def propose(self, state: BatchState, draft: Drafting) -> Candidates:
        found = super().propose(state, draft)
        lens = torch.where(found.lens < draft.caps, found.lens - 1, found.lens)
        return Candidates(found.token_ids, lens, found.q)


def p_value(
    tiny: tuple[Path, Path], rule: AcceptanceRule, policy: LengthPolicy, *, drops: bool = False
) -> float:
    engine = make_engine(*tiny, batch_size=1000, num_blocks=2500, rule=rule, policy=policy)
    if drops:
        assert isinstance(engine.proposer, DraftModel)
        engine.proposer = Dropping(engine.proposer.model, engine.proposer.max_len)
    found = lossless.engine_trial(engine, tiny[0], [3, 1, 4, 5], 3, SAMPLED, 4000)
    return lossless.adjusted(found)


@pytest.mark.each_value
@pytest.mark.parametrize("rule", [Rejection(), Block()], ids=["rejection", "block"])
@pytest.mark.parametrize("policy", [Confidence(0.3), Adaptive((0, 1))], ids=["sure", "adaptive"])
def test_sampled_text_follows_transformers(
    tiny: tuple[Path, Path], rule: AcceptanceRule, policy: LengthPolicy
) -> None:
    """Covers block verification too. `tests/ops/sampling/test_block_verify.py` has the exact law of
    lengths that depend on drawn tokens which stay proposed."""
    assert p_value(tiny, rule, policy) > SIGNIFICANT


def test_a_token_dropped_because_of_its_own_draw_is_caught(tiny: tuple[Path, Path]) -> None:
    assert p_value(tiny, Rejection(), Confidence(0.3), drops=True) < SIGNIFICANT


@pytest.mark.each_value
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["at-once", "ahead"])
@pytest.mark.parametrize("policy", ["confidence", "adaptive"])
def test_greedy_text_is_transformers(
    pair: tuple[Path, Path], policy: str, runs_ahead: bool, device: torch.device
) -> None:
    oracle = reference(pair[0], device=device)
    chosen: LengthPolicy = Confidence(0.5) if policy == "confidence" else Adaptive((0, 1, 2))
    engine = make_engine(*pair, batch_size=3, policy=chosen, runs_ahead=runs_ahead, device=device)
    seqs = decode(engine, PROMPTS, 4, max_new_tokens=40)
    assert [s.output_ids for s in seqs] == [greedy_reference(oracle, p, 40) for p in PROMPTS]
    assert len({p for s in seqs for p in s.proposed_per_round}) > 1, "one length throughout"


def test_a_draft_like_the_target_stays_right_whatever_the_lengths(
    pair: tuple[Path, Path],
) -> None:
    """The draft's cache lacks nothing after rounds without proposals."""
    engine = make_engine(pair[0], pair[0], batch_size=3, policy=Adaptive((0, 1, 2)))
    for _ in range(3):
        seqs = decode(engine, PROMPTS, 4, max_new_tokens=30)
        assert all(s.accepted_per_round == s.proposed_per_round for s in seqs)


def test_rounds_without_proposals_are_counted(pair: tuple[Path, Path]) -> None:
    engine = make_engine(*pair, policy=Adaptive((0, 1)))
    seqs = decode(engine, PROMPTS, 4, max_new_tokens=40)
    for seq in seqs:
        rounds = len(seq.accepted_per_round) + seq.rounds_without_proposal
        assert sum(seq.accepted_per_round) + rounds == 40


# Recipes.


def specdec(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, Any]:
    from specdec_cli.app import main

    code = main([*options, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("policy", ["confidence", "adaptive"])
@pytest.mark.usefixtures("smaller_demo")
def test_a_recipe_names_a_policy(capsys: pytest.CaptureFixture[str], policy: str) -> None:
    """The text equals that of the fixed length; a sweep's points have no predictions."""
    options = ["--set", f"speculation.length.policy={policy}", "--max-new-tokens", "8"]
    prompt = ["--prompt", "def f(x):"]
    code, document = specdec(capsys, "generate", "demo", *prompt, *options)
    fixed = specdec(capsys, "generate", "demo", *prompt, "--max-new-tokens", "8")[1]
    assert code == 0 and document["recipe"]["speculation"]["length"]["policy"] == policy
    assert document["outputs"][0]["token_ids"] == fixed["outputs"][0]["token_ids"]
    sweep = ["sweep-k", "demo", "--k", "0,3", "--limit", "1", "--set", "run.repeats=1", *options]
    code, document = specdec(capsys, *sweep)
    assert code == 0 and document["points"][1]["predicted_speedup"] is None


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("speculation.length.polcy=adaptive", "did you mean speculation.length.policy?"),
        ("speculation.length.policy=adaptiv", "did you mean adaptive?"),
        ("speculation.length=adaptive", "should be a section of keys"),
        ("speculation.length.threshold=2", "should be less than or equal to 1"),
        ("speculation.length.choices=3", "should be a list"),
        ("speculation.length={policy: adaptive, choices: [7]}", "none of [7] is below k = 4, so"),
        ("speculation.length={policy: adaptive, choices: [4, 9]}", "none of [4, 9] is below k = 4"),
        ("speculation.length={policy: adaptive, choices: []}", "none of [] is below k = 4, so"),
    ],
)
def test_what_is_wrong_is_said(capsys: pytest.CaptureFixture[str], key: str, message: str) -> None:
    code, document = specdec(capsys, "generate", "demo", "--prompt", "x", "--set", key)
    assert code == 2 and message in document["error"]["message"]


def test_choices_do_not_matter_where_nothing_proposes(capsys: pytest.CaptureFixture[str]) -> None:
    length = ("--set", "speculation.length={policy: adaptive, choices: [9]}")
    plain = ("--target", "demo:target", "--prompt", "x", "--max-new-tokens", "1", *length)
    assert specdec(capsys, "generate", *plain)[0] == 0
