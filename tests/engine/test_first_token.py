"""The first output token of plain decoding, which the last pass over a prompt decides.

The oracle is a round: a chunk that ends before a prompt's last token leaves that to one.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_cli.acceptance.synthetic import SyntheticAcceptance
from specdec_cli.core.state import BatchState
from specdec_cli.core.types import Emission, Request, SamplingParams, Sequence
from specdec_cli.engine.loop import Engine
from specdec_cli.errors import RunError
from tests.engine.fakes import (
    FakeModel,
    continuation,
    fake_engine,
    random_prompt,
    run_checked,
    target_rule,
)
from tests.engine.test_pipeline import Stop
from tests.support import decode, make_engine, save_tiny

PROMPTS = [random_prompt(n, seed=3) for n in (9, 1, 17, 2, 30, 5)]
SAMPLED = {"temperature": 0.9, "top_k": 30, "top_p": 0.95, "seed": 2**40 + 3}


def plain_engine(runs_ahead: bool, **settings: Any) -> Engine:
    engine = fake_engine(None, **settings)
    engine.runs_ahead = engine._rounds.runs_ahead = runs_ahead
    return engine


def texts(seqs: list[Sequence]) -> list[list[int]]:
    return [seq.output_ids for seq in seqs]


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("settings", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_it_is_what_a_round_decides(
    settings: dict[str, Any], runs_ahead: bool, device: torch.device, tmp_path: Path
) -> None:
    """In batches, with sequences that join while others decode and passes that end some prompts
    and not others. The acceptance rule does not matter."""
    target = save_tiny(tmp_path, "llama")
    make = partial(make_engine, target, None, device=device)
    want = []
    for prompt in PROMPTS:
        engine = make(prefill_chunk=max(1, len(prompt) - 1))
        request = Request(len(want), tuple(prompt))
        (seq,) = engine.run([request], 0, SamplingParams(max_new_tokens=8, **settings)).seqs
        assert seq.num_tokens_from_prefill == 0 and seq.round_share == 8
        want.append(seq.output_ids)
    for batch_size, chunk in ((1, 2048), (3, 2048), (4, 11)):
        engine = make(batch_size=batch_size, prefill_chunk=chunk, runs_ahead=runs_ahead)
        engine.rule = SyntheticAcceptance.from_rates((0.5,))
        seqs = decode(engine, PROMPTS, 0, max_new_tokens=8, **settings)
        assert texts(seqs) == want
        assert sum(seq.num_tokens_from_prefill for seq in seqs) >= 4


@pytest.mark.parametrize("chunk", range(1, 11))
def test_only_the_last_chunk_gives_a_token(chunk: int) -> None:
    """If one token is left for it, a round is as cheap and decides the token."""
    engine = fake_engine(None, prefill_chunk=chunk)
    (seq,) = decode(engine, [random_prompt(9)], 0, max_new_tokens=4)
    assert seq.output_ids == continuation(target_rule, random_prompt(9), 4)
    is_left = 9 % chunk == 1 or chunk == 1
    assert isinstance(engine.target, FakeModel)
    assert sum(engine.target.prefill_sizes) == 9 - is_left
    assert len(engine.target.batch_sizes) == 3 + is_left, "rounds"
    assert (seq.num_tokens_from_prefill, seq.rounds_without_proposal) == (1 - is_left, 4)


@pytest.mark.parametrize("num_blocks", [400, 16], ids=["roomy", "preempting"])
@pytest.mark.parametrize("chunk", [7, 2048])
def test_every_step_of_a_run(chunk: int, num_blocks: int) -> None:
    engine = fake_engine(None, batch_size=3, prefill_chunk=chunk, num_blocks=num_blocks)
    params = SamplingParams(max_new_tokens=12)
    run = engine.start([Request(i, tuple(p)) for i, p in enumerate(PROMPTS)], 0, params)
    run_checked(engine, run)
    assert engine.allocator.num_used == 0
    for seq, prompt in zip(run.seqs, PROMPTS, strict=True):
        assert seq.output_ids == continuation(target_rule, prompt, 12)
        assert seq.rounds_without_proposal == 12
        # A sequence that comes back is fed its output too, and decides a token with it.
        assert seq.num_tokens_from_prefill <= 1 + seq.num_preemptions
    assert (sum(s.num_preemptions for s in run.seqs) > 0) == (num_blocks == 16)


def test_blocks_that_end_with_the_prompts() -> None:
    """Both prompts fill their blocks and one is left: the host has to read the tokens, and to
    preempt a sequence before the round."""
    prompts = [random_prompt(8, i) for i in range(2)]
    engine = plain_engine(True, batch_size=2, num_blocks=6)
    seqs = decode(engine, prompts, 0, max_new_tokens=4)
    assert texts(seqs) == [continuation(target_rule, p, 4) for p in prompts]
    assert [s.num_preemptions for s in seqs] == [0, 1]
    assert [s.num_tokens_from_prefill for s in seqs] == [1, 2]


@pytest.mark.parametrize("num_blocks", [400, 16, 14])
def test_rounds_that_follow_before_it_is_read(num_blocks: int) -> None:
    results = []
    for runs_ahead in (False, True):
        engine = plain_engine(runs_ahead, batch_size=3, num_blocks=num_blocks, prefill_chunk=7)
        results.append(decode(engine, PROMPTS, 0, max_new_tokens=12))
    assert texts(results[0]) == texts(results[1])
    assert texts(results[0]) == [continuation(target_rule, p, 12) for p in PROMPTS]


def test_the_first_round_is_launched_before_the_token_is_read() -> None:
    engine = plain_engine(True, batch_size=2)
    requests = [Request(i, tuple(random_prompt(5, i))) for i in range(2)]
    run = engine.start(requests, 0, SamplingParams(max_new_tokens=5))
    assert engine.step(run) == [] and run.prefill.drawn is not None
    emissions = engine.step(run)
    assert [len(e.token_ids) for e in emissions] == [1, 1]
    assert run.rounds.in_flight == 1 and not any(seq.round_share for seq in run.seqs)
    run.rounds.discard()
    run.scheduler.release_all()


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("end", ["eos", "stop", "length"])
def test_a_text_that_its_first_token_ends(end: str, runs_ahead: bool) -> None:
    """The others go on, and those that wait get its slot and blocks."""
    first = target_rule(PROMPTS[2])
    new_tokens = 1 if end == "length" else 9
    eos_ids = frozenset({first} if end == "eos" else ())
    engine = plain_engine(runs_ahead, batch_size=2, eos_ids=eos_ids, num_blocks=20)
    finder = partial(Stop, first) if end == "stop" else None  # only the host sees stop strings
    requests = [Request(i, tuple(p), finder) for i, p in enumerate(PROMPTS)]
    emitted: list[Emission] = []
    params = SamplingParams(max_new_tokens=new_tokens)
    result = engine.run(requests, 0, params, emitted.extend)
    assert engine.allocator.num_used == 0
    assert result.seqs[2].finish_reason == end and result.seqs[2].output_ids == [first]
    assert [e.token_ids for e in emitted if e.seq is result.seqs[2]] == [[first]]
    for seq, prompt in zip(result.seqs, PROMPTS, strict=True):
        want = continuation(target_rule, prompt, new_tokens)
        assert seq.output_ids == (want[: want.index(first) + 1] if first in want else want)
    if end == "length":
        assert result.metrics.num_rounds == 1, "of the prompt of one token"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_runs_without_a_round_have_figures(runs_ahead: bool) -> None:
    engine = plain_engine(runs_ahead, batch_size=2)
    requests = [Request(i, tuple(random_prompt(5, i))) for i in range(3)]
    metrics = engine.run(requests, 0, SamplingParams(max_new_tokens=1)).metrics
    assert isinstance(engine.target, FakeModel) and engine.target.batch_sizes == []
    assert (metrics.num_rounds, metrics.round_ms, metrics.decode_seconds) == (0, 0.0, 0.0)
    assert metrics.num_output_tokens == metrics.num_rounds_without_proposal == 3
    assert (metrics.tokens_per_round, metrics.mean_acceptance_length) == (1.0, 1.0)
    assert metrics.decode_tokens_per_second == 0.0 and metrics.output_tokens_per_second > 0
    parts = metrics.ttft_parts_ms
    assert parts is not None and parts["target_prefill"] > 0


def test_it_counts_in_no_time_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock moves a second at each reading, so a round takes one from launch to end."""
    ticks = iter(range(10_000))
    monkeypatch.setattr("specdec_cli.engine.loop.time.perf_counter", lambda: float(next(ticks)))
    requests = [Request(i, tuple(random_prompt(5, i))) for i in range(2)]
    result = fake_engine(None, batch_size=2).run(requests, 0, SamplingParams(max_new_tokens=4))
    metrics = result.metrics
    assert (metrics.num_rounds, metrics.round_ms, metrics.decode_seconds) == (3, 1e3, 3.0)
    assert metrics.num_rounds_without_proposal == 8 and metrics.num_tokens_from_prefill == 2
    assert metrics.decode_tokens_per_second == 2.0 and metrics.tokens_per_round == 1.0
    for seq in result.seqs:
        parts = seq.ttft_parts_ms
        assert parts is not None and seq.ttft_ms is not None
        assert parts["first_round"] == 0.0
        assert parts["target_prefill"] == seq.ttft_ms == seq.prefill_seconds * 2e3
    assert metrics.tpot_ms.mean == 3e3, "a round and the step to it"


@pytest.mark.parametrize("runs_ahead", [False, True])
def test_logits_that_are_not_finite(runs_ahead: bool, tmp_path: Path) -> None:
    engine = make_engine(save_tiny(tmp_path, "llama"), None, runs_ahead=runs_ahead)
    with torch.no_grad():
        engine.target.module.lm_head.weight[11] = float("nan")
    with pytest.raises(RunError, match="the target produced logits that are not finite"):
        decode(engine, [PROMPTS[0]], 0, max_new_tokens=1)
    assert engine.allocator.num_used == 0


def test_tokens_that_only_the_device_knows(device: torch.device) -> None:
    """Slots with a token more are those of sequences that have it. The second token ends a text,
    the third reaches the limit."""
    prompts = [[4, 5, 6], [7], [8, 9], [3, 4, 5, 6]]
    limits, more = [9, 9, 3, 9], {3: 11, 1: 2, 2: 12}

    def state(tokens: list[list[int]]) -> BatchState:
        made = BatchState(6, 4, device)
        of = enumerate(zip(tokens, prompts, limits, strict=True))
        made.load([Sequence(i, t, len(p), limit, [i + 1]) for i, (t, p, limit) in of], 5)
        return made

    found = state(prompts)
    new = torch.tensor(list(more.values()), device=device)
    found.append(list(more), new, torch.tensor([1, 2], device=device))
    want = state([[*p, *([more[i]] if i in more else [])] for i, p in enumerate(prompts)])
    assert torch.equal(found.numbers, want.numbers)
    assert torch.equal(found.block_tables, want.block_tables)
    assert found.active.tolist() == [True, False, False, True, False, False]
