"""Rounds one ahead of the host, and rounds read at once, against the oracle's ragged rounds."""

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec_cli.acceptance.synthetic import SyntheticAcceptance
from specdec_cli.core.figures import Acceptance
from specdec_cli.core.state import slot_counts
from specdec_cli.core.types import Request, SamplingParams
from specdec_cli.engine.loop import Engine, RunResult
from specdec_cli.errors import RunError
from tests.oracle import with_oracle
from tests.support import VOCAB, make_engine

PROMPTS = [
    [random.Random(i).randrange(3, VOCAB) for _ in range(length)]
    for i, length in enumerate((5, 1, 2, 17, 9, 30, 3, 12))
]
POISON = 1e4  # finite, because padding reads unwritten memory with weight zero


class Stop:
    """Ends a sequence at a token, like a stop string, which only the host sees."""

    def __init__(self, token: int) -> None:
        self.token = token

    def feed(self, tokens: Any) -> int | None:
        return next((i for i, t in enumerate(tokens, 1) if t == self.token), None)


def engines(pair: tuple[Path, Path], device: torch.device, **settings: Any) -> list[Engine]:
    """The same engine with the oracle's rounds, rounds one ahead, and rounds read at once."""
    made = []
    for runs_ahead in (False, True, False):
        engine = make_engine(*pair, device=device, runs_ahead=runs_ahead, **settings)
        for model in (engine.target, engine.proposer.model):  # type: ignore[union-attr]
            for tensor in model.cache.pools:
                tensor.fill_(POISON)
        made.append(engine)
    return [with_oracle(made[0]), *made[1:]]


def run(engine: Engine, k: int, stop: int | None = None, **params: Any) -> RunResult:
    requests = [
        Request(i, tuple(p), None if stop is None else partial(Stop, stop))
        for i, p in enumerate(PROMPTS)
    ]
    result = engine.run(requests, k, SamplingParams(**params))
    assert engine.allocator.num_used == 0
    return result


def told(result: RunResult) -> list[tuple[Any, ...]]:
    return [
        (s.output_ids, s.proposed_per_round, s.accepted_per_round, s.finish_reason)
        for s in result.seqs
    ]


SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8, "seed": 5},
    "masked": {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "seed": 2**40 + 1},
}


# CI has every two of k, batch size and settings together; the other crossings are slow.
CROSSED = [
    pytest.param(*(k, batch_size, settings), marks=() if (i + j + b) % 2 == 0 else pytest.mark.slow)
    for i, k in enumerate((0, 1, 4))
    for j, settings in enumerate(SETTINGS)
    for b, batch_size in enumerate((1, 3))
]


@pytest.mark.parametrize(("k", "batch_size", "settings"), CROSSED)
def test_rounds_equal_the_oracles(
    pair: tuple[Path, Path], device: torch.device, k: int, batch_size: int, settings: str
) -> None:
    """Compares tokens, proposals and acceptances, with EOS, refills and very short prompts."""
    results = [
        run(engine, k, max_new_tokens=21, **SETTINGS[settings])
        for engine in engines(pair, device, batch_size=batch_size, eos_ids=frozenset({7, 40}))
    ]
    assert told(results[0]) == told(results[1]) == told(results[2])
    assert {s.finish_reason for s in results[0].seqs} == {"eos", "length"}
    if k:
        accepted = sum(sum(s.accepted_per_round) for s in results[0].seqs)
        proposed = sum(sum(s.proposed_per_round) for s in results[0].seqs)
        assert 0.2 < accepted / proposed < 0.9
    names = {"num_rounds", "num_rounds_without_proposal", *Acceptance.model_fields}
    counts = [result.metrics.model_dump(include=names) for result in results]
    assert counts[0] == counts[2] and all(
        counts[0][name] == counts[1][name] for name in Acceptance.model_fields
    )


def test_stop_strings_that_only_the_host_sees(
    pair: tuple[Path, Path], device: torch.device
) -> None:
    """A stopped sequence runs a ghost round, which does not harm the next owners of its blocks."""
    tight = {"batch_size": 3, "num_blocks": 45}
    unstopped = run(engines(pair, device, **tight)[0], 3, max_new_tokens=30)
    token = unstopped.seqs[0].output_ids[9]
    results = [
        run(engine, 3, stop=token, max_new_tokens=30) for engine in engines(pair, device, **tight)
    ]
    assert told(results[0]) == told(results[1])
    assert "stop" in {s.finish_reason for s in results[0].seqs}


@pytest.mark.parametrize("num_blocks", [17, 24, 31])
def test_preemption_changes_nothing(
    pair: tuple[Path, Path], device: torch.device, num_blocks: int
) -> None:
    tight, ample = (
        run(
            engines(pair, device, batch_size=4, num_blocks=count)[1],
            4,
            max_new_tokens=30,
            temperature=0.9,
        )
        for count in (num_blocks, 300)
    )
    assert told(tight) == told(ample)
    assert tight.metrics.num_preemptions > 0


def test_synthetic_acceptance(pair: tuple[Path, Path], device: torch.device) -> None:
    rates = SyntheticAcceptance.from_rates((0.8, 0.5, 0.2))
    for temperature in (0.0, 0.7):
        both = engines(pair, device, batch_size=3, rule=rates)
        results = [run(e, 3, max_new_tokens=25, temperature=temperature) for e in both]
        assert told(results[0]) == told(results[1])


def test_the_drafts_own_context_ends_first(pair: tuple[Path, Path], device: torch.device) -> None:
    results = [
        run(engine, 4, max_new_tokens=40)
        for engine in engines(pair, device, batch_size=2, draft_max_len=40)
    ]
    assert told(results[0]) == told(results[1])
    assert any(s.rounds_without_proposal for s in results[0].seqs)


def test_a_run_with_other_params_on_the_same_engine(
    pair: tuple[Path, Path], device: torch.device
) -> None:
    ragged, padded, _ = engines(pair, device, batch_size=2)
    for k, params in ((2, {}), (0, {}), (2, {"temperature": 1.0}), (2, {"seed": 3}), (2, {})):
        expected = run(ragged, k, max_new_tokens=12, **params)  # type: ignore[arg-type]
        assert told(run(padded, k, max_new_tokens=12, **params)) == told(expected)  # type: ignore[arg-type]


class StopAfter:
    """Ends a sequence after a number of tokens."""

    def __init__(self, count: int) -> None:
        self.left = count

    def feed(self, tokens: Any) -> int | None:
        found = self.left if self.left <= len(tokens) else None
        self.left -= len(tokens)
        return found


def test_few_sequences_run_in_few_slots(pair: tuple[Path, Path], device: torch.device) -> None:
    """Of 9 sequences in 9 slots, the last 3, and then the last one, run in fewer slots."""
    assert [slot_counts(n) for n in (1, 9, 32)] == [[1], [1, 3, 9], [1, 2, 8, 32]]

    def requests() -> list[Request]:
        return [Request(i, (5,) * (1 + i % 5), partial(StopAfter, 4 + 13 * i)) for i in range(9)]

    ragged, padded, _ = engines(pair, device, batch_size=9)
    params = SamplingParams(max_new_tokens=130, temperature=1.0)
    assert told(padded.run(requests(), 2, params)) == told(ragged.run(requests(), 2, params))
    run = padded.start(requests(), 2, params)
    used = []
    while not run.scheduler.is_done:
        padded.step(run)
        assert len(run.scheduler.running) <= run.rounds.num_slots
        used.append(run.rounds.num_slots)
    assert used == sorted(used, reverse=True) and set(used) == {9, 3, 1}


@pytest.mark.parametrize("way", [1, 2], ids=["ahead", "at-once"])
@pytest.mark.parametrize("is_nan", [False, True], ids=["inf", "nan"])
@pytest.mark.parametrize("who", ["target", "draft"])
def test_logits_that_are_not_finite(
    pair: tuple[Path, Path], device: torch.device, who: str, is_nan: bool, way: int
) -> None:
    engine = engines(pair, device, batch_size=2)[way]
    model = engine.target if who == "target" else engine.proposer.model  # type: ignore[union-attr]
    with torch.no_grad():
        head = model.module.lm_head.weight  # type: ignore[union-attr]
        if is_nan:
            head[11] = float("nan")
        else:  # one of two tokens has the highest logit, which is infinite
            head[11:13, 0] = torch.tensor([float("inf"), -float("inf")])
    with pytest.raises(RunError, match=f"the {who} produced logits that are not finite"):
        run(engine, 3, max_new_tokens=10)
    assert engine.allocator.num_used == 0
    caches = [model.cache for model in (engine.target, engine.proposer.model)]  # type: ignore[union-attr]
    assert all(t.isfinite().all() for c in caches for t in c.pools)


@pytest.mark.parametrize("way", [1, 2], ids=["ahead", "at-once"])
def test_a_run_that_was_not_finite_leaves_nothing_to_the_next(
    pair: tuple[Path, Path], device: torch.device, way: int
) -> None:
    """The failed run's keys are not finite, and padding reads keys that were not written since."""
    engine = engines(pair, device, batch_size=2)[way]
    assert engine.proposer is not None
    before = told(run(engine, 3, max_new_tokens=6))
    caches = [engine.target.cache, engine.proposer.model.cache]  # type: ignore[attr-defined]
    embeddings = engine.target.module.get_input_embeddings().weight
    row = embeddings[PROMPTS[0][-1]].clone()
    with torch.no_grad():
        embeddings[PROMPTS[0][-1]] = float("nan")
    with pytest.raises(RunError, match="the target produced logits that are not finite"):
        run(engine, 3, max_new_tokens=6)
    assert all(t.isfinite().all() for c in caches for t in c.pools)
    with torch.no_grad():
        embeddings[PROMPTS[0][-1]] = row
    assert told(run(engine, 3, max_new_tokens=6)) == before
