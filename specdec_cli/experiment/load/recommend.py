"""Recommends a k for each request rate, and finds the rates between which the recommendation
changes. Points are compared on the same requests, over blocks of consecutive ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specdec_cli.core.figures import Rate
from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.conclusions import Best, Crossover
from specdec_cli.experiment.folders.records import Key, Point
from specdec_cli.experiment.folders.samples import Samples
from specdec_cli.experiment.load.goodput import (
    block_means,
    blocks,
    differences,
    mean_interval,
    ratio_interval,
)
from specdec_cli.experiment.load.points import is_met
from specdec_cli.experiment.statistics.evidence import NEGLIGIBLE
from specdec_cli.experiment.statistics.stats import joint_reach

_MORE = 1.1  # a point that answers this many times as many requests as another keeps up better


@dataclass(frozen=True, slots=True)
class Scored:
    """A point's results on the requests common to all points.

    times: the time of each request in milliseconds, over the requests that all points answered.
    met: 1 for each request that was answered and met the objectives, if any; 0 for the others.
    """

    point: Point
    times: tuple[float, ...]
    met: tuple[float, ...] = ()

    @property
    def crowding(self) -> float:
        return self.point.load.crowding if self.point.load is not None else 0.0

    def is_faster(self, other: "Scored", reach: float = 1.0) -> bool:
        """True if requests take less time at this point than at the other, beyond chance."""
        ends = self._faster(other, reach)
        return ends is not None and ends[0] > 1.0

    def is_better(self, other: "Scored", reach: float = 1.0) -> bool:
        """True if more requests are answered and meet the objectives at this point than at the
        other, beyond chance."""
        ends = self._more_met(other, reach)
        return ends is not None and ends[0] > 0.0

    def pays(self, plain: "Scored", reach: float) -> bool:
        """True if this point is better than plain decoding, or faster and not worse, beyond
        chance.

        reach: `_joint_reach` of all points that were tried.
        """
        is_faster = self.is_faster(plain, reach) and not plain.is_better(self)
        return is_faster or self.is_better(plain, reach)

    def is_ruled_out(self, plain: "Scored") -> bool:
        """True if the intervals exclude that this point gains more than `NEGLIGIBLE` over plain
        decoding, in latency or in the number of requests that meet the objectives. A window too
        short for an interval excludes nothing: it may lack the bursts that would show a gain."""
        faster, more = self._faster(plain), self._more_met(plain)
        if faster is None or more is None or max(self.crowding, plain.crowding) > 1:
            return False
        most = NEGLIGIBLE * float(np.mean(plain.met))
        return faster[1] <= 1 + NEGLIGIBLE and more[1] <= most

    def _faster(self, other: "Scored", reach: float = 1.0) -> list[float] | None:
        """Return the interval of the ratio of mean times, the other's over this point's. None for
        too few requests."""
        crowding = max(self.crowding, other.crowding)
        return ratio_interval(other.times, self.times, crowding, reach)

    def _more_met(self, other: "Scored", reach: float = 1.0) -> list[float] | None:
        """Return the interval of the difference between the shares of requests that are answered
        and meet the objectives, paired by request. None for too few requests."""
        crowding = max(self.crowding, other.crowding)
        return mean_interval(self.more_met(other), crowding, reach)

    def more_met(self, other: "Scored") -> list[float]:
        """Return the difference that `_more_met` describes for each block of requests."""
        pairs = zip(block_means(self.met), block_means(other.met), strict=True)
        return [a - b for a, b in pairs]


def scored(points: Sequence[Point], samples: Mapping[Key, Samples]) -> list[Scored]:
    """Return the results of all measured points that are not overloaded, on the requests that these
    points have in common."""
    chosen = [p for p in points if p.is_ok and p.load is not None and not p.load.overloaded]
    if not chosen:
        return []
    own = [samples[Key.of(p)] for p in chosen]
    every = sorted(set.intersection(*(set(of) for of in own)))
    both = [i for i in every if all(of[i].e2el_ms for of in own)]
    found = []
    for point, of in zip(chosen, own, strict=True):
        assert point.load is not None
        slo = point.load.slo if point.load.goodput is not None else {}
        met = [float(one) for one in is_met([of[i] for i in every], slo)]
        times = [of[i].e2el_ms[0] for i in both]
        found.append(Scored(point, tuple(times), tuple(met)))
    return found


def _joint_reach(proposing: Sequence[Scored], plain: Scored) -> float:
    """Return the factor by which intervals must be wider to claim that one of several points is
    faster or better than plain decoding; see `stats.joint_reach`."""
    tests = [differences(plain.times, one.times) for one in proposing]
    tests += [one.more_met(plain) for one in proposing]
    if len({len(means) for means in tests}) != 1 or not (count := len(tests[0])):
        return 1.0
    return joint_reach(np.cov(tests), count - 1)


def best_at_rate(
    points: Sequence[Point], samples: Mapping[Key, Samples], disturbed: Sequence[Notice] = ()
) -> Best:
    """Recommend one of the points at one rate.

    If there are objectives, goodput decides; otherwise, the number of answered requests does.
    Points that are tied with the best are then compared by latency. Of those still tied, the
    candidates are the k > 0 whose goodput or latency is better than at k = 0 beyond chance or, if
    k = 0 is overloaded, those that answer more requests by `_MORE`. The draft is that of the
    fastest candidate, and k is the smallest with that draft. Without candidates, k is 0. The
    verdict is then "none" only if every k > 0 is overloaded or shown to gain too little. Overloaded
    points are never recommended. If k = 0 was not measured, the best k is only a guess.

    disturbed: warnings that something disturbed the times. If there are any, nothing is shown.
    """
    rate = points[0].request_rate
    assert rate is not None
    found = scored(points, samples)
    by: Literal["goodput", "latency"] = "latency"
    if rate != "inf" and any(p.load is not None and p.load.slo for p in points):
        by = "goodput"
    if not found:
        speeds = [p.load.achieved_rate or 0.0 for p in points if p.load is not None]
        told = "nothing was measured"
        if speeds:
            told = f"every k is overloaded: {max(speeds):.3g} answers per second at most"
        return Best.none(told, by=by)
    good = max(found, key=lambda one: sum(one.met))
    tied = [one for one in found if not good.is_better(one)]
    leader = min(tied, key=lambda one: sum(one.times))
    tied = [one for one in tied if not leader.is_faster(one)]
    plain = next((one for one in found if one.point.k == 0), None)
    paying = [one for one in tied if one.point.k]
    draft = min(paying, key=lambda one: sum(one.times), default=leader).point.draft
    if plain is not None:
        reach = _joint_reach([one for one in found if one.point.k], plain)
        paying = [one for one in paying if one.pays(plain, reach)]
    elif (slow := next((p for p in points if p.k == 0 and p.load is not None), None)) is not None:
        paying = [one for one in paying if _answered(one.point) >= _MORE * _answered(slow)]
    chosen = plain or leader
    if paying:
        draft = min(paying, key=lambda one: (one is not leader, sum(one.times))).point.draft
        chosen = min((o for o in paying if o.point.draft == draft), key=lambda one: one.point.k)
    same_draft = {one.point.k for one in tied if one.point.draft == draft or one.point.k == 0}
    codes = ", ".join(dict.fromkeys(one.code for one in disturbed))
    lacks = f"times were disturbed ({codes})" if codes else ""
    lacks = lacks or _lacking(points, found, chosen, leader, by, pays=bool(paying))
    return Best(
        k=chosen.point.k,
        draft=chosen.point.draft,
        tied=sorted(same_draft | {chosen.point.k}),
        reason=_reason(chosen, leader, plain, by, lacks),
        by=by,
        speedup=chosen.point.speedup,
        significant=bool(chosen.point.k) and not lacks,
        verdict="inconclusive" if lacks else "use" if chosen.point.k else "none",
        fastest=None,
        tied_points=[],
        needed=None,
        per_category={},
    )


def _answered(point: Point) -> float:
    return point.load.achieved_rate or 0.0 if point.load is not None else 0.0


def _lacking(
    points: Sequence[Point],
    found: Sequence[Scored],
    chosen: Scored,
    leader: Scored,
    by: str,
    *,
    pays: bool,
) -> str:
    """Return the reason why the evidence shows nothing; "" if it shows that the chosen k pays, or
    that none does."""
    if not blocks(len(leader.times)):
        return "too few requests for an interval"
    known = [p for p in points if p.load is not None]
    if not any(p.k == 0 for p in known):
        return "there is no k = 0 to compare with"
    if pays:
        return ""
    if chosen.point.k:
        return "k = 0 is overloaded, but answers about as many requests (raise --duration)"
    if not any(p.k for p in known):
        return "no k but k = 0 was measured"
    if all(one.is_ruled_out(chosen) for one in found if one.point.k):
        return ""
    told = f"by {by} {_no_better(leader)}, but some k may be"
    if any(one.crowding > 1 for one in found):
        told += " (the queue lasts too long for this window: raise --duration, or lower the rate)"
    return told


def _no_better(leader: Scored) -> str:
    best = leader.point.k
    return "no k is better" if best == 0 else f"k = {best} is not better beyond chance"


def _reason(chosen: Scored, leader: Scored, plain: Scored | None, by: str, lacks: str) -> str:
    k = chosen.point.k
    if lacks:
        return f"k = {k}: {lacks}, so a gain is not shown or ruled out"
    if k == 0:
        return f"no speculation: by {by} {_no_better(leader)}"
    gain = f"{chosen.point.speedup:.2f}x as fast as k = 0" if chosen.point.speedup else ""
    if plain is None:
        gain = "since k = 0 cannot keep up"
    told = f"k = {k} by {by}, {gain}"
    return told if chosen is leader else f"{told}, tied with k = {leader.point.k}"


def crossover(best: Mapping[Rate, Best]) -> Crossover:
    """Find the largest rate at which some k > 0 is recommended, and the smallest rate at which k =
    0 is recommended. An inconclusive verdict does not count as a recommendation."""
    shown = [r for r, one in best.items() if r != "inf" and one.verdict != "inconclusive"]
    speculating = [rate for rate in shown if best[rate].k]
    plain = [rate for rate in shown if best[rate].k == 0]
    return Crossover(below=max(speculating, default=None), above=min(plain, default=None))
