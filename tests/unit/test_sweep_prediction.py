"""Predicted speed-ups against an engine whose times are known, so errors are the prediction's.

The engine is a stand-in: the real engine's random numbers decide rounds, and a formula gives their
times. Batches are refilled and run empty like real ones.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from functools import cache
from itertools import takewhile
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec_cli.acceptance.synthetic import SyntheticAcceptance
from specdec_cli.backends import native
from specdec_cli.core.figures import summarise
from specdec_cli.core.types import Emission, Permissions, Request, SamplingParams, Sequence
from specdec_cli.engine.loop import Engine, RunResult
from specdec_cli.errors import UsageError
from specdec_cli.experiment.folders.records import Point
from specdec_cli.experiment.forecasts import Text
from specdec_cli.experiment.measure import Watcher
from specdec_cli.experiment.sweep.document import forecasts_of
from specdec_cli.experiment.sweep.runner import Sweep
from specdec_cli.experiment.sweep.sweep_plan import plan_sweep
from specdec_cli.experiment.sweep.sweep_records import SweepRecords
from specdec_cli.launch.world import World
from specdec_cli.lengths.fixed import FixedLength
from specdec_cli.prompts import Prompt
from specdec_cli.prompts.types import PromptSet
from specdec_cli.recipe import load_recipe
from tests.support import noise_of

RATES = tuple(0.8 ** (i + 1) for i in range(8))
NUM_PROMPTS = {1: 24, 8: 96, 32: 256}
TOKENS, PROMPT = 96, 8
OVERHEAD_MS = 0.4  # part of a round outside all stages


def stages(k: int, active: int, length: float) -> dict[str, float]:
    """Milliseconds by stage: a pass costs more for more rows and text, a draft step a quarter."""
    return {
        "draft": k * (1.0 + 0.01 * active + 1e-4 * length),
        "verify": 4.0 + 0.02 * active * (k + 1) + 1e-3 * length,
        "sample": 0.2 + 0.01 * active,
    }


@cache
def draws(index: int) -> list[float]:
    noise = noise_of([index], [PROMPT], TOKENS + len(RATES), 0)
    return [float(draw) for draw in noise.accept[0]]


def stand(index: int, start: int, k: int) -> int:
    """Number of accepted proposals, of k, in a round that begins at an output token."""
    chain = takewhile(lambda d: d < 0.8, draws(index)[start : start + k])
    return sum(1 for _ in chain)


class KnownEngine:
    """An engine that runs rounds instantly and reports the formula's times."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self.max_model_len = 512
        self.rule = SyntheticAcceptance.from_rates(RATES)
        self.policy = FixedLength()
        self.proposer = SimpleNamespace(max_len=512)
        self.target = SimpleNamespace(model=None, device=torch.device("cpu"))

    def with_batch_size(self, batch_size: int) -> "KnownEngine":
        return KnownEngine(batch_size)

    def forget_rounds(self) -> None:
        pass

    forecast = Engine.forecast

    def run(
        self,
        requests: Iterable[Request],
        k: int,
        params: SamplingParams,
        on_emit: Callable[[list[Emission]], None],
    ) -> RunResult:
        seqs = [
            Sequence(r.index, list(r.token_ids), PROMPT, PROMPT + params.max_new_tokens)
            for r in requests
        ]
        waiting, running = deque(seqs), list[Sequence]()
        while waiting or running:
            while waiting and len(running) < self.batch_size:
                running.append(waiting.popleft())
            length = sum(len(s.tokens) for s in running) / len(running)
            stage_ms = stages(k, len(running), length)
            seconds = (sum(stage_ms.values()) + OVERHEAD_MS) / 1e3
            standing = [stand(s.index, len(s.tokens) - PROMPT, k) for s in running]
            emissions = []
            for seq, most in zip(list(running), standing, strict=True):
                asked = min(k, seq.max_tokens - len(seq.tokens) - 1)
                accepted = min(asked, most)
                seq.tokens += [1] * (accepted + 1)
                if asked:
                    seq.proposed_per_round.append(asked)
                    seq.accepted_per_round.append(accepted)
                else:
                    seq.rounds_without_proposal += 1
                seq.decode_seconds += seconds / len(standing)
                seq.round_share += 1 / len(standing)
                for stage, spent in stage_ms.items():
                    seq.stage_ms[stage] = seq.stage_ms.get(stage, 0.0) + spent / len(standing)
                emissions.append(Emission(seq, [1], accepted))
                if len(seq.tokens) == seq.max_tokens:
                    seq.finish_reason = "length"
                    running.remove(seq)
            on_emit(emissions)
        return RunResult(seqs, summarise(seqs, k, self.batch_size))


def swept(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> list[Point]:
    recipe = load_recipe(
        "demo",
        {
            "run.device": "cpu",
            "run.repeats": 1,
            "run.warmup": 0,
            "sampling.max_new_tokens": TOKENS,
            "sampling.ignore_eos": True,
            "speculation.num_speculative_tokens": 8,
            "speculation.acceptance": "synthetic",
            "speculation.synthetic_acceptance_rates": list(RATES),
        },
    )
    prompts = [Prompt(i, None, (1,) * PROMPT) for i in range(NUM_PROMPTS[batch_size])]
    plan = plan_sweep(
        native,
        [recipe],
        PromptSet(prompts),
        list(range(9)),
        [batch_size],
        Permissions(),
    )
    engine = KnownEngine(batch_size)
    monkeypatch.setattr("specdec_cli.backends.native.build", lambda *_: engine)
    return Sweep(plan, SweepRecords(), Watcher(), World(None, "cpu", 120.0)).run()


@pytest.mark.parametrize("batch_size", [1, pytest.param(8, marks=pytest.mark.slow), 32])
def test_nothing_but_noise_is_left(monkeypatch: pytest.MonkeyPatch, batch_size: int) -> None:
    points = swept(monkeypatch, batch_size)
    assert [p.k for p in points] == list(range(9))
    for point in points:
        prediction = point.prediction
        assert prediction is not None and prediction.is_exact
        length_error = prediction.mean_acceptance_length_error
        assert length_error is not None and abs(length_error) < 1e-12
        assert prediction.speedup_error is not None and abs(prediction.speedup_error) < 0.02
        assert point.k == 0 or 1.02 < (point.speedup or 0) < 1.8  # there is a speed-up to predict


def test_settings_name_every_prompt() -> None:
    """A run that resumes takes over samples by their index: each has to be the same prompt."""
    recipe = load_recipe("demo", {"run.device": "cpu"})
    hashes = set()
    for last in ((7, 8), (7, 9)):
        prompts = [Prompt(0, None, (1, 2)), Prompt(1, None, last)]
        plan = plan_sweep(native, [recipe], PromptSet(prompts), [0, 1], [1], Permissions())
        hashes.add((plan.settings.prompts["sha256"], plan.settings.digest))
    assert len({of_prompts for of_prompts, _ in hashes}) == len(hashes) == 2


def test_prompts_that_the_vocabulary_refuses_may_be_skipped() -> None:
    recipe = load_recipe("demo", {"run.device": "cpu"})
    prompts = [Prompt(0, None, (1, 10**6)), Prompt(1, None, (1, 2))]
    plan = plan_sweep(
        native, [recipe], PromptSet(prompts, skip_bad=True), [0, 1], [1], Permissions()
    )
    assert plan.settings.prompts["count"] == 1 and plan.jobs[0].token_ids == [(1, 2)]
    with pytest.raises(UsageError, match="token id 1000000"):
        plan_sweep(native, [recipe], PromptSet(prompts), [0, 1], [1], Permissions())


@pytest.mark.parametrize(
    ("is_greedy", "is_given", "is_exact"),
    [(True, False, True), (False, False, False), (True, True, True), (False, True, True)],
)
def test_a_prediction_is_exact_where_the_text_is_the_same_at_every_length(
    is_greedy: bool, is_given: bool, is_exact: bool
) -> None:
    """Greedy text is. With synthetic acceptance only its length has to be, and it is if no text
    ended by itself."""
    settings: Any = SimpleNamespace(
        is_greedy=is_greedy, has_given_acceptance=is_given, ks=(0, 2), batch_sizes=(1,)
    )
    settings.key = lambda *which: which
    ended = SimpleNamespace(finish_reason="length")
    records: Any = SimpleNamespace(
        samples=defaultdict(lambda: {0: ended}), costs=defaultdict(dict), texts={None: {}}
    )
    assert forecasts_of(settings, records, None, 1).is_exact is is_exact
    ended.finish_reason = "stop"
    assert forecasts_of(settings, records, None, 1).is_exact is (is_exact and not is_given)


@pytest.mark.parametrize(
    ("proposed", "is_given", "is_rough", "is_exact"),
    [
        ([2, 2], True, None, True),
        ([2, 1, 1], True, None, False),  # with other text it might propose more
        ([2, 1, 1], False, None, True),
        ([2, 2], False, True, False),
    ],
)
def test_a_prediction_is_exact_where_its_rounds_are_those_that_ran(
    proposed: list[int], is_given: bool, is_rough: bool | None, is_exact: bool
) -> None:
    draws = {"draws": (0.1,) * 6, "rates": (0.5, 0.5)} if is_given else {"chains": ((2, 2),) * 6}
    text = Text(limit=6, draft_limit=9, is_rough=is_rough, **draws)  # type: ignore[arg-type]
    settings: Any = SimpleNamespace(
        is_greedy=True, has_given_acceptance=is_given, ks=(0, 2), batch_sizes=(1,)
    )
    settings.key = lambda *which: which
    ended = SimpleNamespace(finish_reason="length", proposed_per_round=proposed)
    records: Any = SimpleNamespace(
        samples=defaultdict(lambda: {0: ended}), costs=defaultdict(dict), texts={None: {0: text}}
    )
    assert forecasts_of(settings, records, None, 1).is_exact is is_exact
