"""Requests that arrive during a run: order, admission, preemption, an idle engine's sleep."""

from pathlib import Path
from typing import Any

import pytest

from specdec_cli.core.parallel import HostMessages
from specdec_cli.core.types import Emission, Request, SamplingParams
from tests.engine.fakes import (
    continuation,
    fake_engine,
    random_prompt,
    run_checked,
    sometimes,
    target_rule,
)
from tests.support import decode, make_engine, save_tiny

TICK = 0.001


class Clock:
    """A clock that advances by a tick each time it is read, and by sleeping."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.num_read = 1000.0, 0
        self.slept: list[float] = []
        monkeypatch.setattr("time.perf_counter", self._read)
        monkeypatch.setattr("time.sleep", self._sleep)

    def _read(self) -> float:
        self.num_read += 1
        self.now += TICK
        return self.now

    def _sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def requests_at(due: list[float], length: int = 5) -> list[Request]:
    return [Request(i, tuple(random_prompt(length, i)), None, at) for i, at in enumerate(due)]


def test_requests_run_in_the_order_of_their_arrivals(clock: Clock) -> None:
    """The result keeps the list's order, and so do requests with equal times."""
    engine = fake_engine(sometimes, batch_size=1)
    due = [0.3, 0.0, 0.9, 0.0, 0.3]
    found = engine.run(requests_at(due), 2, SamplingParams(max_new_tokens=6))
    assert [s.index for s in found.seqs] == [0, 1, 2, 3, 4]
    began = [s.admitted_at or 0.0 for s in found.seqs]
    assert sorted(range(5), key=began.__getitem__) == [1, 3, 0, 4, 2]
    for seq in found.seqs:
        assert seq.output_ids == continuation(target_rule, seq.tokens[:5], 6)


def test_nothing_is_admitted_before_it_is_due(clock: Clock) -> None:
    engine = fake_engine(sometimes, batch_size=4)
    due = [0.0, 0.05, 0.25, 3.0]
    found = engine.run(requests_at(due), 2, SamplingParams(max_new_tokens=30))
    start = found.seqs[0].arrived_at
    for seq, at in zip(found.seqs, due, strict=True):
        assert seq.arrived_at == pytest.approx(start + at)
        assert seq.admitted_at is not None and seq.admitted_at >= seq.arrived_at
        assert seq.queued_seconds == pytest.approx(seq.admitted_at - seq.arrived_at)
        assert seq.queued_seconds < 0.05, "slots were free"


def test_an_idle_engine_sleeps_until_the_next_arrival(clock: Clock) -> None:
    """It sends heartbeats meanwhile, and its sleep counts as no decoding time."""
    engine = fake_engine(sometimes, batch_size=2)
    calls: list[list[Emission]] = []
    found = engine.run(requests_at([0.0, 10.0]), 2, SamplingParams(max_new_tokens=4), calls.append)
    assert 9.0 < sum(clock.slept) <= 10.0 and max(clock.slept) <= 0.2
    assert clock.num_read < 300, "it looks at the clock a few times for each sleep"
    assert calls.count([]) >= len(clock.slept) - 1
    assert found.metrics.decode_seconds + found.metrics.prefill_seconds < 1.0
    assert found.seqs[1].queued_seconds < 0.25
    late = engine.run(requests_at([5.0]), 2, SamplingParams(max_new_tokens=4)).seqs[0]
    assert late.finish_reason == "length", "also where nothing is there at first"


@pytest.mark.parametrize("k", [0, 3])
def test_preemption_with_arrivals(clock: Clock, k: int) -> None:
    """A preempted sequence goes before those that arrived meanwhile, and texts do not change."""
    engine = fake_engine(sometimes, num_blocks=20, batch_size=4, prefill_chunk=3)
    due = [0.0, 0.0, 0.02, 0.04, 0.06, 0.08, 0.5, 0.5]
    run = engine.start(requests_at(due, 3), k, SamplingParams(max_new_tokens=40))
    while not run.scheduler.is_done:
        engine.step(run)
        entered = [s for s in (*run.scheduler.running, *run.scheduler.waiting)]
        assert [s.index for s in entered] == sorted(s.index for s in entered)
    assert sum(s.num_preemptions for s in run.seqs) > 0
    assert run.seqs[0].num_preemptions == 0, "the oldest always gets on"
    for seq in run.seqs:
        assert seq.output_ids == continuation(target_rule, seq.tokens[:3], 40)
    assert engine.allocator.num_used == 0


def test_each_step_is_checked_with_arrivals(clock: Clock) -> None:
    engine = fake_engine(sometimes, num_blocks=30, batch_size=3, prefill_chunk=4)
    run = engine.start(
        requests_at([0.01 * i for i in range(12)]), 3, SamplingParams(max_new_tokens=17)
    )
    run_checked(engine, run)
    assert len(run.seqs) == 12 and all(s.finish_reason == "length" for s in run.seqs)


def test_a_closed_batch_asks_nobody_and_never_sleeps(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads the clock as often as it has steps and stamps: arrivals add nothing."""

    def refuse(*_: object) -> Any:
        raise AssertionError("no message, no sleep")

    monkeypatch.setattr(HostMessages, "told", refuse)
    monkeypatch.setattr("time.sleep", refuse)
    engine = fake_engine(sometimes, batch_size=2)
    found = engine.run(requests_at([0.0] * 5), 2, SamplingParams(max_new_tokens=9))
    assert {s.arrived_at for s in found.seqs} == {found.seqs[0].arrived_at}
    rounds, chunks = found.metrics.num_rounds, 3
    # A round: its step, its launch, and its end. A chunk: its step, two moments, and its end as the
    # host sees it. And the run's start.
    assert clock.num_read == 1 + 3 * rounds + 4 * chunks


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_texts_do_not_depend_on_arrivals(tmp_path: Path, runs_ahead: bool, k: int) -> None:
    target = save_tiny(tmp_path / "target", "llama")
    draft = save_tiny(tmp_path / "draft", "llama", seed=1)
    engine = make_engine(target, draft, batch_size=2, num_blocks=40, runs_ahead=runs_ahead)
    prompts = [random_prompt(n, n) for n in (3, 9, 1, 6, 4)]
    settings = {"max_new_tokens": 12, "temperature": 1.1, "seed": 3}
    want = [(s.tokens, s.accepted_per_round) for s in decode(engine, prompts, k, **settings)]
    due = [0.0, 0.004, 0.008, 0.012, 0.3]
    requests = [
        Request(i, tuple(p), None, at) for i, (p, at) in enumerate(zip(prompts, due, strict=True))
    ]
    found = engine.run(requests, k, SamplingParams(**settings)).seqs
    assert [(s.tokens, s.accepted_per_round) for s in found] == want
    assert engine.allocator.num_used == 0
