"""Computes the speed-ups of all points at one batch size over the same prompts, so that points can
be compared.

Does not depend on an engine or on the run folder.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from specdec_cli.experiment.folders.conclusions import Arm, Comparison, SpeedRatio
from specdec_cli.experiment.folders.records import Key, Point
from specdec_cli.experiment.folders.samples import (
    Samples,
    prompts_by_category,
    without_errors,
)
from specdec_cli.experiment.forecasts import Forecasts
from specdec_cli.experiment.points import DISTURBED_BEYOND
from specdec_cli.experiment.statistics.factors import Measure, interval_of, ratio_of
from specdec_cli.experiment.statistics.stats import measured_speed, speedup


@dataclass(frozen=True, slots=True)
class Gains:
    """The speed-ups of points relative to k = 0, all computed over the same prompts.

    points: the points that can be compared.
    ratios: the speed-up of each point, with the data from which its interval is computed.
    prompts: the indices of the prompts over which points are compared.
    num_parts: how many parts of the time curve the predictions use; 0 for measured speed-ups.
    seconds: how many seconds these prompts took at these points, in prefill and rounds, over all
        repeats; 0 for predicted speed-ups.
    why_none: the reason why there are no points; empty if there are some.
    """

    points: Sequence[Point] = ()
    ratios: Mapping[Key, Measure] = field(default_factory=dict)
    prompts: frozenset[int] = frozenset()
    num_parts: int = 0
    seconds: float = 0.0
    why_none: str = ""

    @property
    def is_predicted(self) -> bool:
        return self.num_parts > 0

    def of(self, point: Point) -> Measure:
        return self.ratios[Key.of(point)]

    def value(self, point: Point) -> float:
        """Return the speed-up that the point stores. It is computed over all prompts that were
        measured at both this point and k = 0, not only over those that all points share."""
        found = point.predicted_speedup if self.is_predicted else point.speedup
        return found or 0.0

    def interval(self, point: Point) -> Sequence[float] | None:
        """Return the interval of the speed-up that `value` returns; None if there is none."""
        if not self.is_predicted or point.k == 0:
            return point.speedup_ci
        return point.prediction.speedup_ci if point.prediction is not None else None


def measured_gains(points: Sequence[Point], samples: Mapping[Key, Samples]) -> Gains:
    """Compute the speed-ups of points that were measured."""
    chosen = [p for p in points if p.status == "ok" and p.speedup is not None]
    if not chosen:
        return Gains(why_none="no point could be compared with k = 0")
    if not any(p.k for p in chosen) and any(p.k for p in points):
        return Gains(why_none=f"nothing was compared with k = 0: {_why_not_compared(points)}")
    common = set.intersection(*(set(without_errors(samples[Key.of(p)])) for p in chosen))
    if not common:
        return Gains(why_none="the points have no prompt in common")
    found = {}
    for key in map(Key.of, chosen):
        plain = samples.get(key.plain, {})
        gain = speedup({i: samples[key][i] for i in common}, {i: plain[i] for i in common})
        assert gain is not None
        found[key] = gain
    spent = seconds_of(samples, chosen, common)
    return Gains(chosen, found, prompts=frozenset(common), seconds=spent)


def seconds_of(
    samples: Mapping[Key, Samples], points: Iterable[Point], prompts: Collection[int]
) -> float:
    """Return the seconds that these prompts took at these points, in prefill and rounds, with all
    repeats."""
    return sum(sum(samples[Key.of(p)][i].seconds) for p in points for i in prompts)


def _why_not_compared(points: Sequence[Point]) -> str:
    """Return the reason why no point with proposals has a speed-up."""
    if any(p.impossible_speedup is not None for p in points):
        return DISTURBED_BEYOND
    done = [p for p in points if p.status == "ok" and p.metrics is not None]
    if not any(p.k for p in done):
        return "no point with proposals could be measured"
    untimed = [p.k for p in done if p.metrics is not None and not p.metrics.decode_seconds]
    if not untimed:
        return "the points have no prompt in common"
    return (
        f"k = {min(untimed)} has no round, since each text ends with its first token "
        "(--max-new-tokens, sampling.ignore_eos) or comes from the server in one chunk"
    )


def predicted_gains(points: Sequence[Point], forecasts: Mapping[str | None, Forecasts]) -> Gains:
    """Compute the predicted speed-ups of points. forecasts: the data for predictions, by the name
    of the arm's draft."""
    chosen = [p for p in points if p.predicted_speedup is not None]
    if not chosen:
        return Gains(why_none="nothing could be predicted")
    bases = [found for found in forecasts.values() if found.texts]
    common = set.intersection(*(set(found.texts) for found in bases))
    of_arm = {
        p: forecasts[p.draft] if p.draft in forecasts else bases[0] for p in map(Key.of, chosen)
    }
    parts = set.intersection(*(basis.timed(0, key.k) for key, basis in of_arm.items()))
    found = {}
    for key, basis in of_arm.items():
        if (gain := basis.gain(key.k, common, parts)) is None:
            return Gains(why_none="the points have no prompt in common")
        found[key] = gain
    return Gains(chosen, found, prompts=frozenset(common), num_parts=len(parts))


def compare_arms(gains: Gains, samples: Mapping[Key, Samples], seed: int) -> list[Comparison]:
    """Compare every pair of arms at one batch size over the same prompts, the faster arm first.
    Each arm, including plain decoding, is represented by its fastest k."""
    fastest: dict[str | None, Point] = {}
    for point in gains.points:
        held = fastest.setdefault(point.draft, point)
        if gains.value(point) > gains.value(held):
            fastest[point.draft] = point
    arms = sorted(fastest.values(), key=gains.value, reverse=True)
    return [
        Comparison(
            batch_size=arm.batch_size,
            arm=Arm(k=arm.k, draft=arm.draft),
            against=Arm(k=other.k, draft=other.draft),
            is_predicted=gains.is_predicted,
            num_prompts=len(gains.prompts),
            **figures_of(ratio_of(gains.of(arm), gains.of(other)), seed),
            per_category=(
                {} if gains.is_predicted else _by_category(arm, other, gains.prompts, samples, seed)
            ),
        )
        for arm, other in combinations(arms, 2)
    ]


def figures_of(ratio: Measure, seed: int) -> dict[str, Any]:
    """Compute the fields of a `SpeedRatio` from a ratio of speeds."""
    return ratio_figures(ratio.value, interval_of(ratio, seed))


def ratio_figures(ratio: float, ends: list[float] | None) -> dict[str, Any]:
    """Return the fields of a `SpeedRatio`: the ratio, its interval, and whether the two speeds are
    tied, which they are if the interval contains 1. Without an interval, the last two are None."""
    return {
        "speed_ratio": ratio,
        "speed_ratio_ci": ends,
        "tied": None if ends is None else ends[0] <= 1.0 <= ends[1],
    }


def _by_category(
    arm: Point, other: Point, prompts: Iterable[int], samples: Mapping[Key, Samples], seed: int
) -> dict[str, SpeedRatio]:
    """Compare the speeds of two points over the prompts of each category. The fields of a category
    are None if either point has no valid speed-up for it."""
    ours, theirs = samples[Key.of(arm)], samples[Key.of(other)]
    found = {}
    for name, chosen in prompts_by_category(ours, prompts).items():
        if not (_is_valid(arm, name) and _is_valid(other, name)):
            nothing = dict.fromkeys(("speed_ratio", "speed_ratio_ci", "tied"))
            found[name] = SpeedRatio(num_prompts=len(chosen), **nothing)
            continue
        speeds = (measured_speed([of[i] for i in chosen]) for of in (ours, theirs))
        ratio = next(speeds).over(next(speeds))
        found[name] = SpeedRatio(num_prompts=len(chosen), **figures_of(ratio, seed))
    return found


def _is_valid(point: Point, category: str) -> bool:
    """Return True if a point's speed-up in a category was measured and is possible."""
    row = point.per_category.get(category)
    return point.k == 0 or (row is not None and row.speedup is not None)
