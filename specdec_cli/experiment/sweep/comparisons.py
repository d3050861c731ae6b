"""Arm against arm: the `comparisons` of a sweep's document.

Knows no engine and no folder.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from specdec_cli.experiment.folders.conclusions import Arm, CategoryComparison, Comparison
from specdec_cli.experiment.folders.records import Key, Point
from specdec_cli.experiment.folders.samples import Samples, measured_speed, prompts_by_category
from specdec_cli.experiment.statistics.factors import Measure, interval_of, ratio_of
from specdec_cli.experiment.sweep.gains import Gains


def compare_arms(
    points: Sequence[Point], gains: Gains, samples: Mapping[Key, Samples], seed: int
) -> list[Comparison]:
    """Every two arms of one batch size, the faster one first, each at its own fastest k.

    Plain decoding is an arm too. All are compared on the same prompts.
    """
    arms = sorted(_fastest_of_each(gains), key=gains.value, reverse=True)
    return [
        Comparison(
            batch_size=arm.batch_size,
            arm=Arm(k=arm.k, draft=arm.draft if arm.k else None),
            against=Arm(k=other.k, draft=other.draft if other.k else None),
            is_predicted=gains.is_predicted,
            num_prompts=len(gains.prompts),
            **_figures(ratio_of(gains.of(arm), gains.of(other)), seed),
            per_category=(
                {} if gains.is_predicted else _by_category(arm, other, gains.prompts, samples, seed)
            ),
        )
        for arm, other in combinations(arms, 2)
    ]


def _fastest_of_each(gains: Gains) -> list[Point]:
    """The fastest point of each draft with proposals, and k = 0 once."""
    found: dict[str | None, Point] = {}
    for point in gains.points:
        name = point.draft if point.k else None
        if name not in found or gains.value(point) > gains.value(found[name]):
            found[name] = point
    return list(found.values())


def _figures(ratio: Measure, seed: int) -> dict[str, Any]:
    ends = interval_of(ratio, seed)
    return {
        "speed_ratio": ratio.value,
        "speed_ratio_ci": ends,
        "tied": None if ends is None else ends[0] <= 1.0 <= ends[1],
    }


def _by_category(
    arm: Point, other: Point, prompts: Iterable[int], samples: Mapping[Key, Samples], seed: int
) -> dict[str, CategoryComparison]:
    ours, theirs = samples[Key.of(arm)], samples[Key.of(other)]
    found = {}
    for name, chosen in prompts_by_category(ours, prompts).items():
        speeds = (measured_speed([of[i] for i in chosen]) for of in (ours, theirs))
        ratio = next(speeds).over(next(speeds))
        found[name] = CategoryComparison(num_prompts=len(chosen), **_figures(ratio, seed))
    return found
