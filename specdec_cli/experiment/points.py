"""Computes points from samples: metrics, intervals and predictions.

Everything is computed from the records of a run folder, so that interrupted, sharded and merged
sweeps give the same points as one uninterrupted sweep.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from specdec_cli.core.figures import (
    STAGES,
    Acceptance,
    Metrics,
    Spread,
    mean_parts,
    metrics_of,
)
from specdec_cli.errors import ExitCode
from specdec_cli.experiment.folders.records import BreakEven, CategoryMetrics, Key, Point, Sample
from specdec_cli.experiment.folders.samples import Samples, why_none, without_errors
from specdec_cli.experiment.forecasts import (
    ExpectedRounds,
    Forecasts,
    break_even,
    iid_alpha,
    prediction_of,
)
from specdec_cli.experiment.served import acceptance_in, engine_fields, served_metrics
from specdec_cli.experiment.statistics import stats
from specdec_cli.experiment.statistics.stats import SumRatio, measured_speed, speedup

# A round at k costs at least as much as one at k = 0, so no speed-up exceeds the tokens per round.
# If a speed-up exceeds them by more than this factor, which allows for noise, its times are wrong.
_BEYOND = 1.05
DISTURBED_BEYOND = "the times were disturbed so much that no speculation could explain the ratios"


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why a point has no metrics.

    status: the status of the point.
    reason: the reason, as a message.
    code: the command's exit code if every point failed in this way.
    """

    status: Literal["failed", "oom", "skipped"]
    reason: str
    code: int = ExitCode.RUN_FAILED


def arm_points(
    samples: Mapping[Key, Samples],
    keys: Sequence[Key],
    failures: Mapping[Key, Failure],
    forecasts: Forecasts,
    seed: int,
) -> list[Point]:
    """Compute the points of one arm (one draft or other proposer) at one batch size, in the order
    of `keys`, which begins with k = 0.

    samples: the samples by point and prompt index.
    failures: the failures of points without metrics.
    """

    def usable(k: int) -> Samples:
        key = next((key for key in keys if key.k == k and key not in failures), None)
        return without_errors(samples.get(key, {})) if key is not None else {}

    baseline, alpha = usable(0), iid_alpha(usable(forecasts.largest_k).values())
    points = []
    for key in keys:
        own = {} if key in failures else samples.get(key, {})
        point = Point(
            **key.as_dict(),
            request_rate=None,
            predicted_speedup=None,
            **measured(key, own, baseline, failures.get(key), seed),
        )
        found = prediction_of(point, forecasts, alpha, without_errors(own), baseline, seed)
        predicted: dict[str, Any] = {"prediction": found}
        predicted["predicted_speedup"] = found.speedup if found else None
        if point.metrics is None:
            predicted["break_even"] = forecasts.break_even(key.k, seed)
        points.append(point.model_copy(update=predicted))
    return points


def measured(
    key: Key, samples: Samples, baseline: Samples, failure: Failure | None, seed: int
) -> dict[str, Any]:
    """Compute the measured fields of a `Point`.

    samples: the point's samples.
    baseline: samples of the same prompts at k = 0.
    failure: why the point has no metrics; None if it was measured.
    """
    usable = without_errors(samples)
    if failure is None and not usable:
        failure = Failure("failed", why_none(samples))
    if failure is not None:
        names = ("metrics", "speedup", "speedup_ci", "mean_acceptance_length_ci", "break_even")
        nothing: dict[str, Any] = dict.fromkeys(names)
        return nothing | {
            "status": failure.status,
            "per_category": {},
            "reason": failure.reason,
            **engine_fields(samples.values()),
        }
    metrics = point_metrics(list(samples.values()), key)
    gain = _gain(speedup(usable, baseline), key.k, seed, most_speedup(usable))
    is_possible = "impossible_speedup" not in gain
    return {
        "status": "ok",
        "metrics": metrics,
        **engine_fields(samples.values()),
        "mean_acceptance_length_ci": _length_interval(usable, metrics, key.k, seed),
        "per_category": _per_category(usable, baseline, key.k, seed),
        **gain,
        "break_even": _break_even(usable, baseline, key.k, seed) if is_possible else None,
        **intervals_of(usable, key.k, seed, metrics),
    }


def error_of(points: Sequence[Point], code: ExitCode) -> dict[str, Any]:
    """Build the document's `error` if `code` says that no point was measured. Otherwise return an
    empty dict."""
    if code not in (ExitCode.RUN_FAILED, ExitCode.USAGE, ExitCode.ENVIRONMENT):
        return {}
    reason = next((p.reason for p in points if p.status in ("failed", "oom")), "")
    what = f"no point could be measured: {reason}".removesuffix(": ")
    hint = "every point's reason is in the result"
    return {"error": {"code": int(code), "message": what, "hint": hint}}


def point_metrics(samples: Sequence[Sample], key: Key) -> Metrics:
    """Compute the metrics of one point. Times are means over repeats.

    A round serves a whole batch, and each sample records its share of it. `num_rounds` is the sum
    of these shares, rounded.
    """
    done = [s for s in samples if s.could_run]
    if any(s.engine is not None for s in done):
        return served_metrics(done, key)
    decode = sum(s.usual_seconds for s in done)
    # The number of distinct experts that each round read, summed over rounds.
    experts = [
        s.usual_mean([count * share for count, share in zip(read, s.round_share, strict=True)])
        for s in done
        if (read := s.distinct_experts) is not None
    ]
    parts = (
        {name: s.usual_mean(each) for name, each in of.items()}
        if (of := s.ttft_parts_ms) is not None
        else None
        for s in done
    )
    return metrics_of(
        done,
        num_rounds=sum(s.usual_mean(s.round_share) for s in done),
        prefill_seconds=sum(s.usual_mean(s.seconds) for s in done) - decode,
        decode_seconds=decode,
        stage_ms={x: sum(s.usual_mean(s.stage_ms.get(x, [])) for s in done) for x in STAGES},
        distinct_experts=sum(experts) if experts and len(experts) == len(done) else None,
        k=key.k,
        batch_size=key.batch_size,
        num_output_tokens=sum(s.num_output_tokens for s in done),
        ttft_ms=Spread.of([s.usual_mean(s.ttft_ms) for s in done]),
        tpot_ms=Spread.of([s.usual_mean(s.tpot_ms) for s in done if s.tpot_ms]),
        peak_memory_bytes=max((s.peak_memory_bytes for s in done), default=None),
        **mean_parts(parts),
    )


def _per_category(
    samples: Samples, baseline: Samples, k: int, seed: int
) -> dict[str, CategoryMetrics]:
    rows: dict[str, CategoryMetrics] = {}
    for category in sorted({c for s in samples.values() if (c := s.category) is not None}):
        own = {i: s for i, s in samples.items() if s.category == category}
        acceptance = acceptance_in(list(own.values()), k, is_part=len(own) < len(samples))
        rows[category] = CategoryMetrics(
            num_prompts=len(own),
            num_output_tokens=sum(s.num_output_tokens for s in own.values()),
            mean_acceptance_length=acceptance.mean_acceptance_length,
            draft_acceptance_rate=acceptance.draft_acceptance_rate,
            acceptance_rate_per_pos=acceptance.acceptance_rate_per_pos,
            decode_tokens_per_second=measured_speed(own.values()).value,
            **_gain(speedup(own, baseline), k, seed, most_speedup(own)),
            mean_acceptance_length_ci=_length_interval(own, acceptance, k, seed),
        )
    return rows


def _gain(faster: SumRatio | None, k: int, seed: int, most: float) -> dict[str, Any]:
    """Return the fields `speedup` and `speedup_ci` of a point; at k = 0 they are 1 by definition.

    most: the mean tokens per round. A larger speed-up is impossible and is returned as
    `impossible_speedup` instead.
    """
    if k == 0:
        return {"speedup": 1.0, "speedup_ci": [1.0, 1.0]}
    if faster is None:
        return {"speedup": None, "speedup_ci": None}
    if is_impossible(faster.value, most):
        return {"speedup": None, "speedup_ci": None, "impossible_speedup": faster.value}
    return {"speedup": faster.value, "speedup_ci": stats.interval(faster, seed)}


def is_impossible(faster: float, most: float) -> bool:
    """Return True if a speed-up exceeds `most`, the mean number of tokens per round, by more than
    noise explains; False for NaN."""
    return bool(faster > _BEYOND * most)


def most_speedup(samples: Samples) -> float:
    """Return the mean number of tokens per round over all rounds. No speed-up exceeds it."""
    rounds = sum(s.num_rounds for s in samples.values())
    return sum(s.decoded_tokens for s in samples.values()) / rounds if rounds else float("inf")


def _break_even(samples: Samples, baseline: Samples, k: int, seed: int) -> BreakEven | None:
    """Compute the acceptance at which a point is as fast as plain decoding, over the prompts that
    were measured both here and at k = 0. Return None if k is 0, if there are no such prompts, or
    if the ratio of costs is not finite."""
    common = sorted(samples.keys() & baseline.keys())
    if k == 0 or not common:
        return None
    own, plain = [samples[i] for i in common], [baseline[i] for i in common]
    costs = (
        stats.speed([s.usual_seconds for s in of], [s.num_rounds for s in of])
        for of in (own, plain)
    )
    cost = next(costs).over(next(costs))
    if not np.isfinite(cost.value):
        return None
    drafts = sum(s.num_drafts for s in own)
    without = sum(s.num_rounds for s in own) - drafts
    tokens = sum(sum(s.proposed_per_round) or k * s.num_drafts for s in own)
    return break_even(cost, ExpectedRounds(k, drafts, without, tokens), seed)


def _length_interval(samples: Samples, whole: Acceptance, k: int, seed: int) -> list[float] | None:
    """Compute the 95 % interval of the mean acceptance length over some of a point's prompts,
    clipped to the range from 1 to k + 1. Without proposals the length is 1 by definition, and so
    are both ends. Return None if the rounds of each prompt are unknown, or if there are too few
    prompts.

    If all prompts have equal values, `stats.interval` returns None, because equal times suggest
    that all prompts shared one batch. Acceptance is counted for each prompt separately, so here
    equal values give an interval of width 0.

    whole: the acceptance over these prompts. Its mean length may differ from the samples' by
        rounding. The interval includes it.
    """
    if whole.num_drafts == 0:
        return [1.0, 1.0]
    # Sort the prompts, because resampling depends on their order.
    own = [samples[index] for index in sorted(samples)]
    drafts = [s.num_drafts for s in own]
    mean = whole.mean_acceptance_length
    if mean is None or not sum(drafts):
        return None
    length = stats.mean_acceptance_length([s.num_accepted for s in own], drafts)
    found = stats.interval(length, seed)
    if found is None:
        return [mean, mean] if len(length.columns) >= stats.FEWEST else None
    low, high = (min(max(end, 1.0), k + 1.0) for end in found)
    return [min(low, mean), max(high, mean)]


def intervals_of(
    samples: Mapping[int, Sample], k: int, seed: int, metrics: Metrics
) -> dict[str, Any]:
    """Compute the intervals of the figures in a point's metrics.

    Intervals of acceptance rates come from the rounds of each prompt, but the rates themselves may
    come from a server's counters, which also count proposals accepted past the end of a text. Such
    a rate may lie outside its interval, which is then widened to include it.
    """
    own = [samples[index] for index in sorted(samples)]
    seconds = [s.usual_seconds for s in own]
    shares = [s.usual_mean(s.round_share) for s in own]
    verify = [s.usual_mean(s.stage_ms.get("verify", [])) for s in own]
    tokens = [s.decoded_tokens for s in own]
    speed = stats.speed(tokens, seconds)
    rounds = stats.speed(tokens, [s.num_rounds for s in own])
    marginal, conditional = [], []
    unknown: list[float | None] = [None] * k
    rates = metrics.acceptance_rate_per_pos or unknown
    given = metrics.conditional_acceptance_rate_per_pos or unknown
    for place in range(1, k + 1):
        accepted = [sum(a >= place for a in s.accepted_per_round) for s in own]
        reached = [
            sum(p >= place and a >= place - 1 for p, a in zip(*pair, strict=True))
            for pair in ((s.proposed_per_round, s.accepted_per_round) for s in own)
        ]
        drafts = [len(s.accepted_per_round) for s in own]
        marginal.append(_share_interval(accepted, drafts, rates[place - 1]))
        conditional.append(_share_interval(accepted, reached, given[place - 1]))
    return {
        "tokens_per_round_ci": [1.0, 1.0] if k == 0 else stats.interval(rounds, seed),
        "decode_tokens_per_second_ci": stats.linear_interval(speed),
        "round_ms_ci": stats.linear_interval(stats.speed([1e3 * s for s in seconds], shares)),
        "verify_ms_ci": stats.linear_interval(stats.speed(verify, shares)),
        "acceptance_rate_per_pos_ci": marginal,
        "conditional_acceptance_rate_per_pos_ci": conditional,
    }


def _share_interval(
    accepted: Sequence[float], of: Sequence[float], share: float | None
) -> list[float] | None:
    found = stats.linear_interval(stats.speed(accepted, of))
    if found is None or share is None:
        return None
    return [min(found[0], share), min(1.0, max(found[1], share))]
