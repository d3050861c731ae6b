"""Finds signs in a run's samples that something disturbed its times, and outlying repeats, which do
not count. Only records are read, so that merged and resumed runs are treated like any other run."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.records import OUTLYING, Key, Pair, Point, Sample, usual_repeats
from specdec_cli.experiment.folders.samples import Samples, without_errors
from specdec_cli.experiment.statistics import stats
from specdec_cli.experiment.statistics.stats import SumRatio
from specdec_cli.text import counted

_DRIFT = 0.10  # smallest relative change of a round's time, minus its error, to report
# The number of standard errors that are subtracted from a change. It is large, because the largest
# change among many splits is tested and no machine is entirely quiet: 28 quiet sweeps on two shared
# cores had changes of at most 9 %, and 18 sweeps beside other work of at least 13 %.
_CERTAIN = 4.5
_FEWEST = 8  # minimum batches of prompts to detect a drift
_FEWEST_AT_SEAM = 5
_DISAGREE = 0.03  # smallest difference of two repeats to report, at its interval's end near 0
_OFF = 0.03  # smallest relative error of a prediction to report


def noise_in(samples: Mapping[Key, Samples]) -> list[Notice]:
    """Warnings about the times of a run's samples."""
    found = []
    for chosen in _by_run(samples):
        found += [*_drift(chosen), *_outliers(chosen), *_repeats(chosen)]
    return found


def _by_run(samples: Mapping[Key, Samples]) -> Iterable[dict[Key, Samples]]:
    """Group the samples by batch size and pair of degrees. The points of one group were measured in
    turns."""
    by_run: dict[tuple[int, Pair], dict[Key, Samples]] = {}
    for key, of in samples.items():
        if usable := without_errors(of):
            by_run.setdefault((key.batch_size, Pair.of(key)), {})[key] = usable
    return by_run.values()


def seams_in(samples: Mapping[Key, Samples], earlier: Collection[int]) -> list[Notice]:
    """Warnings if rounds became slower or faster when a run was resumed. earlier: the prompts that
    were measured before the run was resumed."""
    if not earlier:
        return []
    return [one for chosen in _by_run(samples) for one in _drift(chosen, earlier)]


def _drift(samples: Mapping[Key, Samples], earlier: Collection[int] = ()) -> list[Notice]:
    """A warning if rounds became permanently slower or faster at some prompt.

    earlier: the prompts measured before the run was resumed, if only a change at that point counts.

    Prompts are measured in the order of their indices, each at every point. So the time of a round,
    relative to the median of its point and averaged over points, shows the machine's speed. The
    effect of text length is removed: rounds of longer texts read more keys, and datasets are often
    sorted by length. Prompts decoded in one batch share their rounds, so they are one observation.
    """
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
    # A fixed split needs no margin for the choice among many splits, but with few prompts its error
    # is uncertain.
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
    since = "where the run went on" if earlier else "at every k alike"
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
    """Estimate the step of the mean at a split, and the step's standard error. Least squares fits
    the step together with a term proportional to `lengths`. The lengths may all be equal."""
    after = (np.arange(len(values)) >= split).astype(float)
    known = np.stack((np.ones(len(values)), lengths - lengths.mean()), axis=1)
    # The residuals of the values and of the step after fitting the mean and the lengths.
    rest, own = (v - known @ np.linalg.lstsq(known, v, rcond=None)[0] for v in (values, after))
    weight = max(float(own @ own), 1e-9)
    change = float(own @ rest) / weight
    squares = float(((rest - change * own) ** 2).sum())
    error = math.sqrt(squares / (len(values) - 3) / weight)
    return change, max(error, 1e-9)


def _context(sample: Sample) -> float:
    """The mean number of tokens that a round of a prompt reads."""
    return len(sample.prompt_token_ids) + len(sample.token_ids) / 2


def _outliers(samples: Mapping[Key, Samples]) -> list[Notice]:
    """Return a warning if outlying repeats cast doubt on the other repeats.

    A single outlier that lost no more than a time slice is harmless, because the prompt's figure is
    the mean of its other repeats.
    """
    outliers = Outliers.of(samples)
    if not outliers.are_long and not outliers.are_many:
        return []
    worst, count = outliers.worst, len(outliers.found)
    seconds = ", ".join(f"{value:.3g}" for value in worst.sample.decode_seconds)
    told = (
        f"repeats of one prompt differ by more than {OUTLYING} times: prompt {worst.sample.index} "
        f"at {_name(worst.key)} took {seconds} s; {count} of {outliers.repeats} repeats do not "
        "count; repeat more often (--repeats), or while nothing else runs"
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
    """A warning if one repeat of all points was slower than another beyond chance."""
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
            f"({ends[0]:.2f}–{ends[1]:.2f}), though they do the same; repeat more often "
            "(--repeats), or while nothing else runs"
        )
        evidence = {"repeats": [one, other], "ratio": ratio.value, "ratio_ci": ends}
        return [Notice("repeats_disagree", told, evidence)]
    return []


def impossible_speeds(points: Iterable[Point]) -> list[Notice]:
    """A warning if points were faster than the number of tokens in their rounds allows."""
    found = [(p.impossible_speedup, p) for p in points if p.impossible_speedup is not None]
    if not found:
        return []
    speed, point = max(found, key=lambda item: item[0])
    length = point.metrics.tokens_per_round if point.metrics is not None else None
    told = (
        f"a speed-up of {speed:.2f} at {_name(Key.of(point))} is impossible: its rounds write "
        f"{length or 0:.2f} tokens on average, and none costs less than one of plain decoding. It "
        "is left out; measure again on a quiet machine, with more repeats"
    )
    more = f" (and {counted(len(found) - 1, 'more point')})" if len(found) > 1 else ""
    evidence = [Key.of(p).as_dict() | {"speedup": s} for s, p in found]
    return [Notice("impossible_speedup", told + more, {"points": evidence})]


def predictions_off(points: Iterable[Point]) -> list[Notice]:
    """A warning if predicted speed-ups differ from measured ones by more than their intervals."""
    off = off_points(points)
    large = [item for item in off if abs(item[1]) >= _OFF]
    if not large:
        return []
    point, error = max(large, key=lambda item: abs(item[1]))
    told = (
        f"the predicted speed-up at {_name(Key.of(point))} is {abs(error) * 100:.1f} % too "
        f"{'high' if error > 0 else 'low'}, more than chance "
        "explains: go by the measured one, or predict again from more prompts on a quiet machine"
    )
    more = f" (and {len(large) - 1} more are off)" if len(large) > 1 else ""
    evidence = [Key.of(p).as_dict() | {"error": e} for p, e in large]
    return [Notice("prediction_off", told + more, {"points": evidence})]


def proposals_of_another_k(points: Iterable[Point]) -> list[Notice]:
    """A warning about predictions from the proposals of the largest k, if a smaller k would propose
    different tokens."""
    found = [p for p in points if p.prediction is not None and p.prediction.drafts_of_k is not None]
    if not found:
        return []
    names = ", ".join(sorted({str(point.draft) for point in found}))
    told = (
        f"what {names} proposes depends on k, so that predictions of a smaller k are rough: they "
        "take the proposals of the largest one"
    )
    evidence = [Key.of(point).as_dict() for point in found]
    return [Notice("proposals_of_another_k", told, {"points": evidence})]


def _round_seconds(sample: Sample) -> float:
    """The mean seconds per round of a prompt, over its repeats; per token if its rounds are
    unknown."""
    rounds = sum(sample.round_share) or sample.decoded_tokens * len(sample.decode_seconds)
    return max(sum(sample.decode_seconds) / max(rounds, 1e-9), 1e-9)


def _name(key: Key) -> str:
    with_draft = f" with {key.draft}" if key.k and key.draft is not None else ""
    return f"k = {key.k}{with_draft}, batch size {key.batch_size}"


# The seconds that an idle system occasionally takes from a process. In recorded quiet sweeps on a
# virtual machine of two processors the longest outlier lost 0.19 s.
_SLICE = 0.25
_WEIGHT = 0.01  # an outlier is not long if it lost less than this share of its point's time
# Share of repeats that are outliers on an idle system: 0 to 1.4 % in the same sweeps. If outliers
# were independent, two repeats of one prompt would both be outliers in 4 of 10,000 prompts.
_SELDOM = 0.02
_CHANCE = 0.001  # outliers are too many if an idle system has so many with a lower probability


@dataclass(frozen=True, slots=True)
class Outlier:
    """A repeat that took far longer than the fastest one of its prompt.

    lost: the seconds that the disturbance cost the whole batch.
    """

    lost: float
    key: Key
    sample: Sample


@dataclass(frozen=True, slots=True)
class Outliers:
    """The outliers among the repeats of several points. repeats: the number of repeats of all
    prompts. disturbances: the number of outliers, where one that slows a whole batch counts once.
    chances: how many disturbances were possible, counted in the same way. seconds: the time of all
    repeats of each point."""

    found: list[Outlier]
    repeats: int
    disturbances: float
    chances: float
    seconds: Mapping[Key, float]

    @classmethod
    def of(cls, samples: Mapping[Key, Samples]) -> "Outliers":
        found, repeats, disturbances, chances = list[Outlier](), 0, 0.0, 0.0
        for key, of in samples.items():
            together = min(key.batch_size, len(of))
            for sample in of.values():
                times = sample.decode_seconds
                usual = usual_repeats(times)
                lost = [t - min(times) for place, t in enumerate(times) if place not in usual]
                found += [Outlier(together * value, key, sample) for value in lost]
                repeats += len(times)
                disturbances += len(lost) / together
                chances += len(times) / together
        seconds = {
            key: sum(sum(s.decode_seconds) for s in of.values()) for key, of in samples.items()
        }
        return cls(found, repeats, disturbances, chances, seconds)

    @property
    def worst(self) -> Outlier:
        return max(self.found, key=lambda one: one.lost)

    @property
    def are_long(self) -> bool:
        """True if an outlier lost over `_SLICE` seconds and `_WEIGHT` of its point's time. A longer
        disturbance may also have slowed neighbouring repeats by too little to be noticed."""
        return any(one.lost > max(_SLICE, _WEIGHT * self.seconds[one.key]) for one in self.found)

    @property
    def are_many(self) -> bool:
        """True if there are more outliers than on an idle system, so that all repeats of a prompt
        may be disturbed.

        This uses the bound of Chernoff and Hoeffding on the tail of a binomial distribution. If
        each of n repeats is an outlier with probability p, then the probability that a share of s
        or more are outliers is at most exp(-n KL(s, p)).
        """
        share, rate = self.disturbances / max(self.chances, 1e-9), _SELDOM
        if share <= rate:
            return False
        divergence = share * math.log(share / rate)
        if share < 1.0:
            divergence += (1 - share) * math.log((1 - share) / (1 - rate))
        return self.chances * divergence > -math.log(_CHANCE)


# Codes of warnings that rule out a significant recommendation.
DISTURBED = frozenset(
    {
        *("baseline_drift", "outlying_repeats", "repeats_disagree"),
        "impossible_speedup",
        *("cpu_starved", "cpu_throttled", "cpu_load", "gpu_throttled", "gpu_shared"),
    }
)


def off_points(points: Iterable[Point]) -> list[tuple[Point, float]]:
    """List the points whose prediction is wrong by more than its interval, each with the relative
    error.

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
    """The warnings that rule out a significant result."""
    return [one for one in warnings if one.code in DISTURBED]
