"""Arrivals, windows, goodput, overload and choices at a rate: exact cases, and simulated queues."""

import importlib.util
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from specdec_cli.core.figures import Rate
from specdec_cli.core.types import Request
from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.conclusions import Best, Crossover, Summary
from specdec_cli.experiment.folders.records import Key, Point, Sample, Stretch
from specdec_cli.experiment.load.arrivals import (
    BEFORE,
    MEASURED,
    Offered,
    gaps,
    process_of,
)
from specdec_cli.experiment.load.goodput import (
    blocks,
    mean_interval,
    meets,
    ratio_interval,
    share_interval,
)
from specdec_cli.experiment.load.measuring import (
    Stream,
    crowding,
    in_flight,
    is_overloaded,
    stretch_of,
)
from specdec_cli.experiment.load.points import load_warnings, points_at_rate
from specdec_cli.experiment.load.recommend import best_at_rate, crossover, scored
from specdec_cli.experiment.statistics.noise import disturbances
from specdec_cli.recipe.objectives import objective
from specdec_cli.report.drawings.load import draw_load
from specdec_cli.report.findings import Finding, answer, best_by_batch_size, headline
from specdec_cli.report.folder import ReportedRun
from specdec_cli.terminal.sweep import _crossover_line
from tests.cli.sweep_helpers import due_times

POISSON = process_of("poisson")


@pytest.mark.parametrize("shape", [0.25, 1.0, 9.0])
def test_gaps_have_the_mean_and_the_spread_of_their_distribution(shape: float) -> None:
    process = POISSON if shape == 1.0 else process_of(f"gamma:{shape}")
    drawn = np.array(list(islice(gaps(process, 4.0, 7, MEASURED), 40000)))
    assert drawn.mean() == pytest.approx(0.25, rel=0.05)
    assert drawn.std() / drawn.mean() == pytest.approx(shape**-0.5, rel=0.05)
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.03
    assert drawn.mean() != 0.25, "they are not rescaled"


def test_due_times_follow_from_seed_and_rate_alone() -> None:
    one = due_times(POISSON, 4.0, 50, 3)
    assert one == due_times(POISSON, 4, 50, 3) == due_times(POISSON, 4.0, 80, 3)[:50]
    assert all(a < b for a, b in pairwise(one))
    assert one != due_times(POISSON, 4.0, 50, 4)
    scaled = np.array(due_times(POISSON, 8.0, 50, 3)) * 2
    assert not np.allclose(one, scaled), "another rate has other numbers"
    assert one[0] != next(gaps(POISSON, 4.0, 3, BEFORE))
    assert due_times(process_of("constant"), 4.0, 3, 0) == [0.25, 0.5, 0.75]
    assert due_times(POISSON, "inf", 3, 0) == [0.0] * 3


def test_due_times_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "times.txt"
    file.write_text("0.5\n0.5\n\n2.5\n")
    process = process_of(str(file))
    assert process.own_rate == 1.0
    # After its end the file begins again, a mean gap later.
    assert due_times(process, 9.0, 6, 0) == [0.5, 0.5, 2.5, 3.5, 3.5, 5.5]
    # A clock's times are waited for no longer than a mean gap.
    file.write_text("1764406421.5\n1764406422.5\n1764406425.5\n")
    assert due_times(process_of(str(file)), 9.0, 3, 0) == [2.0, 3.0, 6.0]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            "uniform",
            "expected poisson, constant, gamma:SHAPE or a file of due times, got 'uniform'",
        ),
        ("gamma:0", "the shape of gamma must be from 0.001 to 1e6, got '0'"),
        ("gamma:x", "got 'x'"),
        ("one\n", ":1: expected seconds from 0 on, got 'one'"),
        ("2.5\n\n 1\n", ":3: expected seconds from 2.5 on, got '1'"),
        ("nan\n2\n", ":1:"),
        ("1\n", "fewer than two different times"),
        ("1\n1\n", "fewer than two different times"),
    ],
)
def test_what_is_no_process(text: str, told: str, tmp_path: Path) -> None:
    name = text
    if "\n" in text:
        (tmp_path / "times").write_text(text)
        name = str(tmp_path / "times")
    with pytest.raises(ValueError, match=r".") as caught:
        process_of(name)
    assert told in str(caught.value)


def test_the_number_of_measured_requests() -> None:
    def measured(duration_s: float | None, rate: Rate = 4.0) -> int:
        return Offered((rate,), "poisson", 0, duration_s, {}).num_measured(10, 3, rate)

    assert measured(None) == measured(5.0) == 30
    assert measured(7.6) == 31
    assert measured(50.0, 1.1) == 55, "floats have 55.00000000000001"
    assert measured(1e6, "inf") == 30


def test_objectives() -> None:
    assert objective("ttft", "500ms") == 500.0 and objective("e2el", "1.5 s") == 1500.0
    for name, text, told in (
        ("ttft", "500", "did you mean 500ms?"),
        ("itl", "5ms", "expected one of ttft, tpot, e2el; got 'itl'"),
        ("ttft", "0ms", "above 0"),
        ("ttft", "xms", "above 0"),
        ("ttft", "", "with its unit"),
    ):
        with pytest.raises(ValueError, match=r".") as caught:
            objective(name, text)
        assert told in str(caught.value)
    slo = {"ttft_ms": 10.0, "tpot_ms": 2.0}
    assert meets(slo, {"ttft_ms": 10.0, "tpot_ms": 2.0})
    assert meets(slo, {"ttft_ms": 10.0, "tpot_ms": None}), "of one token"
    assert not meets(slo, {"ttft_ms": 10.0, "tpot_ms": 2.1})
    assert not meets(slo, {"ttft_ms": None, "tpot_ms": 1.0}), "without a first token"


def test_blocks_are_8_to_20_and_even() -> None:
    assert blocks(15) == []
    for count in (16, 17, 199, 1999, 10**5):
        sizes = [part.stop - part.start for part in blocks(count)]
        assert 8 <= len(sizes) <= 20 and sum(sizes) == count and max(sizes) - min(sizes) <= 1
    assert len(blocks(10**5)) == 20


def test_an_interval_by_hand() -> None:
    """Blocks of two requests: 8 means of 0 or 1. Their mean has a variance of 1/32, that of 16
    independent requests has 1/64. With one block more of the latter they give 17/512."""
    met = [bool(x) for pair in ((1, 1), (0, 0)) * 4 for x in pair]
    size = 0.25 / ((0.25 + 1 / 64) / 8)

    def ends(share: float, size: float, reach: float) -> list[float]:
        rare = reach**2 / size
        half = (rare * (share * (1 - share) + rare / 4)) ** 0.5
        return [(share + rare / 2 + sign * half) / (1 + rare) for sign in (-1, 1)]

    reach = 2.306  # Student's t of 7 + 1 degrees of freedom
    upper = ends(0.5, size, 0.92 * reach)[1]
    assert share_interval(met) == pytest.approx([ends(0.5, size, reach)[0], upper], abs=1e-3)
    # A short window may lack bad requests: as many as 6 times a quarter of its own. Its lower end
    # rarely misses, so the upper one may miss more often.
    found, upper = share_interval(met, 0.5), ends(0.5, size, (0.92 - 0.125) * reach)[1]
    assert found == pytest.approx([ends(0.5 / 2.5, size, reach)[0], upper], abs=1e-3)
    assert share_interval(met, 1.0) is not None and share_interval(met, 1.001) is None
    # Differences of pairs are wider where the blocks of either half are alike.
    means = [1.0] * 4 + [0.0] * 4
    pairs = mean_interval(means)
    assert pairs is not None and pairs[1] - pairs[0] > 2.2 * 2 * 2.365 * math.sqrt(1 / 28)
    assert mean_interval(means[:7]) is None
    # All good, or all but one: about as wide as for independent requests.
    assert share_interval([True] * 16) == pytest.approx([16 / (16 + reach**2), 1.0], abs=1e-3)
    for count in range(16, 200):  # rounding may not take the share out of its interval
        assert (share_interval([True] * count) or [])[1] == 1.0
    found = share_interval([True] * 99 + [False])
    assert (
        found is not None and abs(found[0] - ends(0.99, 100, reach)[0]) < 5e-3 and found[1] > 0.997
    )
    none = share_interval([False] * 16)
    rare = (0.92 * reach) ** 2
    assert none == pytest.approx([0.0, rare / (16 + rare)], abs=1e-3)
    assert share_interval([True] * 15) is None


def test_a_ratio_s_interval_is_paired() -> None:
    """Times that differ by request, but by the same factor, have no doubt about it."""
    one = [10.0 + i % 7 for i in range(64)]
    assert ratio_interval(one, [x / 2 for x in one]) == pytest.approx([2.0, 2.0])
    other = [x / 2 if i % 16 < 8 else x for i, x in enumerate(one)]
    low, high = ratio_interval(one, other) or (0.0, 0.0)
    assert low < sum(one) / sum(other) < high and low > 0.8
    assert ratio_interval(one[:15], other[:15]) is None and ratio_interval([], []) is None


def test_short_windows_show_too_small_a_ratio() -> None:
    one = [10.0 + i % 7 * (i % 5) for i in range(64)]
    other = [x * (0.5 if i % 3 else 0.7) for i, x in enumerate(one)]
    value, halves = sum(one) / sum(other), []
    for crowded, reach in ((0.0, 1.0), (0.5, 1.0), (0.0, 2.0)):
        low, high = ratio_interval(one, other, crowded, reach) or (0.0, 0.0)
        halves.append((math.log(value / low), math.log(high / value)))
    half = halves[0][0]
    assert halves[0] == pytest.approx((half, half))
    assert halves[1] == pytest.approx((1.1 * half, 2 * half)), "the end away from 1 is farther"
    assert halves[2] == pytest.approx((2 * half, 2 * half))
    low, high = ratio_interval(other, one, 0.5) or (0.0, 0.0)
    assert (math.log(high * value), math.log(1 / value / low)) == pytest.approx(halves[1])


@pytest.fixture(scope="module")
def proof() -> ModuleType:
    file = Path(__file__).parents[2] / "scripts" / "proofs" / "load.py"
    spec = importlib.util.spec_from_file_location("load_proof", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_interval_s_coverage_on_queues(proof: ModuleType) -> None:
    """`scripts/proofs/load.py` has the whole table."""
    rng, queue = np.random.default_rng(5), proof.SERVERS["8 in turn"]
    ((given, hits),) = proof.coverage(rng, queue, 0.3, (1000,), 250)
    assert given > 0.95 and 0.93 <= sum(hits) / 3 / given <= 0.98
    ((given, _),) = proof.coverage(rng, queue, 0.9, (60,), 100)
    assert given < 0.1, "requests wait for each other for longer than this window"


@pytest.mark.parametrize(
    ("name", "load", "slo"), [("1 in turn", 0.7, "e2el"), ("8 in turn", 0.6, "ttft")]
)
def test_windows_that_are_calm_by_chance_have_no_wrong_interval(
    proof: ModuleType, name: str, load: float, slo: str
) -> None:
    """Some windows of this length have an interval: those with few requests under way."""
    rng = np.random.default_rng(8)
    ((given, hits),) = proof.coverage(rng, proof.SERVERS[name], load, (500,), 250, slo=slo)
    assert 0.03 < given < 0.9 and 0.93 <= sum(hits) / 3 / given <= 0.98 and min(hits) / given > 0.9


SLOW_QUEUES = [pytest.param(n, marks=pytest.mark.slow) for n in ("1 in turn", "batch of 16")]


@pytest.mark.parametrize("name", ["8 in turn", "all share one", *SLOW_QUEUES])
def test_short_runs_at_a_light_load_have_intervals(proof: ModuleType, name: str) -> None:
    rng = np.random.default_rng(7)
    found = proof.coverage(rng, proof.SERVERS[name], 0.1, (30, 60, 200), 100)
    least = (0.3, 0.5, 0.95)
    assert all(given > one for (given, _), one in zip(found, least, strict=True))


def test_crowding_by_hand() -> None:
    """The number under way is 20 on average, and requests' times depend on it up to a share."""
    number = [20 + round(10 * math.sin(math.tau * i / 100)) for i in range(400)]

    def found(share: float) -> float:
        took = [share * n + (1 - share) * (7 * i % 13) for i, n in enumerate(number)]
        return crowding([took], number)

    assert found(1.0) == pytest.approx(20 * 210 / 400), "11 windows of this length are needed"
    assert found(0.0) == pytest.approx(20 * 10 / 400, abs=0.05) and found(0.0) < found(0.4) < 10.0
    # The latencies that follow the number most closely count.
    flat = [1.0] * 400
    assert crowding([flat, number], number) == pytest.approx(crowding([number], number))
    assert crowding([flat], number) == crowding([], number) == pytest.approx(0.5)
    falling = [-1.0 * n for n in number]
    assert crowding([falling], number) == pytest.approx(0.5), "few under way, and slow: no queue"
    # A request without a latency is left out.
    some = [None if i % 3 else float(n) for i, n in enumerate(number)]
    assert crowding([some], number) == pytest.approx(20 * 210 / 400)
    assert crowding([[None] * 400], number) == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("load", "count", "least", "most"),
    [(0.5, 60, 0.0, 0.05), (0.8, 200, 0.0, 0.05), (1.5, 200, 0.98, 1.0), (3.0, 60, 0.98, 1.0)],
)
def test_overload_on_queues(
    proof: ModuleType, load: float, count: int, least: float, most: float
) -> None:
    rng = np.random.default_rng(6)
    assert least <= proof.overloaded(rng, load, 4, count, 100) <= most


@pytest.mark.parametrize("count", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_near_saturation_no_k_is_faster_by_chance(proof: ModuleType, count: int) -> None:
    rng, queue = np.random.default_rng(9), proof.SERVERS["1 in turn"]
    ((known, given, _, faster),) = proof.speedups(rng, queue, 0.9, 1.0, (count,), 300)
    assert known > 150 and given < 0.05 * known and faster <= 0.03 * known
    ((known, given, held, _),) = proof.speedups(rng, queue, 0.3, 1.5, (200,), 200)
    assert given > 0.9 * known and held >= 0.92 * given


def test_requests_under_way() -> None:
    due, done = [0.0, 1.0, 2.0], [1.5, math.inf, 2.0]
    assert in_flight(due, done, [0.0, 1.0, 1.5, 2.0, 9.0]) == [1, 2, 1, 1, 1]


def test_overload_needs_growth_and_lateness() -> None:
    growing = list(range(0, 60))
    assert is_overloaded(growing, 20)
    assert not is_overloaded(growing, 58), "answers keep up"
    assert not is_overloaded([30] * 60, 20), "nothing grows"
    assert not is_overloaded(growing[:15], 2), "too few"
    crowd = [100 + one for one in growing]
    assert is_overloaded(crowd, 20) and not is_overloaded(crowd, 35), "25 behind may be chance"
    risen = [*range(20), *[40] * 20, *range(40, 20, -1)]
    assert not is_overloaded(risen, 20), "it falls again"
    slow = [place // 20 for place in range(1000)]
    assert is_overloaded(slow, 940) and not is_overloaded(slow, 955), "less than 5 % behind"


def test_a_window() -> None:
    key = Key("d", 0, 2, request_rate=1.0)
    due = {0: 10.0, 1: 11.0, 2: 12.0, 6: 9.0, 3: 13.5, 4: 20.0}
    done = {0: 10.5, 1: 15.0, 2: 13.0, 6: 10.2, 3: 14.0}
    found = stretch_of(key, 3, due, done)
    assert found.window_seconds == pytest.approx(3.0), "two gaps, and a mean one"
    assert found.num_answered == 3, "between 10 and 13, the one before too"
    assert found.num_unmeasured == 2, "the last was never sent"
    assert found.max_in_flight == 2 and not found.overloaded
    at_once = stretch_of(Key("d", 0, 2, request_rate="inf"), 2, {0: 1.0, 1: 1.0}, {0: 3.0, 1: 5.0})
    assert at_once.window_seconds == 4.0 and at_once.num_answered == 2


def stream(count: int = 20, rate: Any = 10.0, seed: int = 1) -> Stream:
    return Stream([Request(5, (1,)), Request(7, (2,))], POISSON, rate, count, seed)


def test_a_stream_warms_up_until_those_of_the_first_answer_are_answered() -> None:
    one = stream()
    before = [request.index for request in islice(one, 6)]
    assert before == [40, 41, 42, 43, 44, 45], "nothing is answered"
    one.answered(42)
    more = [request.index for request in islice(one, 2)]
    for index in before[:-1]:
        one.answered(index)
    first = next(iter(one))
    assert more == [46, 47] and first.index == 0
    # The measured due times are those of every stream, from where it begins.
    rest = list(islice(one, 19))
    dues = [r.arrives_at - one.due[47] for r in (first, *rest)]
    assert dues == pytest.approx(due_times(POISSON, 10.0, 20, 1))
    assert [r.token_ids for r in (first, *rest)] == [(1,), (2,)] * 10, "prompts in turn"


def test_a_stream_goes_on_until_the_measured_are_answered() -> None:
    one, seen = stream(10), []
    for request in one:
        seen.append(request.index)
        one.answered(request.index)
    assert seen == [20, *range(10)] and one.is_over
    late = stream(10)
    indices = [request.index for request in islice(late, 35)]
    assert indices == list(range(20, 55)), "nothing is answered, so that the queue is not full"
    late.answered(22)
    indices = [request.index for request in late]
    assert indices == list(range(20)), "as many before and after at most, from the first answer on"
    late = stream(10)
    for place, request in enumerate(islice(late, 10)):
        if place == 4:
            late.answered(request.index)
    assert next(iter(late)).index == 0, "as many before at most"
    assert [r.index for r in stream(10, "inf")] == list(range(10)), "nothing but the measured"


def sample(k: int, number: int, e2el: float, *, due: float = 0.0, ok: bool = True) -> Sample:
    names = ("token_ids", "accepted_per_round", "proposed_per_round", "tpot_ms")
    empty: dict[str, Any] = {name: [] for name in names}
    times = [e2el] if ok else []
    return Sample(
        draft="d", k=k, batch_size=0, request_rate=4.0, request=number, index=number % 3,
        category=None, prompt_token_ids=[1], **empty, finish_reason="length" if ok else "error",
        error=None if ok else "lost", seconds=[0.1], decode_seconds=[0.1], round_share=[1.0],
        rounds_without_proposal=0, num_preemptions=0, stage_ms={}, ttft_ms=times, e2el_ms=times,
        peak_memory_bytes=0, due=due,
    )  # fmt: skip


def stretch(k: int, crowding: float = 0.0, *, overloaded: bool = False) -> Stretch:
    return Stretch(
        **Key("d", 0, k, request_rate=4.0).as_dict(), window_seconds=40.0, num_requests=160,
        num_answered=100 if overloaded else 120, num_unmeasured=7, max_in_flight=9,
        overloaded=overloaded, crowding=crowding,
    )  # fmt: skip


def points_of(
    times: dict[int, Callable[[int], float]],
    slo: dict[str, float],
    *,
    overloaded: tuple[int, ...] = (),
    failed: tuple[int, ...] = (),
    crowded: Mapping[int, float] = MappingProxyType({}),
    lag: float | None = None,
) -> tuple[list[Point], dict[Key, dict[int, Sample]]]:
    offered = Offered((4.0,), "poisson", 0, None, slo)
    samples, stretches = {}, {}
    for k, of in times.items():
        key = Key("d", 0, k, request_rate=4.0)
        found = (sample(k, i, of(i), ok=i not in failed) for i in range(160))
        samples[key] = {one.place: one.model_copy(update={"send_lag_ms": lag}) for one in found}
        stretches[key] = {0: stretch(k, crowded.get(k, 0.0), overloaded=k in overloaded)}
    return points_at_rate(offered, samples, stretches, list(samples), {}), samples


def wave(level: float) -> Callable[[int], float]:
    """Times that differ by request, in the same way at every k."""
    return lambda i: level * (1.0 + 0.2 * math.sin(0.7 * i) + 0.02 * ((i * 7919) % 13))


def test_points_at_a_rate() -> None:
    found, _ = points_of({0: wave(100.0), 2: wave(50.0)}, {"e2el_ms": 110.0}, failed=(3, 4))
    plain, fast = found
    assert plain.load is not None and fast.load is not None
    assert fast.speedup == pytest.approx(2.0) and fast.speedup_ci == pytest.approx([2.0, 2.0])
    good = sum(wave(100.0)(i) <= 110.0 for i in range(160) if i not in (3, 4))
    assert plain.load.slo_attainment == pytest.approx(good / 160), "failed ones count"
    assert plain.load.offered_rate == 4.0 and plain.load.achieved_rate == 3.0
    assert plain.load.goodput == pytest.approx(good / 40)
    assert plain.load.goodput_ci is not None and plain.load.slo_attainment_ci is not None
    assert plain.load.goodput_ci[0] == pytest.approx(4 * plain.load.slo_attainment_ci[0])
    assert (plain.load.num_failed, plain.load.num_unmeasured) == (2, 7)
    assert plain.as_dict()["batch_size"] is None and plain.as_dict()["request_rate"] == 4.0


def test_a_window_that_is_short_against_its_queue_has_no_interval() -> None:
    found, _ = points_of({0: wave(100.0), 2: wave(100.0)}, {"e2el_ms": 110.0}, crowded={2: 2.7})
    plain, crowded = (one.load for one in found)
    assert plain is not None and crowded is not None
    assert crowded.goodput == plain.goodput and plain.goodput_ci is not None
    assert crowded.goodput_ci is None and crowded.slo_attainment_ci is None
    assert crowded.crowding == 2.7 and found[1].speedup_ci is None
    (told,) = load_warnings(found)
    assert told.code == "autocorrelated" and "k = 2" in told.message
    assert told.message.endswith("raise --duration to 432 or more"), "4 x 2.7 x 40 s"
    assert told.evidence["draft"] == "d"
    (told,) = load_warnings(points_of({0: wave(100.0)}, {}, overloaded=(0,))[0])
    assert told.code == "overloaded" and told.evidence["draft"] is None
    wider, _ = points_of({0: wave(100.0), 1: wave(100.0)}, {"e2el_ms": 110.0}, crowded={1: 0.5})
    ends = [one.load.slo_attainment_ci for one in wider if one.load is not None]
    assert ends[0] is not None and ends[1] is not None
    assert ends[1][0] < ends[0][0] / 2 and ends[0][0] < ends[1][1] < ends[0][1]


def test_requests_sent_late_count_as_a_disturbance_at_their_rate_if_they_can_hide_a_gain() -> None:
    """The mean gap is 250 ms, and the mean latency 100 ms."""
    for lag, is_told, counts in [(2.0, False, False), (20.0, True, True), (60.0, True, True)]:
        (told, *_), _ = points_of({0: wave(100.0)}, {}, lag=lag)
        found = load_warnings([told])
        assert [one.code for one in found] == ["client_late"] * is_told
        assert bool(disturbances(found)) is counts is bool(disturbances(found, rate=4.0))
        assert disturbances(found, rate=8.0) == []
    (slow,), _ = points_of({0: wave(1000.0)}, {}, lag=20.0)
    (told,) = load_warnings([slow])
    assert told.evidence["share_of_latency"] == pytest.approx(0.02, rel=0.2)
    assert disturbances([told]) == [], "2 % of the latency hide no gain"
    points, samples = points_of({0: wave(100.0), 2: wave(50.0)}, {}, lag=20.0)
    late = disturbances(load_warnings(points), rate=4.0)
    assert best_at_rate(points, samples, late).verdict == "inconclusive"


def test_an_overloaded_point_has_no_latency() -> None:
    found, _ = points_of({0: wave(100.0), 2: wave(50.0)}, {"e2el_ms": 110.0}, overloaded=(0,))
    plain, fast = found
    assert plain.metrics is not None and plain.load is not None and fast.load is not None
    assert plain.speedup is None and fast.speedup is None, "there is nothing to compare with"
    for spread in (plain.metrics.ttft_ms, plain.metrics.tpot_ms, plain.metrics.e2el_ms):
        assert spread is not None and spread.mean is None
    assert plain.load.goodput is None and plain.load.achieved_rate == 2.5
    assert fast.load.goodput is not None


@pytest.mark.parametrize(
    ("levels", "slo", "overloaded", "k", "tied", "by"),
    [
        ((100, 70, 50), {}, (), 4, [4], "latency"),
        ((100, 50, 50), {}, (), 2, [2, 4], "latency"),
        ((100, 100, 100), {}, (), 0, [0, 2, 4], "latency"),
        ((100, 140, 160), {}, (), 0, [0], "latency"),
        # Goodput decides, and k = 2 and 4 have all of it: the faster one is better.
        ((100, 70, 50), {"e2el_ms": 104.0}, (), 4, [4], "goodput"),
        ((100, 100, 100), {"e2el_ms": 1e6}, (), 0, [0, 2, 4], "goodput"),
        # The fastest is overloaded, and so never wins.
        ((100, 70, 50), {}, (4,), 2, [2], "latency"),
        ((100, 70, 50), {}, (0, 4), 2, [2], "latency"),
        ((100, 70, 50), {"e2el_ms": 104.0}, (0, 2, 4), None, [], "goodput"),
    ],
)
def test_the_best_at_a_rate(
    levels: tuple[int, ...],
    slo: dict[str, float],
    overloaded: tuple[int, ...],
    k: int | None,
    tied: list[int],
    by: str,
) -> None:
    times = {k: wave(float(level)) for k, level in zip((0, 2, 4), levels, strict=True)}
    found = best_at_rate(*points_of(times, slo, overloaded=overloaded))
    assert (found.k, found.tied, found.by) == (k, tied, by), found.reason
    assert (found.draft is None) == (not k)
    if k is None:
        assert "overloaded" in found.reason and "2.5" in found.reason


def test_without_k_0_nothing_is_recommended() -> None:
    found = best_at_rate(*points_of({2: wave(100.0), 4: wave(50.0)}, {}))
    assert (found.k, found.tied, found.verdict, found.significant) == (
        4,
        [4],
        "inconclusive",
        False,
    )
    assert "no k = 0 to compare with" in found.reason
    assert crossover({4.0: found}) == Crossover(below=None, above=None)
    times = {0: wave(100.0), 2: wave(70.0), 4: wave(50.0)}
    found = best_at_rate(*points_of(times, {}, overloaded=(0,)))
    assert (found.k, found.verdict, found.significant) == (4, "use", True)
    assert "since k = 0 cannot keep up" in found.reason
    assert crossover({4.0: found}) == Crossover(below=4.0, above=None)
    points, samples = points_of(times, {}, overloaded=(0,))
    assert points[0].load is not None
    alike = points[0].load.model_copy(update={"achieved_rate": 3.0 / 1.09})
    points[0] = points[0].model_copy(update={"load": alike})
    found = best_at_rate(points, samples)
    assert (found.verdict, found.significant) == ("inconclusive", False)
    assert "k = 0 is overloaded, but answers about as many requests" in found.reason


def test_what_a_short_or_disturbed_window_shows() -> None:
    times = {0: wave(100.0), 2: unlike(95.0, 1, 0.01), 4: wave(101.0)}
    for crowded, verdict in ((0.0, "use"), (9.0, "use"), (90.0, "inconclusive")):
        points, samples = points_of(times, {}, crowded={0: crowded})
        found = best_at_rate(points, samples)
        assert found.verdict == verdict, found.reason
        assert (points[1].speedup_ci is None) == (crowded > 1)
    assert "the queue lasts too long for this window: raise --duration" in found.reason
    calm = {0: wave(100.0), 2: wave(101.0)}
    verdicts = [best_at_rate(*points_of(calm, {}, crowded={0: x})).verdict for x in (0.9, 1.1)]
    assert verdicts == ["none", "inconclusive"], "a calm window may lack the crowds"
    noisy = best_at_rate(*points_of(times, {}), [Notice("cpu_load", "…")])
    assert (noisy.verdict, noisy.significant) == ("inconclusive", False)
    assert "times were disturbed (cpu_load), so a gain is not shown or ruled out" in noisy.reason


def test_the_best_of_several_k_at_a_rate_has_to_be_better_than_one_alone() -> None:
    times = {k: unlike(100.0 if k != 2 else 95.0, k + 3, 0.25) for k in range(9)}
    few = best_at_rate(*points_of({k: times[k] for k in (0, 2)}, {}))
    many = best_at_rate(*points_of(times, {}))
    assert (few.k, few.verdict) == (2, "use"), few.reason
    assert many.verdict == "inconclusive", many.reason


def unlike(level: float, place: int, size: float) -> Callable[[int], float]:
    """Times of requests that differ at random, and so from one k to the next."""
    rng = np.random.default_rng(place)
    times = level * np.exp(size * rng.standard_normal(160))
    return lambda i: float(times[i])


@pytest.mark.parametrize(
    ("levels", "size", "objective", "verdict"),
    [
        ((100, 95, 102), 1.5, {}, "inconclusive"),
        ((100, 95, 102), 1.5, {"e2el_ms": 100.0}, "inconclusive"),
        ((100, 101, 102), 0.01, {}, "none"),
        # Every request is as fast, and their time says nothing; nearly all meet the objective.
        ((100, 101, 102), 0.01, {"e2el_ms": 1e3}, "none"),
        # Latency rules out a gain, goodput does not: a half is met at every k, in turn.
        ((100, 100, 100), 0.01, {"e2el_ms": 100.0}, "inconclusive"),
        ((100, 95, 160), 0.01, {}, "use"),
    ],
)
def test_noise_shows_nothing(
    levels: tuple[int, ...], size: float, objective: dict[str, float], verdict: str
) -> None:
    times = {2 * i: unlike(float(level), i, size) for i, level in enumerate(levels)}
    found = best_at_rate(*points_of(times, objective))
    assert found.verdict == verdict, found.reason
    assert (found.significant, bool(found.k)) == (verdict == "use",) * 2
    assert found.needed is None
    counts = crossover({4.0: found})
    assert (counts.below, counts.above).count(None) == (2 if verdict == "inconclusive" else 1)
    assert found.reason.endswith("so a gain is not shown or ruled out") == (
        verdict == "inconclusive"
    )
    assert found.reason.startswith("no speculation") == (verdict == "none")


def test_plain_decoding_alone_shows_nothing() -> None:
    """Neither do points that failed; overloaded ones show that they cannot keep up."""
    alone = best_at_rate(*points_of({0: wave(100.0)}, {}))
    assert (alone.k, alone.verdict) == (0, "inconclusive")
    assert "no k but k = 0 was measured" in alone.reason
    points, samples = points_of({0: wave(100.0), 2: wave(50.0)}, {})
    lost = points[1].model_copy(update={"status": "failed", "load": None, "metrics": None})
    assert best_at_rate([points[0], lost], samples).verdict == "inconclusive"
    found = best_at_rate(*points_of({0: wave(100.0), 2: wave(50.0)}, {}, overloaded=(2,)))
    assert (found.k, found.verdict) == (0, "none")


def test_what_is_recommended_is_better_than_plain_decoding() -> None:
    """k = 4 meets the objective more often than k = 0, but takes longer than k = 2, which is
    neither better nor faster than k = 0."""
    points, samples = points_of({0: wave(100.0), 2: wave(100.0), 4: wave(110.0)}, {"tpot_ms": 20.0})
    # The blocks of an interval have 20 requests each. At k = 2 every other one has 8 slow requests.
    slow = {
        0: {*range(0, 160, 4)},
        2: {i for i in range(160) if i % 40 < 8},
        4: {*range(0, 160, 8)},
    }
    for key, of in samples.items():
        for i, one in of.items():
            of[i] = one.model_copy(update={"tpot_ms": [30.0 if i in slow[key.k] else 10.0]})
    by_k = {one.point.k: one for one in scored(points, samples)}
    assert by_k[4].is_better(by_k[0]) and by_k[2].is_faster(by_k[4])
    assert not by_k[4].is_better(by_k[2])
    assert not by_k[2].is_better(by_k[0]) and not by_k[2].is_faster(by_k[0])
    found = best_at_rate(points, samples)
    assert (found.k, found.verdict, found.significant) == (0, "inconclusive", False), found.reason
    assert found.tied == [0, 2]


@pytest.mark.parametrize(("level", "k"), [(100.0, 2), (97.0, 0)])
def test_a_tied_k_that_pays_is_recommended(level: float, k: int) -> None:
    """k = 4 is the fastest, but varies so much that it pushes out neither k = 2 nor k = 0."""
    times = {
        0: wave(level),
        2: wave(97.0),
        4: lambda i: wave(93.0)(i) * (1.5 if i % 40 < 20 else 0.5),
    }
    found = best_at_rate(*points_of(times, {}))
    assert (found.k, found.tied) == (k, [0, 2, 4]), found.reason
    assert found.verdict == ("use" if k else "inconclusive")


def reported(levels: tuple[int, ...], overloaded: tuple[int, ...] = ()) -> tuple[Any, Finding]:
    """A run at one rate, and what a report finds in it."""
    times = {k: wave(float(level)) for k, level in zip((0, 2, 4), levels, strict=True)}
    points, samples = points_of(times, {}, overloaded=overloaded)
    best = {"4": best_at_rate(points, samples)}
    summary = Summary.model_construct(best_by_request_rate=best, best_by_batch_size={})
    where = Path(), False, tuple(points), {"d": "a draft"}, summary
    run = ReportedRun(*where, False, {}, "", {}, True, ())
    return run, best_by_batch_size(run)[0]


def told(levels: tuple[int, ...], overloaded: tuple[int, ...] = ()) -> list[str]:
    """A report speaks of one rate, of two, and of two with one that has no result."""
    run, found = reported(levels, overloaded)
    lists = [found] * 2, [found, found, NO_RATE]
    return [answer(run, found), *(headline(run, one) for one in lists)]


@pytest.mark.parametrize(("verdict", "panels"), [("use", 2), ("inconclusive", 1)])
def test_a_guess_is_not_drawn_as_recommended(verdict: str, panels: int) -> None:
    run, found = reported((100, 70, 50))
    best = replace(found, recorded=found.recorded.model_copy(update={"verdict": verdict}))  # type: ignore[union-attr]
    figure = Figure()
    assert draw_load(figure, run, [best])
    titles = [axis.get_title() for axis in figure.axes]
    assert titles == ["mean time of a request, ms", "recommended k"][:panels]
    assert len(figure.axes[0].lines) == 3, "a line for each k"


NO_RATE = Finding(points_of({0: wave(100.0)}, {})[0][0], None)


def test_a_report_knows_what_is_overloaded() -> None:
    one, two, three = told((100, 70, 50))
    assert one.startswith("Recommended at 4 requests/s: k = 4 with a draft, 2.00× the speed of")
    assert "at every request rate: k = 4 with a draft, 2.00× to 2.00× the speed of plain" in two
    assert "at every request rate with a result: k = 4" in three
    one, two, _ = told((100, 70, 50), overloaded=(0, 4))
    assert one == "Recommended at 4 requests/s: k = 2 with a draft."
    assert two == "Recommended at every request rate: k = 2 with a draft."
    run, crowded = reported((100, 70, 50), overloaded=(0, 4))
    _, calm = reported((100, 50, 50))
    assert headline(run, [calm, crowded]) == two, "the speed-up at one rate is not that of all"
    (one, two, three) = told((100, 70, 50), overloaded=(2, 4))
    assert one.endswith("plain decoding is fastest. Every point with proposals is overloaded.")
    assert two == "No speculation: plain decoding is fastest at every request rate."
    assert three == two.replace("rate.", "rate with a result.")
    one, *_ = told((100, 50, 50))
    assert "k = 2" in one and one.endswith("Statistically tied: k = 4.")


def test_a_rate_is_named_once_and_in_english() -> None:
    run, found = reported((100, 70, 50))
    best = found.recorded.model_copy(update={"verdict": "inconclusive"})  # type: ignore[union-attr]
    said = answer(run, replace(found, recorded=best))
    assert said == f"Inconclusive at 4 requests/s: {best.reason}." and said.count("requests/s") == 1
    at_once = found.at.model_copy(update={"request_rate": "inf"})
    said = answer(run, replace(found, at=at_once, recorded=best))
    assert said == f"Inconclusive with all requests at once: {best.reason}."


def test_crossover() -> None:
    def of(**ks: int | None) -> tuple[Any, Any]:
        best = {
            ("inf" if name == "inf" else float(name[1:])): Best(k=k, draft=None, tied=[], reason="")
            for name, k in ks.items()
        }
        found = crossover(best)  # type: ignore[arg-type]
        return found.below, found.above

    assert of(r1=3, r4=2, r16=0, inf=0) == (4.0, 16.0)
    assert of(r1=3, r4=2, r16=None) == (4.0, None), "overloaded rates say nothing"
    assert of(r1=0, r4=0, inf=5) == (None, 1.0)


@pytest.mark.parametrize(
    ("below", "above", "told"),
    [
        (4.0, 16.0, "speculation pays up to 4 requests/s, but not from 16 on"),
        (4.0, 1.0, ""),
        (None, 1.0, ""),
    ],
)
def test_a_crossover_is_told_where_the_rates_are_in_order(
    below: Rate | None, above: Rate | None, told: str
) -> None:
    assert _crossover_line(Crossover(below=below, above=above)) == told


@pytest.mark.parametrize("levels", [(50, 100, 100), (100, 100, 50)], ids=["plain", "speculating"])
def test_too_few_requests_are_no_crossover(levels: tuple[int, ...]) -> None:
    """Their verdict is inconclusive, whichever k was the fastest."""
    times = {k: wave(float(level)) for k, level in zip((0, 2, 4), levels, strict=True)}
    for failed, is_shown in ((range(8, 160), False), ((), True)):
        found = best_at_rate(*points_of(times, {}, failed=tuple(failed)))
        assert (found.verdict != "inconclusive") == is_shown
        one = crossover({4.0: found})
        assert (one.below, one.above).count(None) == (1 if is_shown else 2)
