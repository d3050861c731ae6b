"""Acceptance and times against slow computations of their definitions."""

import json
import math
import time
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_cli.core.candidates import Verdict
from specdec_cli.core.figures import Acceptance, Spread, summarise
from specdec_cli.core.types import Request, SamplingParams, Sequence
from specdec_cli.engine.loop import Engine, RunResult
from specdec_cli.engine.prefill import Moments
from specdec_cli.engine.round import RoundRecord
from tests.engine.fakes import fake_engine, first, random_prompt, sometimes, wrong

# The names that scripts may rely on.
ACCEPTANCE_NAMES = {
    "num_drafts",
    "num_draft_tokens",
    "num_accepted_tokens",
    "num_accepted_tokens_per_pos",
    "mean_acceptance_length",
    "draft_acceptance_rate",
    "acceptance_rate_per_pos",
    "conditional_acceptance_rate_per_pos",
    "acceptance_histogram",
}
TIME_NAMES = {
    "draft_ms",
    "broadcast_ms",
    "verify_ms",
    "sample_ms",
    "commit_ms",
    "round_ms",
    "prefill_ms",
    "decode_seconds",
    "output_tokens_per_second",
    "decode_tokens_per_second",
    "ttft_ms",
    "tpot_ms",
}

Rounds = tuple[int, list[int], list[int]]


@st.composite
def rounds(draw: st.DrawFn, ragged: bool = True) -> Rounds:
    """k, and the proposed and accepted tokens of each round with k_i >= 1."""
    k = draw(st.integers(1, 6))
    count = draw(st.integers(0, 30))
    lengths = st.integers(1, k) if ragged else st.just(k)
    proposed = draw(st.lists(lengths, min_size=count, max_size=count))
    return k, proposed, [draw(st.integers(0, p)) for p in proposed]


@given(rounds())
def test_acceptance_by_walking_through_every_proposal(case: Rounds) -> None:
    k, proposed, accepted = case
    found = Acceptance.of(proposed, accepted, k)
    accepted_at = [0] * k
    reached_at = [0] * k
    histogram = [0] * (k + 1)
    tokens = 0
    for p, a in zip(proposed, accepted, strict=True):
        histogram[a] += 1
        for place in range(p):
            tokens += 1
            if place <= a:  # all before it was accepted, so the target decided about it
                reached_at[place] += 1
            if place < a:
                accepted_at[place] += 1
    drafts = len(proposed)
    assert found.num_drafts == drafts
    assert found.num_draft_tokens == tokens
    assert found.num_accepted_tokens == sum(accepted_at)
    assert found.num_accepted_tokens_per_pos == accepted_at
    assert found.acceptance_histogram == histogram
    assert found.acceptance_rate_per_pos == [n / drafts if drafts else 0.0 for n in accepted_at]
    assert found.conditional_acceptance_rate_per_pos == [
        n / r if r else None for n, r in zip(accepted_at, reached_at, strict=True)
    ]
    assert found.draft_acceptance_rate == (sum(accepted_at) / tokens if tokens else None)


@given(rounds())
def test_identities(case: Rounds) -> None:
    k, proposed, accepted = case
    a = Acceptance.of(proposed, accepted, k)
    assert sum(a.acceptance_histogram) == a.num_drafts
    assert len(a.acceptance_histogram) == k + 1
    assert len(a.num_accepted_tokens_per_pos) == k
    assert sum(a.num_accepted_tokens_per_pos) == a.num_accepted_tokens
    assert sum(i * n for i, n in enumerate(a.acceptance_histogram)) == a.num_accepted_tokens
    assert a.num_accepted_tokens_per_pos == sorted(a.num_accepted_tokens_per_pos, reverse=True)
    assert a.mean_acceptance_length == pytest.approx(1 + sum(a.acceptance_rate_per_pos))
    if a.num_drafts:
        assert a.mean_acceptance_length == 1 + a.num_accepted_tokens / a.num_drafts
    else:
        assert a.mean_acceptance_length == 1.0


@given(rounds(ragged=False))
def test_marginals_are_products_of_conditionals(case: Rounds) -> None:
    """This holds for proposals of equal length; shorter ones only make a marginal smaller."""
    k, proposed, accepted = case
    a = Acceptance.of(proposed, accepted, k)
    product = 1.0
    for marginal, conditional in zip(
        a.acceptance_rate_per_pos, a.conditional_acceptance_rate_per_pos, strict=True
    ):
        if conditional is None:
            assert marginal == 0.0
            break
        product *= conditional
        assert marginal == pytest.approx(product)


def test_a_worked_example() -> None:
    """Three full rounds of 3 proposals and a short one of 1."""
    a = Acceptance.of([3, 3, 3, 1], [3, 0, 1, 1], 3)
    assert a.num_accepted_tokens_per_pos == [3, 1, 1]
    assert a.acceptance_rate_per_pos == [0.75, 0.25, 0.25]
    assert a.conditional_acceptance_rate_per_pos == [0.75, 0.5, 1.0]
    assert a.acceptance_histogram == [1, 2, 0, 1]
    assert a.mean_acceptance_length == 2.25
    assert a.draft_acceptance_rate == 0.5


def test_without_proposals() -> None:
    a = Acceptance.of([], [], 0)
    assert a.mean_acceptance_length == 1.0
    assert a.num_accepted_tokens_per_pos == []
    assert a.acceptance_rate_per_pos == [] and a.conditional_acceptance_rate_per_pos == []
    assert a.acceptance_histogram == [0] and a.draft_acceptance_rate is None


@given(st.lists(st.floats(0.0, 1e4), min_size=1, max_size=40))
def test_spread_is_numpys(values: list[float]) -> None:
    spread = Spread.of(values)
    assert spread.mean == pytest.approx(np.mean(values))
    for p in (50, 90, 99):
        assert getattr(spread, f"p{p}") == pytest.approx(np.percentile(values, p))


def test_spread_of_nothing() -> None:
    assert Spread.of([]) == Spread(mean=None, p50=None, p90=None, p99=None)


def run(k: int, batch_size: int = 3, new_tokens: int = 14, num_blocks: int = 400) -> RunResult:
    engine = fake_engine(sometimes, batch_size=batch_size, num_blocks=num_blocks)
    requests = [Request(i, tuple(random_prompt(n))) for i, n in enumerate((5, 1, 12, 30, 2, 7))]
    return engine.run(requests, k, SamplingParams(max_new_tokens=new_tokens))


@pytest.mark.parametrize("k", [0, 1, 4])
def test_every_name_of_the_contract(k: int) -> None:
    flat = run(k).metrics.as_dict()
    assert flat.keys() >= ACCEPTANCE_NAMES | TIME_NAMES
    for name in ("ttft_ms", "tpot_ms"):
        assert flat[name].keys() == {"mean", "p50", "p90", "p99"}
        assert 0 < flat[name]["p50"] <= flat[name]["p90"] <= flat[name]["p99"]
    assert json.loads(json.dumps(flat, allow_nan=False)) == flat


@pytest.mark.parametrize("batch_size", [1, 2, 6])
@pytest.mark.parametrize("k", [0, 3])
def test_counts_are_those_of_the_sequences(k: int, batch_size: int) -> None:
    result = run(k, batch_size)
    metrics = a = result.metrics
    proposed = [p for s in result.seqs for p in s.proposed_per_round]
    accepted = [n for s in result.seqs for n in s.accepted_per_round]
    assert all(p >= 1 for p in proposed)
    assert a.num_drafts == len(proposed), "sequence-rounds, not engine rounds"
    assert a.num_draft_tokens == sum(proposed) and a.num_accepted_tokens == sum(accepted)
    assert metrics.num_output_tokens == 6 * 14
    # Every sequence-round writes one token from the target.
    without = sum(s.rounds_without_proposal for s in result.seqs)
    assert a.num_drafts + without + a.num_accepted_tokens == metrics.num_output_tokens
    assert metrics.num_rounds_without_proposal == without
    assert metrics.num_rounds >= -(-6 // batch_size)
    if k == 0:
        assert a.mean_acceptance_length == 1.0 and a.num_drafts == 0
    # With k = 0 prefill decides the first token of each prompt of more than one token.
    assert metrics.num_tokens_from_prefill == (5 if k == 0 else 0)
    if batch_size == 1:
        assert metrics.num_rounds == a.num_drafts + without - metrics.num_tokens_from_prefill


def test_a_draft_right_for_two_of_four() -> None:
    prompt = random_prompt(6)
    engine = fake_engine(first(2, len(prompt), 4))
    # Five rounds of 3 tokens; the last has room for two proposals.
    metrics = engine.run([Request(0, tuple(prompt))], 4, SamplingParams(max_new_tokens=15)).metrics
    a = metrics
    assert a.acceptance_rate_per_pos[:2] == [1.0, 1.0]
    assert a.acceptance_rate_per_pos[2:] == [0.0, 0.0]
    assert a.mean_acceptance_length == 3.0
    assert a.conditional_acceptance_rate_per_pos == [1.0, 1.0, 0.0, None]


def test_a_draft_that_is_never_right() -> None:
    engine = fake_engine(wrong, batch_size=2)
    requests = [Request(i, tuple(random_prompt(4, i))) for i in range(2)]
    a = engine.run(requests, 3, SamplingParams(max_new_tokens=9)).metrics
    assert a.mean_acceptance_length == 1.0 and a.draft_acceptance_rate == 0.0
    assert a.acceptance_histogram == [16, 0, 0, 0], "two sequences, 8 rounds with room for one"


@pytest.mark.parametrize("num_blocks", [400, 14], ids=["roomy", "preempting"])
@pytest.mark.parametrize("k", [0, 3])
def test_a_rounds_time_is_shared_by_its_sequences(k: int, num_blocks: int) -> None:
    result = run(k, num_blocks=num_blocks)
    metrics = result.metrics
    assert metrics.decode_seconds == pytest.approx(sum(s.decode_seconds for s in result.seqs))
    assert metrics.prefill_seconds == pytest.approx(sum(s.prefill_seconds for s in result.seqs))
    assert (metrics.num_preemptions > 0) == (num_blocks == 14)
    assert all((s.ttft_ms or 0.0) > 0.0 for s in result.seqs), "from the first admission"
    assert metrics.round_ms == pytest.approx(metrics.decode_seconds * 1e3 / metrics.num_rounds)
    stages = [metrics.draft_ms, metrics.verify_ms, metrics.sample_ms]
    assert 0 < sum(stages) <= metrics.round_ms
    assert metrics.broadcast_ms == metrics.commit_ms == 0, "one rank, a draft without commits"
    total = metrics.prefill_seconds + metrics.decode_seconds
    assert metrics.output_tokens_per_second == pytest.approx(metrics.num_output_tokens / total)
    decoded = metrics.num_output_tokens - metrics.num_tokens_from_prefill
    assert metrics.decode_tokens_per_second == pytest.approx(decoded / metrics.decode_seconds)


@pytest.mark.parametrize(
    ("stamps", "expected"),
    {
        "one rank": ([10, 13, 0, 20, 21, 0, 25, 26], (3, 0, 7, 1 + 1, 4)),
        "plain decoding": ([10, 11, 0, 18, 0, 0, 0, 21], (1, 0, 7, 3, 0)),
        "several ranks": ([10, 13, 15, 22, 23, 27, 30, 36], (3, 2 + 4, 7, 1 + 6, 3)),
        "several, plain": ([10, 11, 13, 20, 21, 25, 0, 27], (1, 2 + 4, 7, 1 + 2, 0)),
    }.values(),
)
def test_a_stage_ends_at_each_stamp(stamps: list[int], expected: tuple[int, ...]) -> None:
    record = RoundRecord.empty(2, 3, torch.device("cpu"))
    record.stamps.copy_(torch.tensor(stamps) * 1_000_000)
    record.rows.fill_(-1)
    stages = ("draft", "broadcast", "verify", "sample", "commit")
    assert record.stage_ms() == dict(zip(stages, expected, strict=True))


def test_work_after_the_decision_is_the_stage_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no part of sampling, and adds up over prompts as all stages do."""
    engine = fake_engine(sometimes, batch_size=2)
    decide = engine.rule.decide

    def slow(*parts: Any) -> Verdict:
        time.sleep(0.1)
        return decide(*parts)

    monkeypatch.setattr(type(engine.rule), "decide", lambda _, *parts: slow(*parts))
    monkeypatch.setattr(type(engine.proposer), "commit", lambda *_: time.sleep(0.01))
    requests = [Request(i, tuple(random_prompt(n))) for i, n in enumerate((5, 9))]
    result = engine.run(requests, 3, SamplingParams(max_new_tokens=9))
    metrics = result.metrics
    assert 10 <= metrics.commit_ms < 100 <= metrics.sample_ms
    shared = sum(seq.stage_ms["commit"] for seq in result.seqs)
    assert shared == pytest.approx(metrics.commit_ms * metrics.num_rounds)


def test_shares_of_a_round_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves a second at each reading: when a step begins, at a launch and at its end."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("specdec_cli.engine.loop.time.perf_counter", lambda: float(next(ticks)))
    engine = fake_engine(wrong, batch_size=2)
    requests = [Request(0, (5,)), Request(1, (6,))]
    result = engine.run(requests, 0, SamplingParams(max_new_tokens=3))
    one, other = result.seqs
    assert one.decode_seconds == other.decode_seconds > 0
    assert math.isclose(one.decode_seconds * 2, result.metrics.decode_seconds)
    assert result.metrics.decode_seconds == 3 * 1.0
    assert result.metrics.round_ms == 1e3
    assert result.metrics.ttft_ms.mean == 2e3
    assert result.metrics.tpot_ms.mean == 3e3, "a round and the step to it"


def finished(index: int, new: int, admitted: float, first_at: float, end: float) -> Sequence:
    seq = Sequence(index, [1] * (3 + new), 3, 99)
    seq.finish_reason = "length"
    seq.admitted_at, seq.first_token_at, seq.finished_at = admitted, first_at, end
    return seq


def test_latencies_over_prompts() -> None:
    seqs = [
        finished(0, 5, 10.0, 10.5, 12.5),
        finished(1, 1, 10.0, 10.1, 10.1),  # one token: no time between tokens
        finished(2, 11, 10.0, 12.0, 13.0),
    ]
    broken = Sequence(3, [1], 1, 9, finish_reason="error", error="too long")
    seqs[0].round_share, seqs[0].decode_seconds, seqs[2].prefill_seconds = 4.0, 2.0, 1.0
    metrics = summarise([*seqs, broken], 2, 1)
    ttft, tpot = [500.0, 100.0, 2000.0], [500.0, 100.0]
    assert metrics.ttft_ms.as_dict() == pytest.approx(Spread.of(ttft).as_dict())
    assert metrics.tpot_ms.as_dict() == pytest.approx(Spread.of(tpot).as_dict())
    assert metrics.num_prompts == 3 and metrics.num_output_tokens == 17
    assert metrics.prefill_ms == pytest.approx(1e3 / 3)
    assert metrics.output_tokens_per_second == pytest.approx(17 / 3)


def test_a_run_in_which_nothing_could_run() -> None:
    result = fake_engine(sometimes).run([Request(0, ())], 2, SamplingParams())
    flat = result.metrics.as_dict()
    assert flat["num_rounds"] == 0 and flat["output_tokens_per_second"] == 0.0
    assert flat["ttft_ms"]["mean"] is None
    json.dumps(flat, allow_nan=False)


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_the_parts_of_a_first_token_add_up(runs_ahead: bool) -> None:
    """Of two prompts with one slot, the second waits for the first, and not for its own passes.
    Chunks are read at once, or while the next one or the first round is in flight."""
    engine = fake_engine(sometimes, num_blocks=40, batch_size=1)
    engine.prefill_chunk, engine.runs_ahead = 3, runs_ahead
    requests = [Request(i, tuple(random_prompt(9, i))) for i in range(2)]
    found = engine.run(requests, 2, SamplingParams(max_new_tokens=6))
    for seq in found.seqs:
        parts, ttft_ms = seq.ttft_parts_ms, seq.ttft_ms
        assert parts is not None and ttft_ms is not None and min(parts.values()) >= 0
        assert sum(parts.values()) - parts["queue"] == pytest.approx(ttft_ms)
        assert parts["target_prefill"] + parts["draft_prefill"] == pytest.approx(
            seq.prefill_seconds * 1e3
        )
    first_parts, second_parts = (seq.ttft_parts_ms or {} for seq in found.seqs)
    assert second_parts["queue"] > first_parts["queue"] + first_parts["first_round"]
    means = found.metrics.ttft_parts_ms
    assert means is not None and means.keys() == first_parts.keys()
    assert means["queue"] == pytest.approx((first_parts["queue"] + second_parts["queue"]) / 2)


def test_rounds_that_overlap_count_no_time_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round one ahead of the host begins when the one before it ends, not at its launch."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("specdec_cli.engine.loop.time.perf_counter", lambda: float(next(ticks)))
    engine = fake_engine(None)
    ahead = Engine(
        target=engine.target,
        proposer=None,
        allocator=engine.allocator,
        batch_size=1,
        max_model_len=99,
        prefill_chunk=9,
        eos_ids=frozenset(),
        runs_ahead=True,
    )
    (seq,) = ahead.run([Request(0, (5,))], 0, SamplingParams(max_new_tokens=5)).seqs
    assert seq.finished_at is not None and seq.admitted_at is not None
    assert seq.decode_seconds < seq.finished_at - seq.admitted_at


def test_prompts_of_one_pass_share_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock counts its readings, so their sums are exact: no more than passed in all."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("specdec_cli.engine.prefill.time.perf_counter", lambda: float(next(ticks)))
    requests = [Request(i, tuple(random_prompt(5, i))) for i in range(6)]
    found = fake_engine(None, batch_size=6).run(requests, 0, SamplingParams(max_new_tokens=1))
    seconds = [s.prefill_seconds + s.decode_seconds for s in found.seqs]
    assert len(set(seconds)) == 1 and 0 < sum(seconds) < next(ticks)


class Mark:
    """An event of a device whose n-th one comes after 2 ** n milliseconds."""

    recorded = 0

    def __init__(self, device: torch.device, enable_timing: bool = False) -> None:
        assert enable_timing
        self.at = 0.0

    def record(self) -> None:
        Mark.recorded += 1
        self.at = 2.0**Mark.recorded

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "Mark") -> float:
        return later.at - self.at


def test_two_steps_in_flight_keep_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "Event", Mark)
    monkeypatch.setattr(Mark, "recorded", 0)
    moments = Moments(torch.device("cuda"))
    for first_mark in (1, 5, 9):  # their events are used again
        step, following = ([moments.now(), moments.now()] for _ in range(2))
        for number, (halfway, end) in enumerate((step, following)):
            expected = 2.0 ** (first_mark + 2 * number)
            assert halfway.seconds_until(end) == pytest.approx(expected / 1e3)
            assert halfway.seconds_until(halfway) == 0
