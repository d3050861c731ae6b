"""Warnings about outlying repeats that show more than their own disturbance."""

import json
import lzma
import math
import random
from functools import cache
from pathlib import Path

import pytest

from specdec_cli.experiment.folders.records import Key, Sample, usual_repeats
from specdec_cli.experiment.statistics.noise import noise_in
from specdec_cli.experiment.statistics.outliers import Outliers
from tests.report_helpers import sample_record

RECORDED = Path(__file__).parents[2] / "docs" / "demo-sweep" / "run" / "samples.jsonl.xz"
Samples = dict[Key, dict[int, Sample]]


@cache
def recorded() -> Samples:
    """24 prompts at nine points of a sweep on a quiet machine, as if of half as many tokens."""
    found = Samples()
    for line in lzma.decompress(RECORDED.read_bytes()).splitlines():
        sample = Sample(**json.loads(line))
        if sample.index < 24 and sample.k <= 4 and sample.draft != "demo:eagle3":
            half = {"decode_seconds": [0.5 * value for value in sample.decode_seconds]}
            half["round_share"] = [0.5 * value for value in sample.round_share]
            found.setdefault(Key.of(sample), {})[sample.index] = sample.model_copy(update=half)
    assert len(found) == 9 and all(len(of) == 24 for of in found.values())
    return found


def repeated(rng: random.Random, slices_a_second: float, longest: float) -> Samples:
    """The recorded sweep with two repeats, 3 % of noise, and slices of time from 5 ms on."""

    def taken(seconds: float) -> float:
        seconds *= rng.gauss(1, 0.03)
        expected, lost = slices_a_second * seconds, 0.0
        while rng.random() < expected / (1 + expected):
            lost += rng.uniform(0.005, longest)
        return seconds + lost

    return {
        key: {
            i: s.model_copy(
                update={
                    "decode_seconds": [taken(s.decode_seconds[0]) for _ in range(2)],
                    "round_share": s.round_share * 2,
                }
            )
            for i, s in of.items()
        }
        for key, of in recorded().items()
    }


def codes(samples: Samples) -> list[str]:
    return [one.code for one in noise_in(samples)]


def twins(seconds: list[float], prompts: int = 12, batch_size: int = 1, others: int = 2) -> Samples:
    """Prompts of about a second at k = 0 and 1; one of k = 0 took `seconds`."""
    found = Samples()
    for k in (0, 1):
        key = Key("a" if k else None, batch_size, k)
        found[key] = {}
        for i in range(prompts):
            times = [0.9 + i / 100 + place / 50 for place in range(others)]
            found[key][i] = Sample(
                **sample_record(
                    draft=key.draft,
                    k=k,
                    batch_size=batch_size,
                    index=i,
                    seconds=times,
                    decode_seconds=seconds if (k, i) == (0, 5) else times,
                    round_share=[12.0] * others,
                    ttft_ms=[1.0] * others,
                    tpot_ms=[1.0] * others,
                )
            )
    return found


def test_slices_of_a_machine_at_rest_are_no_reason_to_warn() -> None:
    rng = random.Random(1)
    sweeps = [repeated(rng, slices_a_second=1.0, longest=0.05) for _ in range(20)]
    assert sum(len(Outliers.of(sweep).found) > 0 for sweep in sweeps) >= 15, "yet quiet"
    assert sum(bool(codes(sweep)) for sweep in sweeps) <= 1


def test_slices_of_a_machine_at_work_are() -> None:
    rng = random.Random(2)
    sweeps = [repeated(rng, slices_a_second=2.0, longest=0.2) for _ in range(20)]
    assert sum("outlying_repeats" in codes(sweep) for sweep in sweeps) >= 19
    (notice,) = (n for n in noise_in(sweeps[0]) if n.code == "outlying_repeats")
    assert notice.evidence["repeats"] == 2 * 9 * 24
    told = f"{notice.evidence['outliers']} of 432 repeats do not count"
    assert told in notice.message and notice.evidence["outliers"] > 0.04 * 432


def test_one_long_disturbance_is_told_with_its_prompt() -> None:
    (notice,) = noise_in(twins([2.50, 0.95]))
    assert notice.code == "outlying_repeats" and "prompt 5 at k = 0" in notice.message
    assert "took 2.5, 0.95 s; 1 of 48 repeats do not count" in notice.message
    assert notice.evidence["lost_seconds"] == pytest.approx(1.55)
    assert notice.evidence["seconds"] == [2.50, 0.95]
    assert noise_in(twins([1.42, 0.95])) == [], "less than 1.5 times its twin"
    assert Outliers.of(twins([1.6, 0.95])).are_long
    assert not Outliers.of(twins([1.6, 0.95], prompts=60)).are_long, "0.5 % of the point's time"


@pytest.mark.parametrize(("batch_size", "told"), [(1, False), (4, True)])
def test_prompts_that_are_decoded_together_lose_as_much_each(batch_size: int, told: bool) -> None:
    """Four shares of a tenth of a second are one disturbance of 0.4 s."""
    assert Outliers.of(twins([0.2, 0.1], batch_size=batch_size)).are_long is told


@pytest.mark.parametrize(("batch_size", "told"), [(1, True), (8, False)])
def test_outliers_of_one_batch_are_one_disturbance(batch_size: int, told: bool) -> None:
    samples = twins([0.9, 0.9], prompts=16, batch_size=batch_size)
    plain = samples[Key(None, batch_size, 0)]
    for i in range(8):
        plain[i] = plain[i].model_copy(update={"decode_seconds": [0.1, 0.16]})
    outliers = Outliers.of(samples)
    assert len(outliers.found) == 8 and outliers.are_many is told


def test_many_are_more_than_chance_gives_where_2_percent_are_usual() -> None:
    """Chance may explain 21 outliers of 432 repeats; 22 have a probability below 1 in 1000."""
    samples = twins([0.9, 0.9], prompts=108)
    plain = samples[Key(None, 1, 0)]
    for i in range(22):
        assert not Outliers.of(samples).are_many, i
        plain[i] = plain[i].model_copy(update={"decode_seconds": [0.16, 0.1]})
    assert Outliers.of(samples).are_many
    tail = 1 - sum(math.comb(432, n) * 0.02**n * 0.98 ** (432 - n) for n in range(22))
    assert tail < 0.001


def test_the_fastest_repeat_is_believed_even_against_most() -> None:
    assert usual_repeats([2.5, 1.0, 2.6]) == [1]
    assert usual_repeats([1.4, 1.0, 1.6, 1.5]) == [0, 1, 3]
    assert usual_repeats([]) == [] and usual_repeats([0.0, 0.0]) == [0, 1]
