"""Disturbed times are found in samples and in readings of the machine; quiet ones are not."""

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from specdec_cli.errors import Notice
from specdec_cli.experiment import machine
from specdec_cli.experiment.folders.records import Key, Point, Prediction, Sample
from specdec_cli.experiment.machine import MachineWatch
from specdec_cli.experiment.statistics.noise import (
    disturbances,
    noise_in,
    predictions_off,
    seams_in,
)
from specdec_cli.experiment.sweep.gains import measured_gains
from specdec_cli.experiment.sweep.recommend import recommend
from tests.report_helpers import sample_record

KEYS = [Key(None, 1, 0), Key("a", 1, 2), Key("a", 1, 4), Key("b", 1, 2)]
PROMPTS, REPEATS = 24, 3
Times = dict[Key, dict[int, list[float]]]


def quiet(seed: int) -> Times:
    """Seconds of each repeat, by point and prompt: 3 % of noise over prompts of many lengths."""
    rng = random.Random(seed)
    lengths = [rng.randint(10, 100) for _ in range(PROMPTS)]
    return {
        key: {
            i: [length / (1 + 0.2 * key.k) * rng.gauss(1, 0.03) / 100 for _ in range(REPEATS)]
            for i, length in enumerate(lengths)
        }
        for key in KEYS
    }


def samples_of(times: Times) -> dict[Key, dict[int, Sample]]:
    return {
        key: {i: sample(key, i, seconds, times[KEYS[0]][i]) for i, seconds in found.items()}
        for key, found in times.items()
    }


def sample(key: Key, index: int, seconds: list[float], plain: list[float]) -> Sample:
    rounds = plain[0] * 100 / (1 + 0.2 * key.k)  # of one hundredth of a second
    found = sample_record(
        draft=key.draft,
        k=key.k,
        index=index,
        seconds=seconds,
        decode_seconds=seconds,
        round_share=[rounds] * REPEATS,
        ttft_ms=[1.0] * REPEATS,
        tpot_ms=[1.0] * REPEATS,
    )
    return Sample(**found)


def codes(times: Times) -> list[str]:
    return [one.code for one in noise_in(samples_of(times))]


def test_quiet_times_are_no_reason_to_warn() -> None:
    assert sum(bool(codes(quiet(seed))) for seed in range(20)) <= 1


@pytest.mark.parametrize("factor", [1.4, 1 / 1.4])
def test_a_drift_of_all_points_is_told_with_its_prompt(factor: float) -> None:
    times = quiet(3)
    for found in times.values():
        for i in range(14, PROMPTS):
            found[i] = [value * factor for value in found[i]]
    samples = samples_of(quiet(3))
    slower = samples_of(times)
    for key, of in slower.items():  # rounds stay what they were
        for i, one in of.items():
            of[i] = one.model_copy(update={"round_share": samples[key][i].round_share})
    (notice,) = noise_in(slower)
    assert notice.code == "baseline_drift" and notice.evidence["from_prompt"] == 14
    before, after = (notice.evidence[f"round_ms_{when}"] for when in ("before", "after"))
    assert after / before == pytest.approx(factor, rel=0.05)
    assert ("slower" in notice.message) == (factor > 1)


@pytest.mark.parametrize(("before", "factor"), [(2, 1 / 15), (5, 3.0), (12, 1.5), (20, 1 / 3)])
def test_a_run_that_went_on_elsewhere_tells_of_its_seam(before: int, factor: float) -> None:
    """Few prompts on one side suffice, where a search for a drift would find nothing."""
    samples = samples_of(quiet(3))
    for seed in range(3, 13):
        assert seams_in(samples_of(quiet(seed)), range(before)) == []
    for of in samples.values():
        for i, one in of.items():
            times = [value * (factor if i >= before else 1.0) for value in one.decode_seconds]
            of[i] = one.model_copy(update={"decode_seconds": times})
    (notice,) = seams_in(samples, range(before))
    assert notice.code == "baseline_drift" and notice.evidence["from_prompt"] == before
    assert "where the run was resumed" in notice.message
    assert seams_in(samples, ()) == [] == seams_in(samples, range(PROMPTS))
    few = {key: {i: of[i] for i in range(3)} for key, of in samples.items()}
    assert seams_in(few, range(2)) == [], "three prompts show nothing"


@pytest.mark.parametrize(("factor", "told"), [(1.0, []), (2.0, ["baseline_drift"])])
def test_prompts_that_differ_are_no_drift(factor: float, told: list[str]) -> None:
    """On a quiet machine prompts differ by 6 %, and the last three by 22 %; on a disturbed one
    rounds take twice as long from the middle on."""
    rng = random.Random(5)
    of_prompts = [rng.gauss(1, 0.06) * (0.8 if i >= PROMPTS - 3 else 1) for i in range(PROMPTS)]
    samples = samples_of(quiet(3))
    for of in samples.values():
        for i, one in of.items():
            longer = of_prompts[i] * (factor if i >= PROMPTS // 2 else 1)
            times = [value * longer for value in one.decode_seconds]
            of[i] = one.model_copy(update={"decode_seconds": times})
    assert [one.code for one in noise_in(samples)] == told


@pytest.mark.parametrize("steps", [0, 1])
def test_longer_texts_take_longer_and_are_no_drift(steps: int) -> None:
    """Prompts in an order of lengths, whose rounds take up to 2.5 times as long; and a machine that
    gets slower in the end."""
    samples = samples_of(quiet(3))
    for of in samples.values():
        for i, one in of.items():
            longer = 1.04**i * (1.4 if steps and i >= 14 else 1.0)
            times = [value * longer for value in one.decode_seconds]
            update = {"decode_seconds": times, "prompt_token_ids": [5] * (20 * i)}
            of[i] = one.model_copy(update=update)
    found = noise_in(samples)
    assert [one.code for one in found] == ["baseline_drift"] * steps
    assert all(one.evidence["from_prompt"] == 14 for one in found)


@pytest.mark.parametrize(("together", "told"), [(8, []), (2, ["baseline_drift"])])
def test_prompts_that_are_decoded_together_are_one_observation(
    together: int, told: list[str]
) -> None:
    """Three batches say nothing of a machine; twelve do."""
    times = quiet(3)
    usual = samples_of(times)
    for found in times.values():
        for i in range(16, PROMPTS):
            found[i] = [value * 1.3 for value in found[i]]
    slower = samples_of(times)
    for key, of in slower.items():
        for i, one in of.items():
            of[i] = one.model_copy(update={"round_share": usual[key][i].round_share})
    batched = {Key(key.draft, together, key.k): of for key, of in slower.items()}
    found_codes = [notice.code for notice in noise_in(batched)]
    assert found_codes == told


@pytest.mark.parametrize("kept", [1, 5, 11])
@pytest.mark.parametrize("code", ["baseline_drift", "repeats_disagree"])
def test_a_point_that_failed_early_hides_no_noise_of_the_others(code: str, kept: int) -> None:
    samples = samples_of(quiet(5))
    for of in samples.values():
        for i, one in of.items():
            times = list(one.decode_seconds)
            if code == "repeats_disagree":
                times[2] *= 1.12
            elif i >= 14:
                times = [1.4 * value for value in times]
            of[i] = one.model_copy(update={"decode_seconds": times})
    assert [one.code for one in noise_in(samples)] == [code]
    samples[KEYS[2]] = {i: samples[KEYS[2]][i] for i in range(kept)}
    assert [one.code for one in noise_in(samples)] == [code]


def test_an_outlying_repeat_and_repeats_that_disagree_are_told() -> None:
    times = quiet(4)
    times[KEYS[0]][5][1] *= 2.6
    (notice,) = noise_in(samples_of(times))
    assert (notice.code, notice.evidence["index"], notice.evidence["k"]) == (
        "outlying_repeats",
        5,
        0,
    )
    times = quiet(5)
    for found in times.values():
        for seconds in found.values():
            seconds[2] *= 1.12
    (notice,) = noise_in(samples_of(times))
    assert notice.code == "repeats_disagree" and notice.evidence["repeats"] == [1, 3]
    assert notice.evidence["batch_size"] == 1
    low, high = notice.evidence["ratio_ci"]
    assert low < 1 / 1.12 < high < 1.0


def test_repeats_that_may_differ_little_are_not_told() -> None:
    """One repeat takes 6 % longer, since a quarter of its prompts do: it may have been 2 %."""
    times = quiet(5)
    for found in times.values():
        for i, seconds in found.items():
            seconds[2] *= 1.24 if i % 4 == 0 else 1.0
    assert codes(times) == []


def test_no_recommendation_is_significant_over_a_warning() -> None:
    samples = samples_of(quiet(7))
    points = [
        Point(k=key.k, batch_size=1, draft=key.draft, status="ok", speedup=1 + 0.2 * key.k,
              speedup_ci=[1.0 + 0.1 * key.k, 1.1 + 0.3 * key.k])
        for key in KEYS
    ]  # fmt: skip
    gains = measured_gains(points, samples)
    calm = recommend(points, gains, 0)
    disturbed = recommend(points, gains, 0, noise_in(samples_of(with_outlier())))
    assert calm.significant and not disturbed.significant
    assert disturbed.k == calm.k > 0
    assert "since times were disturbed (outlying_repeats); the same prompts" in disturbed.reason
    assert (calm.verdict, disturbed.verdict) == ("use", "inconclusive")
    assert disturbed.needed and disturbed.needed.prompts == PROMPTS


def test_a_warning_counts_at_the_batch_sizes_that_its_evidence_names() -> None:
    drift = Notice("baseline_drift", "", {"batch_size": 8, "change": 0.2})
    points = [{"k": 4, "batch_size": 32}, {"k": 2, "batch_size": 8}]
    fast = Notice("impossible_speedup", "", {"points": points})
    load, few = Notice("cpu_load", "", {"runnable": 4.0}), Notice("few_prompts", "")
    told = [drift, fast, load, few]
    assert disturbances(told) == [drift, fast, load]
    assert disturbances(told, 1) == [load]
    assert disturbances(told, 8) == [drift, fast, load]
    assert disturbances(told, 32) == [fast, load]


def with_outlier() -> Times:
    times = quiet(4)
    times[KEYS[0]][5][1] *= 2.6
    return times


def test_a_prediction_that_is_off_says_by_how_much_and_in_which_direction() -> None:
    def point(error: float, ends: list[float] | None) -> Point:
        prediction = Prediction(
            method="replay", is_exact=True, speedup=1.5, speedup_error=error,
            mean_acceptance_length=2.0, mean_acceptance_length_error=0.0, iid_alpha=0.5,
            iid_mean_acceptance_length=2.0, iid_error=0.0, analytic_alpha=None,
            speedup_error_ci=ends,
        )  # fmt: skip
        return Point(k=3, batch_size=1, draft="a", status="ok", prediction=prediction)

    within = [point(-0.06, [-0.15, 0.03]), point(0.01, [0.005, 0.02]), point(-0.06, None)]
    assert predictions_off(within) == []
    (notice,) = predictions_off([*within, point(-0.06, [-0.08, -0.03])])
    assert "k = 3 with a, batch size 1 is 6.0 % too low" in notice.message


def test_the_share_that_is_told_is_that_of_the_time_that_is_told() -> None:
    """Other work begins half-way: the process waits for 30 % of the second half."""
    watch = MachineWatch(torch.device("cpu"))
    readings = [
        machine._Reading(
            wall=float(second),
            process=0.9 * second,
            runnable=1,
            waited={7: 0.3 * max(0, second - 5)},
            throttled=0.0,
        )
        for second in range(11)
    ]
    (notice,) = watch._starved(list(pairwise(readings)), 10.0)
    assert "waited for 15 % of the time" in notice.message
    assert notice.evidence["waited_share"] == pytest.approx(0.15)
    assert notice.evidence["waited_share_of_a_half"] == pytest.approx(0.3)


def test_the_machine_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sign has its warning, and a calm machine none."""

    def told(seconds: int = 10, *, idles: bool = False, **changes: Any) -> list[str]:
        """Seconds in readings a second apart, which gain `changes` (totals) or have them."""
        watch = MachineWatch(torch.device("cpu"), idles=idles)
        calm = {"process": 0.98, "waited": 0.001, "throttled": 0.0}
        for second in range(seconds + 1):
            totals = {name: changes.get(name, step) * second for name, step in calm.items()}
            states = {n: changes[n] for n in ("slowed", "on_gpu") if n in changes}
            # A second thread waits less than the first, which is the one that counts.
            waited = {7: totals.pop("waited"), 8: 0.001 * second}
            reading = machine._Reading(
                **{"wall": float(second), "runnable": changes.get("runnable", 1)},
                **{"waited": waited, **totals, **states},
            )
            monkeypatch.setattr(MachineWatch, "_read", lambda _, reading=reading: reading)
            monkeypatch.setattr(machine.time, "perf_counter", lambda second=second: float(second))
            watch.look() if second else watch.begin()
        found = watch.notices()
        remedies = ("no other program runs", "lift the limit", "raise its", "cool it", "end them")
        assert all(any(remedy in one.message for remedy in remedies) for one in found)
        return [one.code for one in found]

    assert told() == []
    assert told(waited=0.3) == told(process=0.6) == ["cpu_starved"]
    assert told(process=0.1, idles=True) == [], "it sleeps until requests are due"
    assert told(waited=0.3, idles=True) == ["cpu_starved"]
    assert told(throttled=0.2) == ["cpu_throttled"]
    assert told(runnable=999) == ["cpu_load"]
    assert told(slowed=0x8) == ["gpu_throttled"] and told(slowed=0x4) == []
    assert told(on_gpu=3) == ["gpu_shared"] and told(on_gpu=1) == []
    assert told(1, on_gpu=3, slowed=0x8, waited=0.3) == ["gpu_throttled", "gpu_shared"]
    assert told(1, waited=0.5) == told(2, waited=0.45) == ["cpu_starved"]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert told(process=0.6) == told(1, waited=0.5) == [], "ranks wait for each other"
