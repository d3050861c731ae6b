"""The warnings and predictions that speak against a result. Imports no torch, for reports."""

from collections.abc import Iterable

from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.records import Point

# Codes of warnings over which no recommendation is called significant.
DISTURBED = frozenset(
    {
        *("baseline_drift", "outlying_repeats", "repeats_disagree"),
        "impossible_speedup",
        *("cpu_starved", "cpu_throttled", "cpu_load", "gpu_throttled", "gpu_shared"),
    }
)


def off_points(points: Iterable[Point]) -> list[tuple[Point, float]]:
    """The points whose prediction is off by more than its interval, with the relative error.

    Predictions from the proposals of another k may be off without any disturbance.
    """
    found = []
    for point in points:
        prediction = point.prediction
        if prediction is None or point.k == 0 or prediction.speedup_error is None:
            continue
        ends = prediction.speedup_error_ci if prediction.drafts_of_k is None else None
        if ends is not None and not ends[0] <= 0.0 <= ends[1]:
            found.append((point, prediction.speedup_error))
    return found


def disturbances(warnings: Iterable[Notice]) -> list[Notice]:
    """The warnings over which nothing is called significant."""
    return [one for one in warnings if one.code in DISTURBED]


def doubt_in_words(disturbed: Iterable[Notice]) -> str:
    """A suffix of a recommendation over disturbed times; "" over quiet ones."""
    codes = ", ".join(dict.fromkeys(one.code for one in disturbed))
    return f"; not called significant, since times were disturbed ({codes})" if codes else ""
