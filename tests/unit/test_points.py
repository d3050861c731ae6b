"""Points from samples: their intervals, and the recommended point."""

import gc
import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specdec_cli.backends.native import finished
from specdec_cli.core.figures import STAGES
from specdec_cli.core.types import Sequence
from specdec_cli.errors import ExitCode, RunError
from specdec_cli.experiment.folders.conclusions import Arm, Best, Tokens
from specdec_cli.experiment.folders.records import CategoryMetrics, CurvePart, Key, Point, Sample
from specdec_cli.experiment.folders.samples import Samples, not_measured
from specdec_cli.experiment.forecasts import Forecasts, Text, iid_length
from specdec_cli.experiment.measure import MeasuringLoop, sample_of
from specdec_cli.experiment.points import Failure, arm_points, error_of, measured
from specdec_cli.experiment.statistics.noise import (
    DISTURBED,
    impossible_speeds,
    off_points,
    proposals_of_another_k,
)
from specdec_cli.experiment.statistics.stats import speedup
from specdec_cli.experiment.sweep.gains import compare_arms, measured_gains, predicted_gains
from specdec_cli.experiment.sweep.recommend import recommend
from specdec_cli.experiment.sweep.sweep_records import SweepClock
from specdec_cli.experiment.sweep.time_curve import curve_parts, curve_point, curve_unit
from specdec_cli.terminal import sweep as view
from tests.report_helpers import sample_record, sweep_points
from tests.unit.test_compare import metrics_of


def sample(index: int, rounds: list[tuple[int, int]], seconds: float, /, **changes: Any) -> Sample:
    """A sample with 12 output tokens. rounds: proposed and accepted tokens of each."""
    found = sample_record(
        index=index,
        k=max((p for p, _ in rounds), default=0),
        category="all",
        proposed_per_round=[p for p, _ in rounds],
        accepted_per_round=[a for _, a in rounds],
        rounds_without_proposal=0 if rounds else 12,
        seconds=[seconds],
        decode_seconds=[seconds],
        round_share=[(len(rounds) or 12) / 4],
    )
    return Sample(**found | changes)


def point_of(key: Key, samples: Samples, plain: Samples) -> Point:
    found = measured(key, samples, plain, None, seed=0)
    return Point(draft=key.draft, batch_size=key.batch_size, k=key.k, **found)


def points_of(samples: dict[Key, dict[int, Sample]]) -> list[Point]:
    plain = samples[Key("d", 4, 0)]
    return [point_of(key, found, plain) for key, found in samples.items()]


def test_prompts_that_share_one_batch_to_its_end_give_no_interval() -> None:
    """Their times are one observation, independent of their number."""
    samples = {
        Key("d", 4, 0): {i: sample(i, [], 1.0) for i in range(4)},
        Key("d", 4, 2): {i: sample(i, [(2, 2)] * 4, 0.5) for i in range(4)},
    }
    plain, point = points_of(samples)
    assert point.speedup == 2.0 and point.speedup_ci is None
    assert point.per_category["all"].speedup_ci is None
    assert point.mean_acceptance_length_ci == [3.0, 3.0]
    for known in (plain, plain.per_category["all"]):  # by definition
        assert (known.speedup, known.speedup_ci) == (1.0, [1.0, 1.0])
    best = recommend([plain, point], measured_gains([plain, point], samples), seed=0)
    assert (best.k, best.tied) == (2, [2])
    assert "there is no interval, because all prompts share a batch and end together" in best.reason


def test_a_fastest_point_that_does_not_pay_beyond_chance_leaves_plain_decoding() -> None:
    """Points of a sweep that was interrupted rest on other prompts than their comparison."""
    samples = {
        Key("d", 1, 0): {i: sample(i, [], 1.0) for i in range(4)},
        Key("d", 1, 2): {i: sample(i, [(2, 2)] * 4, 0.5 + i / 100) for i in range(4)},
    }
    plain, point = [point_of(key, found, samples[Key("d", 1, 0)]) for key, found in samples.items()]
    points = [plain, point.model_copy(update={"speedup": 1.1, "speedup_ci": [0.9, 1.3]})]
    best = recommend(points, measured_gains(points, samples), seed=0)
    assert (best.k, best.tied, best.verdict) == (0, [0, 2], "inconclusive")


@pytest.mark.parametrize(
    ("seconds", "status", "told"),
    [
        (0.0, "ok", "k = 0 has no round"),
        (1.0, "ok", "k = 2 has no round"),
        (0.0, "failed", "no point with proposals could be measured"),
    ],
)
def test_a_sweep_in_which_nothing_was_compared_concludes_nothing(
    seconds: float, status: str, told: str
) -> None:
    """Texts that end with their first token, or points that fail, are no reason against a k."""
    samples = {
        Key("d", 4, k): {i: sample(i, [], spent, token_ids=[7]) for i in range(4)}
        for k, spent in ((0, seconds), (2, 0.0))
    }
    plain, point = points_of(samples)
    assert plain.speedup == 1.0 and point.speedup is None
    points = [plain, point.model_copy(update={"status": status})]
    best = recommend(points, measured_gains(points, samples), seed=0)
    assert (best.k, best.tied, best.significant) == (None, [], False)
    assert best.reason.startswith("nothing was compared with k = 0: ") and told in best.reason
    alone = recommend([plain], measured_gains([plain], samples), seed=0)
    assert alone.k == 0
    missing = set(alone.as_dict()) - set(best.as_dict())
    assert missing == set()  # a script finds every key, whatever the sweep has shown


@pytest.mark.parametrize("code", list(ExitCode))
def test_a_document_without_a_measured_point_has_the_error_that_its_exit_code_is(
    code: ExitCode,
) -> None:
    (point,) = points_of({Key("d", 4, 0): {0: sample(0, [], 1.0)}})
    failed = point.model_copy(update={"status": "failed", "reason": "the reason"})
    found = error_of([failed], code)
    if code in (ExitCode.RUN_FAILED, ExitCode.USAGE, ExitCode.ENVIRONMENT):
        assert found["error"]["code"] == code and "the reason" in found["error"]["message"]
    else:
        assert not found


def test_metrics_are_means_over_the_repeats_of_prompts_that_ran() -> None:
    stages = {"draft": 60.0, "broadcast": 12.0, "verify": 120.0, "sample": 24.0, "commit": 9.0}
    assert (*stages,) == STAGES
    found = {}
    for index, memory in ((0, 9), (1, 7)):
        found[index] = sample(
            index,
            [(2, 1)] * 6,
            1.0,
            seconds=[1.5, 1.9],
            decode_seconds=[1.0, 1.4],
            round_share=[3.0, 3.0],
            stage_ms={name: [ms, 1.4 * ms] for name, ms in stages.items()},
            ttft_ms=[10.0, 30.0],
            tpot_ms=[2.0, 6.0],
            num_preemptions=2,
            peak_memory_bytes=memory,
            distinct_experts=[8.0 + index, 10.0 + index],
        )
    failed = {"finish_reason": "error", "token_ids": [], "round_share": [0.0, 0.0], "category": "x"}
    failed |= {"rounds_without_proposal": 0, "peak_memory_bytes": 99}
    found[2] = sample(2, [], 0.0, **failed)
    point = point_of(Key("d", 2, 2), found, {})
    metrics = metrics_of(point)
    assert (metrics.num_prompts, metrics.num_output_tokens) == (2, 24)
    assert (metrics.num_rounds, metrics.num_drafts, metrics.num_preemptions) == (6, 12, 4)
    # Two prompts over six rounds; each one's mean is 1.2 times its first repeat.
    for name, ms in stages.items():
        assert metrics.stage_ms(name) == pytest.approx(1.2 * 2 * ms / 6)
    assert metrics.round_ms == pytest.approx(2.4e3 / 6)
    assert metrics.prefill_seconds == pytest.approx(1.0)
    assert metrics.prefill_ms == pytest.approx(500.0)
    assert metrics.output_tokens_per_second == pytest.approx(24 / 3.4)
    assert metrics.decode_tokens_per_second == pytest.approx(24 / 2.4)
    assert (metrics.ttft_ms.mean, metrics.tpot_ms.mean) == (20.0, 4.0)
    assert metrics.peak_memory_bytes == 9, "of the prompts that ran"
    assert metrics.distinct_experts == pytest.approx(9.5), "both prompts have half of the rounds"
    assert point.per_category.keys() == {"all"}
    assert point.per_category["all"].num_output_tokens == 24
    found[1] = found[1].model_copy(update={"category": None})
    point = point_of(Key("d", 2, 2), found, {})
    assert point.per_category.keys() == {"all"}, "what has no category is in none"
    assert point.per_category["all"].num_prompts == 1


def test_an_outlying_repeat_moves_nothing() -> None:
    """The point rests on the other repeats. If two disagree, their times show which is wrong."""
    fast = {i: sample(i, [(1, 1)] * 6, 0.6 + i / 50) for i in range(3)}
    for repeats, usual in (([0.95, 1.0, 2.5], 0.975), ([2.5, 0.95], 0.95)):
        spent = {"decode_seconds": repeats, "seconds": [t + 0.1 for t in repeats]}
        spent |= {"round_share": [12.0] * len(repeats), "ttft_ms": repeats}
        plain = {i: sample(i, [], 1.0 + i / 50, seconds=[1.1 + i / 50]) for i in range(3)}
        plain[0] = sample(0, [], 0.0, **spent)
        base, point = points_of({Key("d", 4, 0): plain, Key("d", 4, 1): fast})
        assert point.speedup == pytest.approx((usual + 1.02 + 1.04) / (3 * 0.62))
        assert metrics_of(base).prefill_seconds == pytest.approx(0.3)
        assert metrics_of(base).ttft_ms.mean == pytest.approx((usual + 2) / 3)


def test_a_speedup_above_tokens_a_round_is_no_result() -> None:
    plain = {i: sample(i, [], 2.5 + i / 10) for i in range(4)}
    fast = {i: sample(i, [(1, 1)] * 6, 0.8 + i / 50) for i in range(4)}
    base, point = points_of({Key("d", 4, 0): plain, Key("d", 4, 1): fast})
    assert (point.speedup, point.speedup_ci) == (None, None)
    assert point.impossible_speedup == pytest.approx(2.65 / 0.83) and point.break_even is None
    assert point.per_category["all"].speedup is None
    (notice,) = impossible_speeds([base, point])
    assert notice.code in DISTURBED and "3.19" in notice.message and "2.00 tokens" in notice.message
    # Just what the tokens of a round allow is a result.
    fast = {i: s.model_copy(update={"decode_seconds": [1.3 + i / 20]}) for i, s in fast.items()}
    _, point = points_of({Key("d", 4, 0): plain, Key("d", 4, 1): fast})
    assert point.speedup == pytest.approx(2.65 / 1.375) and impossible_speeds([point]) == []


def test_break_even_is_where_speeds_are_equal() -> None:
    """At twice the cost of a round two tokens break even; half of all rounds have to make it up."""
    plain = {i: sample(i, [], 1.2 + i / 100) for i in range(4)}
    cost = {i: s.decode_seconds[0] / 12 for i, s in plain.items()}
    all_propose = {i: sample(i, [(3, 2)] * 4, 2 * 4 * cost[i]) for i in plain}
    base, point = points_of({Key("d", 4, 0): plain, Key("d", 4, 3): all_propose})
    found = point.break_even
    assert base.break_even is None and found is not None and not found.is_predicted
    assert found.tokens_per_round == pytest.approx(2.0)
    assert found.draft_acceptance_rate == pytest.approx(1 / 3)
    assert found.alpha is not None and iid_length(found.alpha, 3) == pytest.approx(2.0)
    assert metrics_of(point).tokens_per_round == 3.0 and point.speedup == pytest.approx(1.5)
    half = {i: sample(i, [(3, 2)] * 3, 2 * 6 * cost[i], rounds_without_proposal=3) for i in plain}
    found = points_of({Key("d", 4, 0): plain, Key("d", 4, 3): half})[1].break_even
    assert found is not None and found.draft_acceptance_rate == pytest.approx(2 / 3)
    dear = {i: sample(i, [(3, 2)] * 4, 5 * 4 * cost[i]) for i in plain}
    found = points_of({Key("d", 4, 0): plain, Key("d", 4, 3): dear})[1].break_even
    assert found is not None and (found.alpha, found.draft_acceptance_rate) == (None, None)
    text = Text(limit=12, draft_limit=99, accept=(1.0,) * 12)
    forecasts = Forecasts(1, {0: text}, {0: {0: 0.1, 1: 0.1}, 1: {0: 0.15, 1: 0.16}}, is_exact=True)
    predicted = forecasts.break_even(1, 0)
    assert predicted is not None and predicted.is_predicted
    assert predicted.tokens_per_round == pytest.approx(1.55)
    assert predicted.alpha == pytest.approx(0.55)


def test_tokens_of_prefill_are_in_no_speed() -> None:
    """Plain decoding's first token takes no round: speeds and costs are those of the other eleven.
    A text of one token has no speed, and nothing is compared with it."""
    fast = {i: sample(i, [(1, 1)] * 6, 0.6 + i / 100) for i in range(4)}
    plain = {
        i: sample(i, [], 1.1 + i / 50, round_share=[11.0], num_tokens_from_prefill=1)
        for i in range(4)
    }
    base, point = points_of({Key("d", 4, 0): plain, Key("d", 4, 1): fast})
    metrics = metrics_of(base)
    assert metrics.num_output_tokens == metrics.num_rounds_without_proposal == 48
    assert (metrics.num_rounds, metrics.num_tokens_from_prefill) == (44, 4)
    assert metrics.decode_tokens_per_second == pytest.approx(44 / 4.52)
    assert metrics.round_ms == pytest.approx(4.52e3 / 44) and metrics.tokens_per_round == 1.0
    assert point.speedup == pytest.approx(48 / 2.46 / (44 / 4.52))
    assert point.break_even is not None
    assert point.break_even.tokens_per_round == pytest.approx(2.46 / 24 / (4.52 / 44))
    assert "num_tokens_from_prefill" not in metrics_of(point).as_dict()
    nothing = {"token_ids": [5], "rounds_without_proposal": 1, "num_tokens_from_prefill": 1}
    nothing |= {"round_share": [0.0]}
    ended = {i: sample(i, [], 0.0, **nothing) for i in range(4)}
    base, point = points_of({Key("d", 4, 0): ended, Key("d", 4, 1): fast})
    assert metrics_of(base).decode_tokens_per_second == 0.0
    assert (point.speedup, point.speedup_ci, point.break_even) == (None, None, None)


def test_a_mean_length_lies_between_one_and_k_plus_one() -> None:
    samples = {
        Key("d", 4, 0): {i: sample(i, [], 1.0) for i in range(3)},
        Key("d", 4, 1): {
            0: sample(0, [(1, 0)] * 12, 1.1),
            1: sample(1, [(1, 1)] * 6, 0.5),
            2: sample(2, [(1, 1)] * 6, 0.6),
        },
    }
    _, point = points_of(samples)
    assert point.mean_acceptance_length_ci == [1.0, 2.0]  # t alone gives 0.7 to 3
    assert point.speedup is not None and point.speedup_ci is not None
    assert point.speedup_ci[0] < point.speedup < point.speedup_ci[1]
    two = {key: {i: found[i] for i in (0, 1)} for key, found in samples.items()}
    _, point = points_of(two)
    assert point.speedup is not None and point.speedup_ci is None, "too few prompts"
    assert point.mean_acceptance_length_ci is None


def test_a_length_without_proposals_is_one_in_each_category_too() -> None:
    plain = {i: sample(i, [], 1.0, category="ab"[i % 2]) for i in range(8)}
    point = point_of(Key(None, 1, 0), plain, plain)
    assert point.mean_acceptance_length_ci == [1.0, 1.0]
    assert [row.mean_acceptance_length_ci for row in point.per_category.values()] == [[1, 1]] * 2


def test_a_mean_length_lies_in_its_interval() -> None:
    """Equal prompts give an interval without width, which rounding must not move."""
    for accepted in range(1, 7):
        rounds = [(3, 1)] * accepted + [(3, 2)] * 5
        samples = {
            Key("d", 4, 0): {i: sample(i, [], 1.0) for i in range(3)},
            Key("d", 4, 3): {i: sample(i, rounds, 0.5 + i) for i in range(3)},
        }
        _, point = points_of(samples)
        assert point.mean_acceptance_length_ci is not None
        low, high = point.mean_acceptance_length_ci
        assert low <= metrics_of(point).mean_acceptance_length <= high


def test_intervals_lie_around_their_figures() -> None:
    """A figure is the geometric mean of its ends, which no rate's interval has above 1."""
    rounds = [[(3, (i + n) % 4) for n in range(5)] + [(2, i % 3)] for i in range(12)]
    samples = {
        Key("d", 4, 0): {i: sample(i, [], 1.0) for i in range(12)},
        Key("d", 4, 3): {i: sample(i, found, 0.4 + i / 50) for i, found in enumerate(rounds)},
    }
    _, point = points_of(samples)
    m = metrics_of(point)
    pairs = [
        (m.decode_tokens_per_second, point.decode_tokens_per_second_ci),
        (m.round_ms, point.round_ms_ci),
        *zip(m.acceptance_rate_per_pos, point.acceptance_rate_per_pos_ci, strict=True),
        *zip(
            m.conditional_acceptance_rate_per_pos,
            point.conditional_acceptance_rate_per_pos_ci,
            strict=True,
        ),
    ]
    for value, ends in pairs:
        assert ends is not None and math.sqrt(ends[0] * ends[1]) == pytest.approx(value)


def test_samples_that_cannot_be_are_told() -> None:
    with pytest.raises(ValueError, match="or proposed more than k"):
        sample(0, [(3, 1)], 1.0, k=2)
    last = sample(3, [(3, 1)], 1.0)
    assert not_measured(last, 4, 1) is None
    assert not_measured(last, 3, 1) == "its index is 3, of 3 prompts"
    assert not_measured(last, 4, 2) == "seconds does not have 2 values, one per repeat"


def test_points_are_compared_on_prompts_that_all_could_run() -> None:
    samples = {
        Key("d", 4, k): {i: sample(i, [(k, 1)] * 6 if k else [], 1.0 + i - k / 8) for i in range(5)}
        for k in (0, 1, 3)
    }
    failed = {"finish_reason": "error", "error": "too long", "token_ids": []}
    samples[Key("d", 4, 3)][2] = sample(2, [(3, 1)], 1.0, **failed)
    assert measured_gains(points_of(samples), samples).prompts == {0, 1, 3, 4}
    assert SweepClock(rounds=6.0, measuring=8.0).as_dict()["share_outside_rounds"] == 0.25


def test_a_category_of_three_prompts_has_an_interval() -> None:
    points = sweep_points((0, 1), (1,))
    row = next(p["per_category"]["qa"] for p in points if p["k"]) | {"speedup": 2.0}
    row["speedup_ci"] = [1.5, 2.5]
    for count, told in ((2, "2.00 (too few prompts)"), (3, "2.00 (1.50–2.50)")):
        found = CategoryMetrics.model_validate(row | {"num_prompts": count})
        assert view._speedup(found) == told


def test_the_order_of_prompts_changes_nothing() -> None:
    """Prompts end in another order at another batch size, or in a sweep of shards."""
    drawn = [sample(i, [(3, i % 4)] * (3 + i % 2), 0.4 + i / 10) for i in range(9)]
    found = []
    for order in (drawn, drawn[::-1], drawn[4:] + drawn[:4]):
        samples = {
            Key("d", 4, 0): {s.index: sample(s.index, [], 1.0) for s in order},
            Key("d", 4, 3): {s.index: s for s in order},
        }
        found.append(points_of(samples)[1])
    for interval in ("mean_acceptance_length_ci", "speedup_ci"):
        first, *others = (getattr(point, interval) for point in found)
        assert first is not None and others == [first, first]


@pytest.mark.parametrize(
    ("reason", "num_tokens", "alpha"),
    [
        pytest.param("eos", 11, 1.0, id="an-accepted-proposal-ends-it"),
        pytest.param("stop", 11, 1.0, id="so-does-one-that-completes-a-stop-string"),
        pytest.param("eos", 12, 0.9, id="the-targets-own-token-ends-it"),
        pytest.param("length", 12, 0.9, id="length"),
    ],
)
def test_what_follows_the_end_of_a_text_was_not_rejected(
    reason: str, num_tokens: int, alpha: float
) -> None:
    """Three rounds of 4 accept 4, 4 and 1; only the last round's second place may count or not."""
    rounds, tokens = [(4, 4), (4, 4), (4, 1)], [1] * num_tokens
    ended = sample(0, rounds, 0.5, finish_reason=reason, token_ids=tokens)
    samples = {Key("d", 1, 0): {0: sample(0, [], 1.0)}, Key("d", 1, 4): {0: ended}}
    text = Text(limit=12, draft_limit=99, accept=(1.0,) * num_tokens)
    forecasts = Forecasts(4, {0: text}, {}, is_exact=True)
    _, point = arm_points(samples, list(samples), {}, forecasts, seed=0)
    prediction, metrics = point.prediction, metrics_of(point)
    assert prediction is not None
    assert prediction.iid_alpha == alpha
    length = 5.0 if alpha == 1.0 else (1 - 0.9**5) / (1 - 0.9)
    assert prediction.iid_mean_acceptance_length == pytest.approx(length)
    assert prediction.iid_error == pytest.approx(length / 4.0 - 1)
    # Rates are over all drafts and proposals, as everywhere.
    assert metrics.conditional_acceptance_rate_per_pos == [1.0, 2 / 3, 1.0, 1.0]
    assert metrics.mean_acceptance_length == 4.0
    assert metrics.acceptance_rate_per_pos == [1.0, 2 / 3, 2 / 3, 2 / 3]
    assert (metrics.num_draft_tokens, metrics.draft_acceptance_rate) == (12, 0.75)
    assert metrics.acceptance_histogram == [0, 1, 0, 0, 2]


def test_a_last_round_without_proposals_cuts_no_other() -> None:
    changes = {"finish_reason": "eos", "token_ids": [1] * 4, "rounds_without_proposal": 1}
    ended = sample(0, [(2, 0), (2, 1)], 0.5, **changes)
    samples = {Key("d", 1, 0): {0: sample(0, [], 1.0)}, Key("d", 1, 2): {0: ended}}
    forecasts = Forecasts(
        2, {0: Text(limit=4, draft_limit=99, accept=(0.5,) * 4)}, {}, is_exact=True
    )
    _, point = arm_points(samples, list(samples), {}, forecasts, seed=0)
    assert point.prediction.iid_alpha == pytest.approx(1 / 3)


def test_a_prediction_is_held_against_what_was_measured() -> None:
    """Errors are positive if a prediction is too high."""
    rounds = [(1, 1)] * 4 + [(1, 0)] * 4
    samples = {Key("d", 1, 0): {0: sample(0, [], 1.2)}, Key("d", 1, 1): {0: sample(0, rounds, 1.0)}}
    overlap = (0.25,) * 4 + (0.75,) * 8
    text = Text(limit=12, draft_limit=99, accept=(1.0,) * 12, overlap=overlap)
    forecasts = Forecasts(1, {0: text}, {0: {0: 0.1}, 1: {0: 0.15}}, is_exact=False)
    plain, point = arm_points(samples, list(samples), {}, forecasts, seed=0)
    prediction = point.prediction
    assert prediction is not None and plain.prediction is not None
    # Predicted: 12 rounds of 0.1 s over 6 of 0.15 s. Measured: 1.2 s over 1 s.
    assert point.predicted_speedup == prediction.speedup == pytest.approx(4 / 3)
    assert prediction.speedup_error == pytest.approx(4 / 3 / 1.2 - 1)
    assert prediction.mean_acceptance_length == 2.0
    assert prediction.mean_acceptance_length_error == pytest.approx(2.0 / 1.5 - 1)
    assert prediction.analytic_alpha == pytest.approx(7 / 12) and not prediction.is_exact
    assert plain.prediction.speedup == 1.0 and plain.prediction.speedup_error == 0.0


def test_predictions_from_the_proposals_of_another_k_are_marked() -> None:
    rounds: dict[int, list[tuple[int, int]]] = {0: [], 1: [(1, 1)] * 6, 3: [(3, 3)] * 3}
    samples = {Key("d", 1, k): {i: sample(i, r, 9.0) for i in range(4)} for k, r in rounds.items()}
    text = Text(limit=12, draft_limit=99, ahead=((1.0,) * 3,) * 12, only_k=3)
    parts = {k: {0: 0.1, 1: 0.1} for k in rounds}
    forecasts = Forecasts(3, dict.fromkeys(range(4), text), parts, is_exact=True)
    points = arm_points(samples, list(samples), {}, forecasts, seed=0)
    told = [(p.prediction.is_exact, p.prediction.drafts_of_k) for p in points if p.prediction]
    assert told == [(True, None), (False, 3), (True, None)]
    (notice,) = proposals_of_another_k(points)
    assert notice.evidence["points"] == [{"draft": "d", "batch_size": 1, "k": 1}]
    assert {point.k for point, _ in off_points(points)} <= {3}


def test_a_forecast_has_the_same_gain_as_its_prediction_and_an_interval_around_it() -> None:
    """Prompts have their first half or two thirds accepted: two of those a round, then one."""
    accepted = [6 + 2 * (i % 2) for i in range(9)]
    texts = {
        i: Text(limit=12, draft_limit=99, accept=(1.0,) * n + (0.0,) * (12 - n))
        for i, n in enumerate(accepted)
    }
    parts = {0: {i: 0.1 for i in range(4)}, 1: {i: 0.15 for i in range(4)}}
    forecasts = Forecasts(1, texts, parts, is_exact=True)
    keys = [Key("d", 1, 0), Key("d", 1, 1)]
    skipped = dict.fromkeys(keys, Failure("skipped", "predicted, not measured"))
    point = arm_points({}, keys, skipped, forecasts, seed=0)[1]
    gain = forecasts.gain(1, texts, parts[1])
    assert gain is not None and point.prediction is not None
    assert gain.value == pytest.approx(point.predicted_speedup)
    assert gain.value == pytest.approx(108 / (5 * 9 + 4 * 8) / 1.5)
    low, high = point.prediction.speedup_ci or (0.0, 0.0)
    assert low < gain.value < high < 1.2 * low


def test_the_stages_of_the_time_curve() -> None:
    """Stages are means per round over the curve's parts; a commit counts as the method's time."""
    part: dict[str, Any] = dict(draft="d", batch_size=1, k=3, part=0)
    part |= dict(rounds=2, sequence_rounds=2, decode_seconds=0.1)
    part |= dict(draft_ms=12.0, verify_ms=40.0, sample_ms=2.0)
    first, second = (dict(part=i, broadcast_ms=3.0 + 2 * i, commit_ms=4.0 * i) for i in (0, 1))
    parts = {i: CurvePart(**part | own) for i, own in enumerate((first, second))}
    found = curve_point(Key("d", 1, 3), parts)
    assert found["draft_ms_per_step"] == (2 * 12.0 + 4.0) / 4 / 3
    assert (found["broadcast_ms"], found["commit_ms"]) == (2.0, 1.0)
    assert (found["verify_ms"], found["sample_ms"], found["round_ms"]) == (20.0, 1.0, 50.0)
    old = curve_point(Key("d", 1, 3), {0: CurvePart(**part)})
    assert old["broadcast_ms"] == 0.0 and "distinct_experts" not in old


def test_experts_of_the_time_curve() -> None:
    """The mean per round, if all parts counted them."""
    part: dict[str, Any] = dict(draft="d", batch_size=1, k=3, sequence_rounds=2, decode_seconds=0.1)
    part |= dict(draft_ms=12.0, verify_ms=40.0, sample_ms=2.0)
    first = CurvePart(**part, part=0, rounds=2, distinct_experts=40.0)
    second = CurvePart(**part, part=1, rounds=8, distinct_experts=240.0)
    assert curve_point(Key("d", 1, 3), {0: first, 1: second})["distinct_experts"] == 28.0
    older = CurvePart(**part, part=1, rounds=8)
    assert "distinct_experts" not in curve_point(Key("d", 1, 3), {0: first, 1: older})


NOISE = [0.97, 1.01, 1.0, 0.98, 1.03, 0.99, 1.02, 1.0, 0.96, 1.04]  # of prompts, in one's favour


def with_drafts(
    speeds: dict[tuple[str, int], float], noise: dict[tuple[str, int], float]
) -> tuple[list[Point], Best, dict[str, Any]]:
    """Points at batch size 1 with these speed-ups by (draft, k); the recommendation and document.

    noise: a point's factor on the variation of its prompts' times, by default 1.
    """
    drafts = list(dict.fromkeys(draft for draft, _ in speeds))
    samples: dict[Key, dict[int, Sample]] = {}
    points = []
    for draft in drafts:
        plain = {i: sample(i, [], 1.0) for i in range(len(NOISE))}
        samples[Key(draft, 1, 0)] = plain
        for (name, k), speed in speeds.items():
            if name == draft:
                # Each point rotates the noise, so that ties are not exact.
                own = NOISE[k:] + NOISE[:k]
                spread = noise.get((name, k), 1.0)
                times = [(1 + (x - 1) * spread) / speed for x in own]
                rounds = [(k, k)] * (12 // (k + 1))
                samples[Key(draft, 1, k)] = {i: sample(i, rounds, t) for i, t in enumerate(times)}
        for k in [0, *(k for name, k in speeds if name == draft)]:
            key = Key(draft, 1, k)
            points.append(point_of(key, samples[key], plain))
    gains = measured_gains(points, samples)
    best = recommend(points, gains, seed=0)
    compared = compare_arms(gains, samples, seed=0)
    document = {"best_by_batch_size": {"1": best}, "best": best, "points": points}
    return points, best, document | {"comparisons": compared}


def test_the_draft_is_the_fastest_ones_and_ties_of_others_are_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A smaller k with another draft is no gain; with the same draft it proposes less."""
    speeds = {("a", 1): 1.995, ("a", 2): 1.5, ("b", 2): 1.99, ("b", 3): 2.0, ("b", 4): 1.7}
    points, best, document = with_drafts(speeds, {})
    assert (best.k, best.draft, best.tied) == (2, "b", [2, 3])
    assert best.fastest and (best.fastest.draft, best.fastest.k) == ("b", 3)
    assert best.tied_points == [Arm(k=k, draft=d) for d, k in [("a", 1), ("b", 2), ("b", 3)]]
    reason = (
        "k = 2 with draft b at 1.99x is tied with the fastest, k = 3 with draft b at 2.00x "
        "the speed of k = 0 over 10 prompts, and proposes less"
    )
    assert best.reason == reason
    # Each draft at its fastest k against each other one, and against plain decoding.
    found = {
        (one.arm.draft, one.arm.k, one.against.draft, one.against.k): one
        for one in document["comparisons"]
    }
    assert list(found) == [("b", 3, "a", 1), ("b", 3, None, 0), ("a", 1, None, 0)]
    against_a, against_plain, _ = found.values()
    assert against_a.speed_ratio == pytest.approx(2.0 / 1.995)
    assert against_a.tied and not against_plain.tied and against_plain.num_prompts == 10
    low, high = against_plain.speed_ratio_ci or (0, 0)
    assert 1.9 < low < against_plain.speed_ratio < high < 2.1
    for place, point in enumerate(points):
        categories = {name: point.per_category["all"] for name in ("x", "y")}
        points[place] = point.model_copy(update={"per_category": categories})
    tokens = Tokens(compared=False, must_be_identical=False, identical=None, diverging=[])
    view.print_results(document | {"tokens": tokens})
    shown = capsys.readouterr().out
    assert f"{reason} (tied: k = 1 with draft a)\n" in shown  # the reason names the others
    assert "category, k = 2 with draft b" in shown
    (line,) = [
        line for line in shown.splitlines() if line.startswith("b, k = 3") and "a, k" in line
    ]
    assert line.split()[4:9] == "a, k = 1 1.00".split()
    assert line.split()[9].startswith("(0.9") and line.split()[10:] == ["tied"]


def test_a_draft_whose_gain_may_be_chance_is_not_the_choice() -> None:
    speeds = {("a", 1): 1.25, ("a", 2): 1.27, ("b", 1): 1.3}
    _, best, _ = with_drafts(speeds, {("b", 1): 24.0})
    assert (best.k, best.draft) == (1, "a")
    assert best.reason.endswith(
        "the fastest, k = 1 with draft b at 1.30x the speed of k = 0 over 10 prompts, "
        "which is not faster beyond chance"
    )


def test_no_speculation_with_several_drafts() -> None:
    _, best, _ = with_drafts({("a", 1): 0.9, ("b", 1): 1.02}, {("b", 1): 5.0})
    assert (best.k, best.draft, best.tied) == (0, None, [0, 1])
    assert best.reason.startswith("the fastest, k = 1 with draft b at 1.02x")
    assert best.verdict == "inconclusive" and best.needed and best.needed.prompts > 100
    _, slow, _ = with_drafts({("a", 1): 0.9, ("b", 1): 0.95}, {})
    assert (slow.k, slow.verdict, slow.needed) == (0, "none", None)
    assert slow.reason == "no speculation: no k is faster than k = 0 over 10 prompts"


def predicted(speeds: dict[tuple[str, int], float], spread: float, num_parts: int = 10) -> Best:
    """The recommendation for predicted points with these speed-ups by (draft, k).

    Nothing is accepted, so that speed-ups are those of rounds. spread: factor on the variation of
    rounds between the parts of the time curve.
    """
    points, forecasts = list[Point](), dict[str | None, Forecasts]()
    texts = {i: Text(limit=12, draft_limit=99, accept=(0.0,) * 12) for i in range(10)}
    for draft in dict.fromkeys(name for name, _ in speeds):
        own = {k: speed for (name, k), speed in speeds.items() if name == draft}
        parts = {0: dict.fromkeys(range(num_parts), 1.0)}
        for k, speed in own.items():
            turned = (NOISE[k:] + NOISE[:k])[:num_parts]
            parts[k] = {i: (1 + (x - 1) * spread) / speed for i, x in enumerate(turned)}
        forecasts[draft] = Forecasts(max(own), texts, parts, is_exact=True)
        keys = [Key(draft, 1, k) for k in (0, *own)]
        skipped = dict.fromkeys(keys, Failure("skipped", "predicted, not measured"))
        points += arm_points({}, keys, skipped, forecasts[draft], seed=0)
    return recommend(points, predicted_gains(points, forecasts), seed=0)


def test_predictions_pass_the_same_test_of_chance() -> None:
    speeds = {("a", 1): 1.995, ("b", 2): 1.99, ("b", 3): 2.0, ("b", 4): 1.9}
    best = predicted(speeds, 0.5)
    assert (best.k, best.draft, best.tied) == (2, "b", [2, 3])
    said = "predicted from the texts of the largest k and 10 parts of the time curve: k = 2 with"
    assert best.reason.startswith(f"{said} draft b at 1.99x is tied with the fastest")
    chance = predicted({("a", 1): 1.02, ("b", 2): 0.9}, 4.0)
    assert (chance.k, chance.draft) == (0, None)
    assert "is not faster beyond chance; about " in chance.reason
    alone = predicted({("a", 1): 2.0}, 0.0, num_parts=1)
    why = "which is weak evidence: there is no interval, because the time curve has one part"
    assert (alone.k, alone.verdict) == (1, "inconclusive") and why in alone.reason


def test_speeds_are_held_against_the_same_prompts() -> None:
    plain = {0: sample(0, [], 9.0), 1: sample(1, [], 1.0), 2: sample(2, [], 2.0)}
    found = speedup({i: sample(i, [(1, 1)] * 6, 0.5) for i in (1, 2)}, plain)
    assert found is not None and found.value == pytest.approx(3.0 / 1.0)


def test_more_prompts_cost_their_prefill_too() -> None:
    """Long prompts with short texts take most of their time before the first round."""
    plain = {i: sample(i, [], 1.0 + i / 10, seconds=[9.0] * 2) for i in range(4)}
    fast = {i: sample(i, [(1, 1)] * 6, 0.6 + i / 3, seconds=[8.0] * 2) for i in range(4)}
    samples = {Key(None, 4, 0): plain, Key("d", 4, 1): fast}
    points = points_of(samples)
    best = recommend(points, measured_gains(points, samples), seed=0)
    assert best.needed is not None and best.needed.at_least
    spent = 4 * 2 * (9.0 + 8.0) / 60
    assert best.needed.minutes == pytest.approx(best.needed.prompts / 4 * spent)


def test_a_sample_has_all_of_a_prompts_time(caplog: pytest.LogCaptureFixture) -> None:
    runs = [Sequence(4, [1, 2, 3], 1, 9, finish_reason="length") for _ in range(2)]
    for seq, share in zip(runs, (2.0, 4.0), strict=True):
        seq.prefill_seconds, seq.decode_seconds, seq.round_share = 0.5, share, share
    found = sample_of(Key("d", 1, 0), None, list(map(finished, runs)), 99, 7)
    assert (found.seconds, found.decode_seconds) == ([2.5, 4.5], [2.0, 4.0])
    assert found.round_share == [2.0, 4.0]
    assert found.max_output_tokens == 8, "the context ends before the recipe's limit"
    runs[1].tokens = [1, 2, 9]
    sample_of(Key("d", 1, 0), None, list(map(finished, runs)), 99, 7)
    assert "prompt 4 at k = 0: repeats wrote different tokens" in caplog.text


def test_repeats_that_propose_differently_are_remarked_on() -> None:
    runs = [Sequence(4, [1, 2, 3], 1, 3, finish_reason="length") for _ in range(2)]
    for proposed, accepted, remarks in (
        ((2, 2), (1, 1), []),
        ((2, 3), (1, 1), ["repeats_propose_differently"]),
        ((2, 2), (0, 1), ["repeats_propose_differently"]),
    ):
        for seq, k, count in zip(runs, proposed, accepted, strict=True):
            seq.proposed_per_round, seq.accepted_per_round = [k], [count]
        given = Key("d", 1, 2), None, list(map(finished, runs)), 2, 7
        assert sample_of(*given, must_propose_alike=True).remarks == remarks
        assert sample_of(*given).remarks == []


def test_the_parts_of_the_time_curve_are_spread_over_the_sweep() -> None:
    native = SimpleNamespace(is_native=True)
    job: Any = SimpleNamespace(
        prompts=range(100), part=lambda start, stop: (start, stop), backend=native
    )
    assert curve_parts(job, 1) == 16
    at = [curve_unit(job, 1, part) for part in range(16)]
    assert at[0] == 0 and at[-1] >= 90 and len(set(at)) == 16
    job.prompts = range(3)
    assert curve_parts(job, 1) == 1, "each part takes the place of no more than half of the units"


def test_no_garbage_is_collected_while_a_point_is_measured() -> None:
    seen = []

    class Failing:
        def run(self, *_: object) -> None:
            seen.append(gc.isenabled())
            raise RunError("the device failed")

    loop = MeasuringLoop(
        lambda _: cast(Any, Failing()), cast(Any, None), cast(Any, None), cast(Any, None)
    )
    tokenizer = SimpleNamespace(finding=lambda _: None)
    plan = SimpleNamespace(params=SimpleNamespace(stop=[]), tokenizer=tokenizer)
    job: Any = SimpleNamespace(prompts=[], token_ids=[], plan=plan)
    with pytest.raises(RunError):
        loop.run(Key("d", 1, 2), job, cast(Any, None))
    assert seen == [False] and gc.isenabled()


def test_points_take_turns_over_repeats_and_units() -> None:
    """Over as many turns as there are points, each point comes once at every place."""
    order: list[Key] = []
    loop = MeasuringLoop(
        cast(Any, None), cast(Any, None), cast(Any, None), cast(Any, None),
        guard=lambda key, _: order.append(key),
    )  # fmt: skip
    recipe = SimpleNamespace(run=SimpleNamespace(repeats=2, seed=3))
    job: Any = SimpleNamespace(plan=SimpleNamespace(recipe=recipe))
    keys = [Key("d", 1, k) for k in range(4)]
    for number in range(2):
        loop.measure(dict.fromkeys(keys, job), number)
    turns = [order[i : i + 4] for i in range(0, 16, 4)]
    assert all(set(at) == set(keys) for at in zip(*turns, strict=True))
