"""Verdicts: evidence that decides nothing advises nothing, and says what would decide."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec_cli.commands.status import strictly
from specdec_cli.errors import ExitCode, Notice
from specdec_cli.experiment.compare.comparison_records import ComparisonRecords
from specdec_cli.experiment.compare.verdict import summary_lines, verdict_of
from specdec_cli.experiment.compare.worker import _warnings as warnings_of_ranks
from specdec_cli.experiment.folders.conclusions import Needed
from specdec_cli.experiment.folders.records import Key, Pair, Point, Sample
from specdec_cli.experiment.points import measured
from specdec_cli.experiment.statistics import stats
from specdec_cli.experiment.statistics.evidence import needed_for, needed_in_words
from specdec_cli.experiment.statistics.evidence import verdict_of as of
from specdec_cli.experiment.sweep.document import _of_batches
from specdec_cli.experiment.sweep.gains import measured_gains
from specdec_cli.experiment.sweep.recommend import recommend, recommend_by_category
from specdec_cli.experiment.sweep.sweep_records import SweepRecords
from tests.unit.test_compare import SETTINGS, changed, sample

NOISY = [Notice("cpu_load", "5.0 processes were ready to run on 2 processors")]


@pytest.mark.parametrize(
    ("chosen", "others", "is_disturbed", "verdict"),
    [
        ([1.01, 1.2], [[1.01, 1.2]], False, "use"),
        ([1.9, 3.1], [[1.9, 3.1]], True, "inconclusive"),
        ([0.99, 1.4], [[0.99, 1.4]], False, "inconclusive"),
        (None, [[0.7, 0.9], [0.95, 1.02]], False, "none"),
        (None, [[0.7, 0.9], [0.95, 1.2]], False, "inconclusive"),
        (None, [[0.7, 0.9], None], False, "inconclusive"),
        (None, [[0.7, 0.9]], True, "inconclusive"),
        (None, [], False, "inconclusive"),
    ],
)
def test_verdicts(chosen: Any, others: Any, is_disturbed: bool, verdict: str) -> None:
    assert of(chosen, others, is_disturbed=is_disturbed) == verdict


@pytest.mark.parametrize("gain", [1.06, 1.3, 0.9])
def test_as_many_prompts_as_are_called_for_decide(gain: float) -> None:
    """12 prompts with an undecided interval decide once copies make up the required number."""
    rng = random.Random(3)
    spread = 0.9 * abs(gain - 1.01) + 0.5
    times = [rng.lognormvariate(0, spread) for _ in range(12)]
    centre = sum(times) / 12

    def ratio(count: int) -> stats.SumRatio:
        chosen = [times[i % 12] for i in range(count)]
        tokens, plain = [1.0] * count, [gain * centre] * count
        return stats.speed(tokens, chosen).over(stats.speed(tokens, plain))

    few = stats.linear_interval(ratio(12))
    assert few is not None and few[0] < 1 < few[1]
    needed = needed_for(gain, few, 12, 60.0, 1, is_disturbed=False)
    assert needed.prompts > 12 and needed.minutes == pytest.approx(needed.prompts / 12)
    ends = stats.linear_interval(ratio(needed.prompts + 12)) or [0, 9]
    assert ends[0] > 1 or ends[1] < 1.03
    decided = 0
    for _ in range(50):
        drawn = [rng.choice(times) for _ in range(needed.prompts)]
        plain = stats.speed([1.0] * len(drawn), [gain * centre] * len(drawn))
        measure = stats.speed([1.0] * len(drawn), drawn).over(plain)
        ends = stats.linear_interval(measure) or [0, 9]
        decided += ends[0] > 1 or ends[1] < 1.03
    assert 33 <= decided <= 48, "four of five"


def test_what_is_needed_in_words() -> None:
    told = needed_in_words(Needed(prompts=1834, minutes=61.2), 5, is_disturbed=False)
    real = "if the gain is what it seems"
    assert told == f"; about 1,900 prompts like these would decide, in about 62 minutes, {real}"
    again = needed_in_words(Needed(prompts=5, minutes=0.2), 5, is_disturbed=True)
    assert again == "; the same prompts again would decide, in a quiet minute"
    two = needed_for(1.4, None, 2, 0.0, 4, is_disturbed=False)
    assert (two.prompts, two.minutes) == (32, None), "fewer have no interval to speak of"


@pytest.mark.parametrize("is_disturbed", [True, False])
@pytest.mark.parametrize("count", [1, 4, 7])
def test_few_prompts_cannot_tell_how_many_would_decide(count: int, is_disturbed: bool) -> None:
    for ends in ([1.2, 1.9], [0.8, 1.6], None):
        needed = needed_for(1.4, ends, count, 60.0, 1, is_disturbed=is_disturbed)
        assert (needed.prompts, needed.at_least) == (8, True)
        assert needed.minutes == pytest.approx(8 / count)
        told = needed_in_words(needed, count, is_disturbed=is_disturbed)
        assert told.endswith("cannot show how many are enough: measure at least 8")
        assert "again" not in told
    assert not needed_for(1.4, [1.2, 1.9], 8, 60.0, 1, is_disturbed=True).at_least


def test_the_best_of_many_k_has_to_be_better_than_one_k_alone() -> None:
    """k = 2 would be called faster alone, but not as the best of 8 k that differ by chance."""
    rng, samples = random.Random(2), dict[Key, dict[int, Sample]]()
    for k in (0, *range(2, 10)):
        spread, gain = (0.2, 1.16 if k == 2 else 1.0) if k else (0.0, 1.0)
        samples[Key("d", 1, k)] = {
            i: changed(
                sample(Pair(2, 1), 1, k, i),
                decode_seconds=[rng.lognormvariate(0, spread) / gain],
                draft="d",
            )
            for i in range(20)
        }
    plain = samples[Key("d", 1, 0)]
    points = [
        Point(k=key.k, batch_size=1, draft="d", **measured(key, own, plain, None, 0))
        for key, own in samples.items()
    ]
    few, many = (recommend(of, measured_gains(of, samples), 0) for of in (points[:2], points))
    ends = points[1].speedup_ci
    assert ends is not None and ends[0] > 1.0
    assert (few.k, few.verdict) == (2, "use"), few.reason
    assert (many.k, many.verdict, many.significant) == (0, "inconclusive", False), many.reason
    assert "is not faster beyond chance as the best of 8; about" in many.reason
    assert many.needed and many.needed.prompts > 20


def with_categories(prompts: dict[str, list[float]]) -> tuple[list[Point], Any, Any]:
    """Points and samples of k = 0 and 2. prompts: seconds at k = 2, where plain takes 1 s."""
    times = [(name, spent) for name, of in prompts.items() for spent in of]
    pair = Pair(2, 1)
    samples: dict[Key, dict[int, Sample]] = {}
    points = []
    for k in (0, 2):
        key = Key("d", 1, k)
        samples[key] = {
            i: changed(
                sample(pair, 1, k, i),
                decode_seconds=[spent if k else 1.0],
                category=name,
                draft="d",
            )
            for i, (name, spent) in enumerate(times)
        }
    for key in samples:
        found = measured(key, samples[key], samples[Key("d", 1, 0)], None, 0)
        points.append(Point(k=key.k, batch_size=1, draft="d", **found))
    return points, measured_gains(points, samples), samples


def test_a_category_of_few_prompts_recommends_nothing() -> None:
    """A category follows the rule of the whole."""
    many = [0.5 + 0.01 * (i % 5) for i in range(20)]
    points, gains, samples = with_categories({"many": many, "few": [0.4, 0.5], "slow": [1.2, 1.3]})
    whole = recommend(points, gains, 0)
    assert (whole.verdict, whole.significant, whole.needed) == ("use", True, None)
    by_name = recommend_by_category(gains, samples, 0)
    assert (by_name["many"].verdict, by_name["many"].significant) == ("use", True)
    few = by_name["few"]
    assert (few.verdict, few.significant) == ("inconclusive", False)
    assert few.needed and few.needed.prompts == 8
    assert by_name["slow"].verdict == "inconclusive", "two prompts show nothing either way"
    noisy = recommend_by_category(gains, samples, 0, NOISY)
    assert {one.verdict for one in noisy.values()} == {"inconclusive"}


def test_noise_at_one_batch_size_leaves_the_others_significant() -> None:
    times = [0.5 + i / 100 for i in range(12)]
    points, _, samples = with_categories({"a": times, "b": times})
    points += [point.model_copy(update={"batch_size": 8}) for point in points]
    records = SweepRecords(
        samples=samples | {replace(k, batch_size=8): samples[k] for k in samples}
    )
    settings: Any = SimpleNamespace(batch_sizes=(1, 8), drafts=("d",), seed=0)
    drift = Notice("baseline_drift", "rounds became slower", {"batch_size": 8})
    found = _of_batches(settings, records, points, [drift])["best_by_batch_size"]
    assert (found["1"].verdict, found["8"].verdict) == ("use", "inconclusive")
    parts = [found[size].per_category["a"].verdict for size in ("1", "8")]
    assert parts == ["use", "inconclusive"]


def test_nothing_to_compare_is_inconclusive() -> None:
    points, gains, _ = with_categories({"a": [0.5, 0.6], "b": [0.5]})
    best = recommend(points, replace(gains, points=[], why_none="no prompt"), 0)
    assert (best.k, best.verdict, best.needed, best.reason) == (
        None, "inconclusive", None, "no prompt",
    )  # fmt: skip
    plain = [p for p in points if p.k == 0]
    best = recommend(plain, replace(gains, points=plain), 0)
    assert best.reason.startswith("no k but k = 0 was measured") and best.verdict == "inconclusive"


def compared(
    spread: float, *, draft: tuple[float, float] = (2.0, 5.0), verify: float = 10.0
) -> ComparisonRecords:
    """Pairs (2, 1) and (2, 2) at batch size 1; spread: of stages between prompts, unpaired."""
    records = ComparisonRecords(replace(SETTINGS, batch_sizes=(1,)), {})
    rng = random.Random(5)
    for degree, own in zip((1, 2), draft, strict=True):
        pair = Pair(2, degree)
        for index in range(10):
            for k in (0, 2):
                stages = {"verify": verify, "draft": own if k else 0.0}
                noisy = {name: ms * rng.lognormvariate(0, spread) for name, ms in stages.items()}
                records.kept.samples[SETTINGS.key(pair, 1, k)][index] = sample(
                    pair, 1, k, index, **noisy
                )
    records.update_points()
    return records


def test_a_comparison_has_a_verdict_and_its_cause() -> None:
    quiet = verdict_of(compared(0.02))["best"]
    assert (quiet.draft_tp, quiet.verdict, quiet.significant) == (1, "use", True)
    assert quiet.decided_by and quiet.decided_by.stage == "draft"
    assert "splitting the draft's weights saves less" in quiet.reason
    found = verdict_of(compared(0.02), NOISY)
    noisy = found["best"]
    assert (noisy.verdict, noisy.significant, noisy.decided_by) == ("inconclusive", False, None)
    assert "exchanges" not in noisy.reason and "times were disturbed (cpu_load)" in noisy.reason
    assert "the same prompts again would decide" in noisy.reason
    assert summary_lines(found)[0].startswith("inconclusive: target TP 2 with draft TP")
    elsewhere = Notice("baseline_drift", "rounds became slower", {"batch_size": 64})
    assert verdict_of(compared(0.02), [elsewhere])["best"] == quiet


def test_stages_that_may_differ_by_chance_are_no_cause() -> None:
    best = verdict_of(compared(0.5, draft=(10.0, 10.4)))["best"]
    assert "less than with draft TP 2" in best.reason, "the pairs are compared"
    assert best.decided_by is None and "exchanges" not in best.reason
    assert " less)" not in best.reason and " more)" not in best.reason


def test_a_stage_that_costs_more_is_no_cause() -> None:
    """The best pair saves time outside the stages, perhaps by chance; its broadcasts take longer
    beyond chance."""
    records = ComparisonRecords(replace(SETTINGS, batch_sizes=(1,)), {})
    for degree, broadcast in ((1, 0.9), (2, 0.5)):
        pair = Pair(2, degree)
        for index in range(10):
            for k in (0, 2):
                stages = {"verify": 10.0, "draft": 5.0 if k else 0.0}
                one = sample(pair, 1, k, index, **stages, broadcast=broadcast if k else 0.0)
                if k and index % 2 == degree - 1:
                    outside = 2.0 * degree * sum(one.round_share) / len(one.round_share)
                    times = [seconds + outside / 1e3 for seconds in one.decode_seconds]
                    one = changed(one, decode_seconds=times)
                records.kept.samples[SETTINGS.key(pair, 1, k)][index] = one
    records.update_points()
    best = verdict_of(records)["best"]
    assert best.draft_tp == 1 and best.decided_by is None
    assert "less than with draft TP 2 (broadcast 0.40 ms more)" in best.reason


def test_pairs_that_are_slower_than_plain_decoding_are_none() -> None:
    found = verdict_of(compared(0.02, draft=(50.0, 60.0)))
    slow = found["best"]
    assert (slow.verdict, slow.significant, slow.needed) == ("none", False, None)
    first = summary_lines(found)[0]
    said = "is the fastest pair, and slower than plain decoding at target TP 2 ("
    assert first.startswith(f"no speculation: target TP 2 with draft TP 1 {said}")


def test_warnings_of_ranks_name_their_pair_and_ranks(tmp_path: Path) -> None:
    load, gpu = NOISY[0], Notice("gpu_shared", "1 other process used the GPU", {"n": 1})
    found = [Notice.read(one) for one in warnings_of_ranks(Pair(2, 1), [[], [load], [load, gpu]])]
    assert [one.code for one in found] == ["cpu_load", "gpu_shared"]
    assert found[0].message.startswith("target TP 2, draft TP 1: 5.0 processes")
    assert found[0].evidence["ranks"] == [1, 2] and found[1].evidence["ranks"] == [2]
    assert found[1].evidence["n"] == 1


@pytest.mark.parametrize("code", ["cpu_load", "baseline_drift", "few_prompts"])
def test_strict_runs_end_partial_over_disturbed_times(code: str) -> None:
    told = [Notice(code, "…")]
    disturbed = code != "few_prompts"
    expected = ExitCode.PARTIAL if disturbed else ExitCode.OK
    assert strictly(ExitCode.OK, told, strict=True) == expected
    assert strictly(ExitCode.OK, told, strict=False) == ExitCode.OK
    assert strictly(ExitCode.LOSSLESSNESS, told, strict=True) == ExitCode.LOSSLESSNESS
