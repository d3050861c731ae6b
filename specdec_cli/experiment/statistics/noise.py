"""Finds signs in a run's samples that something disturbed the measured times.

Only the run's records are read, so that merged and resumed runs are treated like any other run.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from specdec_cli.core.figures import Rate
from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.records import OUTLYING, Key, Pair, Point, Sample
from specdec_cli.experiment.folders.samples import Samples, without_errors
from specdec_cli.experiment.statistics import stats
from specdec_cli.experiment.statistics.evidence import NEGLIGIBLE
from specdec_cli.experiment.statistics.outliers import Outliers
from specdec_cli.experiment.statistics.stats import SumRatio
from specdec_cli.text import counted

# A relative change of a round's time is reported if it is this large even after `_CERTAIN` standard
# errors are subtracted.
_DRIFT = 0.10
# The number of standard errors to subtract from a change. It is large because the largest change
# among many splits is tested, and no machine is entirely quiet. On two shared cores, the changes
# were at most 9 % in 28 quiet sweeps, and at least 13 % in 18 sweeps that ran beside other work.
_CERTAIN = 4.5
_FEWEST = 8  # minimum number of batches of prompts to detect a drift
_FEWEST_AT_SEAM = 5
# Two repeats disagree if the whole interval of their ratio is at least this far from 1.
_DISAGREE = 0.03
_OFF = 0.03  # smallest relative error of a prediction to report


def noise_in(samples: Mapping[Key, Samples]) -> list[Notice]:
    """Return warnings about disturbances that are visible in the times of a run's samples."""
    found = []
    for chosen in _by_run(samples):
        found += [*_drift(chosen), *_outliers(chosen), *_repeats(chosen)]
    return found


def _by_run(samples: Mapping[Key, Samples]) -> Iterable[dict[Key, Samples]]:
    """Group the samples by batch size and pair of tensor-parallel degrees. The points of a group
    were measured alternately, so they can be compared."""
    by_run: dict[tuple[int, Pair], dict[Key, Samples]] = {}
    for key, of in samples.items():
        if usable := without_errors(of):
            by_run.setdefault((key.batch_size, Pair.of(key)), {})[key] = usable
    return by_run.values()


def _most_complete(samples: Mapping[Key, Samples]) -> Mapping[Key, Samples]:
    """Return the points that have at least half as many prompts as the point with the most.
    Without this, one point that failed early would leave too few common prompts to see anything."""
    most = max(map(len, samples.values()))
    return {key: of for key, of in samples.items() if 2 * len(of) >= most}


def seams_in(samples: Mapping[Key, Samples], earlier: Collection[int]) -> list[Notice]:
    """Return warnings if rounds became slower or faster when a run was resumed. earlier: the
    prompts that were measured before the run was resumed."""
    if not earlier:
        return []
    return [one for chosen in _by_run(samples) for one in _drift(chosen, earlier)]


def _drift(samples: Mapping[Key, Samples], earlier: Collection[int] = ()) -> list[Notice]:
    """Return a warning if rounds became slower or faster at some prompt and stayed so.

    earlier: the prompts that were measured before the run was resumed, to test only for a change at
    that point; empty to test for a change at any prompt.

    Prompts are measured in the order of their indices, each at every point. The time of a round,
    divided by the median of its point and averaged over points, therefore shows the machine's speed
    over time. The effect of text length is removed, because rounds of longer texts read more keys,
    and datasets are often sorted by length. Prompts decoded in one batch share their rounds, so
    they count as one observation.
    """
    samples = _most_complete(samples)
    common = sorted(set.intersection(*(set(of) for of in samples.values())))
    plain = min(samples, key=lambda key: key.k)
    together = plain.batch_size
    common.sort(key=lambda index: (index not in earlier, index))
    count = len(common) // together
    seam = sum(index in earlier for index in common) // together
    if count < (_FEWEST_AT_SEAM if earlier else _FEWEST) or (earlier and not 0 < seam < count):
        return []
    used = common[: count * together]

    def by_batch(values: Iterable[float]) -> np.ndarray[Any, Any]:
        means: np.ndarray[Any, Any] = np.fromiter(values, float).reshape(count, -1).mean(axis=1)
        return means

    rows = []
    for of in samples.values():
        batches = by_batch(math.log(_round_seconds(of[i])) for i in used)
        rows.append(batches - np.median(batches))
    speeds = np.mean(rows, axis=0)
    lengths = by_batch(_context(samples[plain][i]) for i in used)
    edge = max(2, count // 8)
    places = [seam] if earlier else range(edge, count - edge + 1)
    # `_CERTAIN` allows for choosing the largest change among many splits. If the split is fixed,
    # fewer standard errors are enough. Student's t makes their number larger for few prompts,
    # because the estimate of the standard error is then uncertain.
    certain = 1.5 * stats.student(count - 3) if earlier else _CERTAIN
    splits = [(_step(speeds, lengths, split), split) for split in places]
    sure = [(abs(change) - certain * error, change, place) for (change, error), place in splits]
    least, change, place = max(sure)
    if np.expm1(least) < _DRIFT:
        return []
    split = place * together
    slower = float(np.expm1(abs(change)))
    before, after = (
        1e3 * fmean(_round_seconds(samples[plain][i]) for i in part)
        for part in (common[:split], common[split:])
    )
    what = "slower" if change > 0 else "faster"
    since = "where the run was resumed" if earlier else "at every k alike"
    told = (
        f"rounds became {100 * slower:.0f} % {what} from prompt {common[split]} on, {since}: "
        f"{before:.2f} ms before and {after:.2f} ms after at k = {plain.k}; measure again in "
        "one go, while nothing else runs"
    )
    evidence = {"batch_size": plain.batch_size, "k": plain.k, "from_prompt": common[split]}
    figures = {"round_ms_before": before, "round_ms_after": after, "change": float(change)}
    return [Notice("baseline_drift", told, evidence | figures)]


def _step(
    values: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], split: int
) -> tuple[float, float]:
    """Estimate by how much the mean of `values` changes at index `split`. Return the change and its
    standard error.

    The step is fitted by least squares, together with a term proportional to `lengths`, so that the
    effect of text length does not count as a step. The lengths may all be equal.
    """
    after = (np.arange(len(values)) >= split).astype(float)
    known = np.stack((np.ones(len(values)), lengths - lengths.mean()), axis=1)
    # Regress the values, and the step itself, on a constant and the lengths. Regressing the values'
    # residuals on the step's then gives the step's coefficient in the joint fit.
    rest, own = (v - known @ np.linalg.lstsq(known, v, rcond=None)[0] for v in (values, after))
    weight = max(float(own @ own), 1e-9)
    change = float(own @ rest) / weight
    squares = float(((rest - change * own) ** 2).sum())
    error = math.sqrt(squares / (len(values) - 3) / weight)
    return change, max(error, 1e-9)


def _context(sample: Sample) -> float:
    """Return the mean context length, in tokens, of the rounds of a prompt."""
    return len(sample.prompt_token_ids) + len(sample.token_ids) / 2


def _outliers(samples: Mapping[Key, Samples]) -> list[Notice]:
    """Return a warning if outlying repeats cast doubt on the other repeats.

    A single outlier that lost no more time than an idle system occasionally takes is harmless: it
    is left out of the mean over the prompt's repeats.
    """
    outliers = Outliers.of(samples)
    if not outliers.are_long and not outliers.are_many:
        return []
    worst, count = outliers.worst, len(outliers.found)
    seconds = ", ".join(f"{value:.3g}" for value in worst.sample.decode_seconds)
    told = (
        f"repeats of one prompt differ by more than a factor of {OUTLYING}: prompt "
        f"{worst.sample.index} at {_name(worst.key)} took {seconds} s; {count} of "
        f"{outliers.repeats} repeats do not count; repeat more often (--repeats), or while nothing "
        "else runs"
    )
    evidence = worst.key.as_dict() | {
        "index": worst.sample.index,
        "seconds": worst.sample.decode_seconds,
        "lost_seconds": worst.lost,
        "outliers": count,
        "repeats": outliers.repeats,
    }
    return [Notice("outlying_repeats", told, evidence)]


def _repeats(samples: Mapping[Key, Samples]) -> list[Notice]:
    """Return a warning if one repeat, summed over all points, was significantly slower than
    another."""
    samples = _most_complete(samples)
    common = sorted(set.intersection(*(set(of) for of in samples.values())))
    counts = {len(of[i].decode_seconds) for of in samples.values() for i in common}
    if len(common) < 2 or len(counts) != 1:
        return []
    totals = [
        [sum(of[i].decode_seconds[repeat] for of in samples.values()) for i in common]
        for repeat in range(counts.pop())
    ]
    for (one, ours), (other, theirs) in combinations(enumerate(totals, start=1), 2):
        ratio = SumRatio(np.stack((np.asarray(ours), np.asarray(theirs)), axis=1), (1, -1))
        ends = stats.interval(ratio)
        if ends is None or max(ends[0] - 1, 1 - ends[1]) < _DISAGREE:
            continue
        told = (
            f"repeat {one} of all points took {ratio.value:.2f} times as long as repeat {other} "
            f"({ends[0]:.2f}–{ends[1]:.2f}), although both do the same work; repeat more often "
            "(--repeats), or while nothing else runs"
        )
        size = next(iter(samples)).batch_size
        evidence = {"batch_size": size, "repeats": [one, other]}
        evidence |= {"ratio": ratio.value, "ratio_ci": ends}
        return [Notice("repeats_disagree", told, evidence)]
    return []


def impossible_speeds(points: Iterable[Point]) -> list[Notice]:
    """Return a warning if points had an impossible speed-up: more than their tokens per round."""
    found = [(p.impossible_speedup, p) for p in points if p.impossible_speedup is not None]
    if not found:
        return []
    speed, point = max(found, key=lambda item: item[0])
    length = point.metrics.tokens_per_round if point.metrics is not None else None
    told = (
        f"a speed-up of {speed:.2f} at {_name(Key.of(point))} is impossible: its rounds write "
        f"{length or 0:.2f} tokens on average, and no round costs less than one of plain decoding. "
        "It is left out; measure again on a quiet machine, with more repeats"
    )
    more = f" (and {counted(len(found) - 1, 'more point')})" if len(found) > 1 else ""
    evidence = [Key.of(p).as_dict() | {"speedup": s} for s, p in found]
    return [Notice("impossible_speedup", told + more, {"points": evidence})]


def predictions_off(points: Iterable[Point]) -> list[Notice]:
    """Return a warning if predicted speed-ups differ from measured ones significantly and by at
    least `_OFF`."""
    off = off_points(points)
    large = [item for item in off if abs(item[1]) >= _OFF]
    if not large:
        return []
    point, error = max(large, key=lambda item: abs(item[1]))
    told = (
        f"the predicted speed-up at {_name(Key.of(point))} is {abs(error) * 100:.1f} % too "
        f"{'high' if error > 0 else 'low'}, more than chance "
        "explains: use the measured one, or predict again from more prompts on a quiet machine"
    )
    more = f" (and {len(large) - 1} more are off)" if len(large) > 1 else ""
    evidence = [Key.of(p).as_dict() | {"error": e} for p, e in large]
    return [Notice("prediction_off", told + more, {"points": evidence})]


def proposals_of_another_k(points: Iterable[Point]) -> list[Notice]:
    """Return a warning about predictions that use the proposals of the largest k, if a smaller k
    would propose different tokens."""
    found = [p for p in points if p.prediction is not None and p.prediction.drafts_of_k is not None]
    if not found:
        return []
    names = ", ".join(sorted({str(point.draft) for point in found}))
    told = (
        f"the proposals of {names} depend on k, so predictions for a smaller k are rough: they use "
        "the proposals of the largest k"
    )
    evidence = [Key.of(point).as_dict() for point in found]
    return [Notice("proposals_of_another_k", told, {"points": evidence})]


def _round_seconds(sample: Sample) -> float:
    """Return the mean seconds per round of a prompt over its repeats. If the number of rounds is
    unknown, return the mean seconds per token."""
    rounds = sum(sample.round_share) or sample.decoded_tokens * len(sample.decode_seconds)
    return max(sum(sample.decode_seconds) / max(rounds, 1e-9), 1e-9)


def _name(key: Key) -> str:
    with_draft = f" with {key.draft}" if key.draft is not None else ""
    return f"k = {key.k}{with_draft}, batch size {key.batch_size}"


# The codes of warnings that prevent a recommendation from being called significant.
DISTURBED = frozenset(
    {
        *("baseline_drift", "outlying_repeats", "repeats_disagree"),
        "impossible_speedup",
        *("cpu_starved", "cpu_throttled", "cpu_load", "gpu_throttled", "gpu_shared"),
        "client_late",
    }
)


def off_points(points: Iterable[Point]) -> list[tuple[Point, float]]:
    """List the points whose predicted speed-up is significantly wrong, each with the relative
    error. A prediction is significantly wrong if the interval of its error excludes 0.

    Predictions that use the proposals of another k are left out, because they may be wrong without
    any disturbance.
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


def disturbances(
    warnings: Iterable[Notice], batch_size: int | None = None, rate: Rate | None = None
) -> list[Notice]:
    """Return the warnings that prevent results from being called significant at a batch size and a
    request rate. None stands for all of them.

    A warning whose evidence names batch sizes or rates counts only at those. Requests that were
    sent late count only if the delay is large enough, as a share of the latency, to hide a gain.
    """
    wanted = {"batch_size": batch_size, "request_rate": rate}
    return [
        one
        for one in warnings
        if one.code in DISTURBED
        and (one.evidence.get("share_of_latency", 1.0) or 0.0) > NEGLIGIBLE
        and all(value is None or value in _named(one, key, value) for key, value in wanted.items())
    ]


def _named(one: Notice, key: str, default: Rate) -> set[Rate]:
    """Return the values of `key` that a warning's evidence names; the default if it names none."""
    named = [one.evidence, *one.evidence.get("points", ())]
    return {item[key] for item in named if key in item} or {default}
