"""Forecasts of the time of sweeps and comparisons, against rounds measured on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec_cli.backends import native
from specdec_cli.engine.plan import plan
from specdec_cli.experiment.duration import DurationEstimate, Speeds, in_words, total_seconds
from specdec_cli.experiment.folders.records import Key
from specdec_cli.experiment.generation import Job
from specdec_cli.models.draft import Passes
from specdec_cli.prompts import Prompt
from specdec_cli.recipe import load_recipe

H200 = Speeds(4.3e12, 700e12)


def job_of(recipe: str, count: int, **keys: object) -> Job:
    sets = {"run.device": "cpu"} | {key.replace("__", "."): one for key, one in keys.items()}
    planned = native.prepared(plan(load_recipe(recipe, sets)))
    ids = [(1, 2, 3, 4)] * count
    return Job(native, planned, [Prompt(i, None, ids[i]) for i in range(count)], ids)


def test_rounds_take_what_was_measured() -> None:
    """8B and 1B shapes on one H200 (docs/performance.md): milliseconds a round."""
    job = job_of("bench-8b-1b-dummy", 32)
    on_gpu = replace(job.plan.own, device=torch.device("cuda", 0))
    job = replace(job, plan=replace(job.plan, own=on_gpu))
    found = DurationEstimate(job, H200)
    for k, batch, measured in ((0, 1, 3.83), (5, 1, 7.70), (5, 8, 9.1), (5, 32, 12.5)):
        forecast = 1e3 * found.round_seconds(Key("d", batch, k))
        assert forecast == pytest.approx(measured, rel=0.15)
    assert found.tokens_a_round(5) == pytest.approx(3.69, abs=0.01)
    # A text of n tokens takes n rounds at k = 0, and fewer by the tokens a round.
    params = replace(job.plan.params, max_new_tokens=256)
    plain = found.run_seconds(Key("d", 1, 0), 2, params)
    assert plain == pytest.approx(2 * 257 * 3.83e-3, rel=0.15)


def test_experts_are_read_as_far_as_tokens_choose_them() -> None:
    job = job_of("bench-30b-a3b-dummy", 1)
    found = DurationEstimate(job, Speeds(4.3e12, 1e18))
    one, eight, many = (found.pass_seconds(job.plan.own.target, n) for n in (1, 8, 4096))
    layers = 48 * 250e-6  # of a CPU's plan
    floors = 1.42e-3, 6.0e-3
    for seconds, floor in zip((one, eight), floors, strict=True):
        assert seconds - layers == pytest.approx(floor, rel=0.1)
    assert many - layers == pytest.approx(
        (job.plan.own.target.weight_bytes - 0.62e9) / 4.3e12, rel=0.02
    )


def test_a_draft_takes_the_passes_that_it_says() -> None:
    job = job_of("bench-8b-1b-dummy", 4)
    draft: Any = job.plan.own.draft

    class OnePass:
        def __getattr__(self, name: str) -> Any:
            return getattr(draft, name)

        def passes(self, k: int) -> Passes:
            return Passes(1, k + 1)

    one: Any = OnePass()
    planned = replace(job.plan, own=replace(job.plan.own, draft=one))
    block = replace(job, plan=planned)
    for found, seconds in (
        (DurationEstimate(job, H200), lambda f: 5 * f.pass_seconds(draft, 4)),
        (DurationEstimate(block, H200), lambda f: f.pass_seconds(draft, 4 * 6)),
    ):
        rest = found.pass_seconds(job.plan.own.target, 4 * 6)
        assert found.round_seconds(Key("d", 4, 5)) == pytest.approx(rest + seconds(found))


def test_degrees_share_what_is_read_and_add_sums() -> None:
    """Ranks on CPUs divide the machine's speed; each GPU has its own."""
    cpu = job_of("bench-8b-1b-dummy", 1)
    on_gpu = replace(cpu.plan.own, device=torch.device("cuda", 0))
    gpu = replace(cpu, plan=replace(cpu.plan, own=on_gpu))
    for job, ranks, one_sum in ((cpu, 4, 400e-6), (gpu, 1, 6e-6)):
        target, draft = job.plan.own.target, job.plan.own.draft
        assert draft is not None
        alone, split = DurationEstimate(job, H200), DurationEstimate(job, H200, (4, 2))
        for model, degree, layer_count in ((target, 4, 32), (draft, 2, 16)):
            layers = layer_count * (250e-6 if job is cpu else 11e-6)
            work = alone.pass_seconds(model, 1) - layers
            found = split.pass_seconds(model, 1) - layers
            assert found == pytest.approx(work * ranks / degree + layer_count * 2 * one_sum)


def test_a_sweep_takes_its_repeats_warm_up_and_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec_cli.experiment.duration.speeds_of", lambda *_: H200)
    job = job_of("demo", 8, run__repeats=2, run__warmup=0)
    keys = {Key("d", 1, 0): job, Key("d", 1, 2): job}
    start = 3.0 + sum(m.weight_bytes for m in job.plan.own.models) / 1e9
    found, params = DurationEstimate(job, H200), job.plan.params
    once = sum(found.run_seconds(key, 8, params) for key in keys)
    curve = sum(found.run_seconds(key, 4, params) for key in keys)
    assert total_seconds(keys) == pytest.approx(start + 2 * once)
    assert total_seconds(keys, has_curve=True) == pytest.approx(start + 2 * once + curve)
    # Predicted points are timed for the curve and warmed up, but not measured.
    warm = job_of("demo", 8, run__repeats=2, run__warmup=3)
    every = dict.fromkeys([*keys, Key("d", 1, 1)], warm)
    curve += sum(3 * found.run_seconds(key, 1, params) for key in every)
    curve += found.run_seconds(Key("d", 1, 1), 4, params)
    assert total_seconds(every, measured=list(keys), has_curve=True) == pytest.approx(
        start + 2 * once + curve
    )
    # Ranks of a comparison load models anew, for each pair that can run.
    degrees = ((1, 1), (2, 1))
    compared = {Key("d", 1, k, *pair): job for pair in degrees for k in (0, 2)}
    ranks = [DurationEstimate(job, H200, pair) for pair in degrees]
    rounds = 2 * sum(one.run_seconds(key, 8, params) for one in ranks for key in keys)
    assert total_seconds(compared) == pytest.approx(2 * start + rounds)
    assert [in_words(s) for s in (8.4, 600, 9000)] == ["8 s", "10 min", "2.5 h"]
