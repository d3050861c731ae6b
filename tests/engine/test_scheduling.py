"""Admission, preemption and the allocator during whole runs: no leaks, no deadlocks, and no effect
of scheduling on the output."""

import random
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.core.batch import Span
from specdec_cli.core.kv_cache import BlockAllocator
from specdec_cli.core.types import Request, SamplingParams, Sequence
from specdec_cli.engine.loop import Engine
from specdec_cli.engine.scheduler import Scheduler
from tests.engine.fakes import (
    BLOCK,
    FakeModel,
    continuation,
    fake_engine,
    random_prompt,
    run_checked,
    sometimes,
    target_rule,
)
from tests.support import decode, greedy_reference, make_engine, reference, save_tiny

EOS = frozenset({5, 41})


def until_eos(tokens: list[int]) -> list[int]:
    ends = [i + 1 for i, t in enumerate(tokens) if t in EOS]
    return tokens[: ends[0]] if ends else tokens


def watch_blocks(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Blocks in use after each `extend`; asserts that they never exceed the total."""
    seen: list[int] = []
    extend = engine.allocator.extend

    def watched(table: list[int], num_tokens: int) -> None:
        extend(table, num_tokens)
        assert engine.allocator.num_used + engine.allocator.num_free == engine.allocator.num_usable
        assert 0 <= engine.allocator.num_used <= engine.allocator.num_usable
        seen.append(engine.allocator.num_used)

    monkeypatch.setattr(engine.allocator, "extend", watched)
    return seen


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "seed", [1, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, 2, 3, 4))]
)
def test_a_hundred_prompts_in_a_tiny_cache(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random prompts, k, batch, chunk and cache, with preemption and EOS, give the output of runs
    alone."""
    rng = random.Random(seed)
    k = rng.randrange(0, 7)
    new_tokens = rng.randrange(1, 30)
    longest = 24
    least = -(-(longest + new_tokens - 1) // BLOCK) + 1
    batch_size = rng.randrange(2, 7)
    engine = fake_engine(
        sometimes,
        num_blocks=least + rng.randrange(0, 4),
        batch_size=batch_size,
        prefill_chunk=rng.choice([1, 5, 64]),
        draft_max_len=rng.choice([20, 1000]),
        eos_ids=EOS,
    )
    prompts = [random_prompt(rng.randrange(1, longest + 1), i) for i in range(100)]
    seen = watch_blocks(engine, monkeypatch)
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    run = engine.start(requests, k, SamplingParams(max_new_tokens=new_tokens))
    run_checked(engine, run)
    assert engine.allocator.num_used == 0
    assert max(seen) <= engine.allocator.num_usable
    # The same prompts one at a time in a cache with room to spare.
    alone = fake_engine(sometimes, eos_ids=EOS, draft_max_len=engine.proposer.max_len)  # type: ignore[union-attr]
    calm = decode(alone, prompts, k, max_new_tokens=new_tokens)
    for seq, other, prompt in zip(run.seqs, calm, prompts, strict=True):
        assert seq.output_ids == until_eos(continuation(target_rule, prompt, new_tokens))
        assert seq.output_ids == other.output_ids
        assert seq.finish_reason == other.finish_reason
        assert seq.accepted_per_round == other.accepted_per_round
        assert seq.proposed_per_round == other.proposed_per_round
        assert other.num_preemptions == 0
    assert isinstance(engine.target, FakeModel)
    assert max(engine.target.batch_sizes) <= batch_size


def test_preemption_happens_and_is_invisible() -> None:
    """Four sequences fit together at first, but not at their end."""
    engine = fake_engine(sometimes, num_blocks=20, batch_size=4)
    prompts = [random_prompt(3, i) for i in range(4)]
    seqs = decode(engine, prompts, 3, max_new_tokens=40)
    assert sum(s.num_preemptions for s in seqs) > 0
    assert seqs[0].num_preemptions == 0, "the oldest always gets on"
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert seq.output_ids == continuation(target_rule, prompt, 40)


def test_preemption_with_real_models(tmp_path: Path) -> None:
    """Recomputed keys and values give the same tokens as the first ones."""
    target = save_tiny(tmp_path / "target", "llama")
    draft = save_tiny(tmp_path / "draft", "llama", seed=1)
    oracle = reference(target)
    prompts = [random_prompt(n) for n in (3, 9, 1, 14, 6, 2)]
    want = [greedy_reference(oracle, p, 24) for p in prompts]
    for worker in (draft, target):
        engine = make_engine(target, worker, batch_size=4, num_blocks=16, prefill_chunk=5)
        for k in (0, 3):
            seqs = decode(engine, prompts, k, max_new_tokens=24)
            assert sum(s.num_preemptions for s in seqs) > 0
            assert [s.output_ids for s in seqs] == want
            if worker is target:
                assert all(s.accepted_per_round == s.proposed_per_round for s in seqs)


def test_sampling_does_not_depend_on_scheduling(tmp_path: Path) -> None:
    target = save_tiny(tmp_path / "target", "llama")
    draft = save_tiny(tmp_path / "draft", "llama", seed=1)
    prompts = [random_prompt(n) for n in (3, 9, 1, 14, 6)]
    outputs = []
    for batch_size, num_blocks, chunk in ((1, 200, 2048), (4, 16, 3), (5, 200, 1)):
        engine = make_engine(
            target, draft, batch_size=batch_size, num_blocks=num_blocks, prefill_chunk=chunk
        )
        seqs = decode(engine, prompts, 3, max_new_tokens=20, temperature=1.3, seed=11)
        outputs.append([(s.output_ids, s.accepted_per_round) for s in seqs])
    assert outputs[0] == outputs[1] == outputs[2]
    assert sum(map(sum, (accepted for _, accepted in outputs[0]))) > 0


def test_a_prompt_that_can_never_fit_is_an_error_with_numbers() -> None:
    engine = fake_engine(sometimes, num_blocks=6, batch_size=3)
    prompts = [random_prompt(4), random_prompt(40), random_prompt(7)]
    seqs = decode(engine, prompts, 2, max_new_tokens=10)
    assert [s.finish_reason for s in seqs] == ["length", "error", "length"]
    message = seqs[1].error or ""
    assert "13" in message, "blocks needed: (40 + 10 - 1) / 4"
    assert "has 5" in message and "50 tokens" in message
    assert seqs[1].output_ids == []
    for i in (0, 2):
        assert seqs[i].output_ids == continuation(target_rule, prompts[i], 10)


def test_what_cannot_run_is_reported_before_the_first_round() -> None:
    engine = fake_engine(sometimes, num_blocks=6)
    requests = [Request(0, tuple(random_prompt(40))), Request(1, tuple(random_prompt(4)))]
    seen: list[list[int]] = []
    engine.run(
        requests,
        2,
        SamplingParams(max_new_tokens=6),
        lambda emissions: seen.append([e.seq.index for e in emissions]),
    )
    assert seen[0] == [0]
    assert all(indices == [1] for indices in seen[1:]) and len(seen) > 1


@pytest.mark.parametrize("room", [0, 1], ids=["just-fits", "one-short"])
def test_the_smallest_cache_that_a_sequence_can_run_in(room: int) -> None:
    """The last token needs no keys and values, so 13 tokens take 3 blocks of 4."""
    engine = fake_engine(sometimes, num_blocks=4 - room)
    assert [Sequence(0, [1] * n, 5, 13).room(99) for n in (5, 11, 12)] == [7, 1, 0]
    (seq,) = decode(engine, [random_prompt(5)], 3, max_new_tokens=8)
    assert seq.finish_reason == ("error" if room else "length")


@pytest.mark.timeout(20)
@pytest.mark.parametrize("k", [0, 1, 6])
def test_every_sequence_needs_the_whole_cache(k: int) -> None:
    """In the worst contention no two sequences can run to their ends together."""
    engine = fake_engine(sometimes, num_blocks=6, batch_size=4, prefill_chunk=2)
    prompts = [random_prompt(5, i) for i in range(8)]
    seqs = decode(engine, prompts, k, max_new_tokens=16)
    assert [s.output_ids for s in seqs] == [continuation(target_rule, p, 16) for p in prompts]


def test_oldest_first_and_slots_are_refilled_in_order() -> None:
    engine = fake_engine(sometimes, batch_size=2)
    requests = [Request(i, tuple(random_prompt(3, i))) for i in range(6)]
    run = engine.start(requests, 2, SamplingParams(max_new_tokens=9))
    entered: list[int] = []
    while not run.scheduler.is_done:
        engine.step(run)
        running = [s.index for s in run.scheduler.running]
        assert running == sorted(running) and len(running) <= 2
        entered += [i for i in running if i not in entered]
    assert entered == list(range(6))


class Boom(Exception):
    pass


@pytest.mark.parametrize("where", ["prefill", "draft", "score", "emit"])
def test_all_blocks_are_back_after_a_run_that_raises(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = fake_engine(sometimes, num_blocks=30, batch_size=3)
    prompts = [random_prompt(n, 3) for n in (9, 12, 5, 8)]
    calls = 0
    used: list[int] = []

    def fail(*_: object, **__: object) -> None:
        nonlocal calls
        calls += 1
        used.append(engine.allocator.num_used)
        raise Boom

    def on_emit(emissions: object) -> None:
        if where == "emit":
            fail()

    if where == "prefill":
        monkeypatch.setattr(engine.target, "prefill", fail)
    elif where == "draft":
        monkeypatch.setattr(engine.proposer, "propose", fail)
    elif where == "score":
        monkeypatch.setattr(engine.target, "forward_slots", fail)
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    with pytest.raises(Boom):
        engine.run(requests, 3, SamplingParams(max_new_tokens=8), on_emit)
    assert used and used[0] > 0, "it failed while blocks were held"
    assert engine.allocator.num_used == 0
    monkeypatch.undo()
    seqs = decode(engine, prompts, 3, max_new_tokens=8)
    assert [s.output_ids for s in seqs] == [continuation(target_rule, p, 8) for p in prompts]


def test_a_failed_run_leaves_no_trace_in_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs fail at each round in turn; then one runs to the end on the same engine."""
    engine = fake_engine(sometimes, num_blocks=12, batch_size=3)
    prompts = [random_prompt(n, 4) for n in (9, 2, 5, 8)]
    requests = [Request(i, tuple(p)) for i, p in enumerate(prompts)]
    score = engine.target.forward_slots
    for fatal in range(1, 9):
        count = 0

        def failing(*args: object, limit: int = fatal, **more: object) -> object:
            nonlocal count
            count += 1
            if count == limit:
                raise Boom
            return score(*args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(engine.target, "forward_slots", failing)
        with pytest.raises(Boom):
            engine.run(requests, 2, SamplingParams(max_new_tokens=14))
        assert engine.allocator.num_used == 0
    monkeypatch.undo()
    seqs = decode(engine, prompts, 2, max_new_tokens=14)
    assert [s.output_ids for s in seqs] == [continuation(target_rule, p, 14) for p in prompts]


def test_a_proposal_never_shrinks_for_lack_of_blocks() -> None:
    allocator = BlockAllocator(7, BLOCK)
    scheduler = Scheduler(allocator, batch_size=3, k=4, draft_max_len=100)
    seqs = [Sequence(i, [9] * 4, 4, 20) for i in range(3)]
    for seq in seqs:
        scheduler.add(seq)
    # 2 blocks each for 4 + 4 tokens, and a spare block per running sequence: room for two of three.
    assert scheduler.admit() == seqs[:2]
    for seq in seqs[:2]:
        seq.tokens += [9] * 5
        seq.target_kv, seq.draft_kv = 8, 7
    # Now 13 tokens take 4 blocks each and there are 6, so the younger sequence is preempted.
    assert scheduler.reserve() == [seqs[0]]
    assert scheduler.proposal_len(seqs[0]) == 4
    assert seqs[1].num_preemptions == 1
    assert (seqs[1].target_kv, seqs[1].draft_kv, seqs[1].block_table) == (0, 0, [])
    assert list(scheduler.waiting) == [seqs[1], seqs[2]], "it is the next to be admitted"


def test_prefill_of_a_preempted_sequence_covers_what_it_wrote() -> None:
    engine = fake_engine(sometimes, num_blocks=14, batch_size=3)
    fed: list[tuple[int, int]] = []
    prefill = engine.target.prefill

    def watched(spans: list[Span], **more: Any) -> Any:
        fed.extend((s.seq.index, s.stop) for s in spans)
        return prefill(spans, **more)

    engine.target.prefill = watched  # type: ignore[method-assign]
    prompts = [random_prompt(3, i) for i in range(3)]
    seqs = decode(engine, prompts, 2, max_new_tokens=30)
    again = [s.index for s in seqs if s.num_preemptions]
    assert again and all(max(stop for i, stop in fed if i == a) > 3 for a in again)


@pytest.mark.parametrize("ahead", [0, 4, 7])
def test_the_smallest_cache_for_passes_that_reach_past_the_text(ahead: int) -> None:
    """The last round that proposes begins two tokens before the end."""
    longest = 29
    need = -(-max(longest - 1, longest - 2 + ahead) // 4)
    for usable in (need - 1, need):
        scheduler = Scheduler(BlockAllocator(usable + 1, 4), 1, 3, 100, ahead)
        seq = Sequence(0, [1] * 5, 5, longest)
        if usable < need:
            with pytest.raises(ValueError, match=f"{longest} tokens"):
                scheduler.add(seq)
            continue
        scheduler.add(seq)
        assert scheduler.admit() == [seq]
        for _ in range(longest - 6):
            seq.tokens.append(1)
            assert scheduler.reserve() == [seq]
            reach = len(seq.tokens) + max(ahead, scheduler.proposal_len(seq))
            has_round = scheduler.proposal_len(seq) > 0
            assert not has_round or 4 * len(seq.block_table) >= min(reach, 100)
            scheduler.extend_ahead(0)
