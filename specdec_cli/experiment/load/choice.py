"""The recommended k at a rate, and the rates between which the recommendation changes.

Points are compared on the same requests at the same due times, so that differences are paired, and
over blocks of consecutive requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from specdec_cli.core.figures import Rate
from specdec_cli.experiment.folders.conclusions import Best, Crossover
from specdec_cli.experiment.folders.records import Key, Point, rate_in_words
from specdec_cli.experiment.folders.samples import Samples
from specdec_cli.experiment.load.goodput import block_means, blocks, mean_interval, ratio_interval
from specdec_cli.experiment.load.points import is_met


@dataclass(frozen=True, slots=True)
class Scored:
    """A point on the requests that all points have. times: of those that all answered, in ms. met:
    whether each met the objectives; empty without."""

    point: Point
    times: tuple[float, ...]
    met: tuple[float, ...] = ()

    def is_faster(self, other: "Scored") -> bool:
        """Whether this one is faster beyond chance."""
        ends = ratio_interval(other.times, self.times)
        return ends is not None and ends[0] > 1.0

    def is_better(self, other: "Scored") -> bool:
        """Whether this one meets more objectives beyond chance."""
        pairs = zip(block_means(self.met), block_means(other.met), strict=True)
        ends = mean_interval([a - b for a, b in pairs])
        return ends is not None and ends[0] > 0.0


def scored(points: Sequence[Point], samples: Mapping[Key, Samples]) -> list[Scored]:
    """The scores of points that have latencies."""
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
        found.append(Scored(point, tuple(times), tuple(met) if slo else ()))
    return found


def best_at_rate(points: Sequence[Point], samples: Mapping[Key, Samples]) -> Best:
    """The recommendation among the points of one rate.

    By goodput where there are objectives; what is tied with the best there is told apart by
    latency, and the smallest k of what is still tied is recommended, if it is better than k = 0
    beyond chance by either. Overloaded points never are.
    """
    rate = points[0].request_rate
    assert rate is not None
    found, where = scored(points, samples), rate_in_words(rate)
    by: Literal["goodput", "latency"] = "latency"
    if rate != "inf" and any(p.load is not None and p.load.slo for p in points):
        by = "goodput"
    if not found:
        speeds = [p.load.achieved_rate or 0.0 for p in points if p.load is not None]
        told = f"nothing was measured at {where}"
        if speeds:
            told = f"every k is overloaded at {where}: {max(speeds):.3g} answers a second at most"
        return Best(k=None, draft=None, tied=[], reason=told, by=by)
    good = max(found, key=lambda one: sum(one.met))
    tied = [one for one in found if not good.is_better(one)]
    leader = min(tied, key=lambda one: sum(one.times))
    tied = [one for one in tied if not leader.is_faster(one)]
    plain = next((one for one in found if one.point.k == 0), None)
    own = [one for one in tied if one.point.draft == leader.point.draft or one.point.k == 0]
    paying = [
        one
        for one in own
        if one.point.k and (plain is None or one.is_better(plain) or one.is_faster(plain))
    ]
    is_plain = any(one.point.k == 0 for one in own) or not paying
    chosen = min(own if is_plain else paying, key=lambda one: one.point.k)
    has_blocks = bool(blocks(len(leader.times)))
    return Best(
        k=chosen.point.k,
        draft=chosen.point.draft if chosen.point.k else None,
        tied=sorted({one.point.k for one in own}),
        reason=_reason(chosen, leader, plain, where, by, has_blocks=has_blocks),
        by=by,
        speedup=chosen.point.speedup,
        significant=bool(chosen.point.k) and has_blocks,
        verdict=("use" if chosen.point.k else "none") if has_blocks else "inconclusive",
    )


def _reason(
    chosen: Scored, leader: Scored, plain: Scored | None, where: str, by: str, *, has_blocks: bool
) -> str:
    k = chosen.point.k
    if not has_blocks:
        return f"k = {k} at {where}: too few requests for an interval, so that nothing is shown"
    if k == 0:
        best = leader.point.k
        told = "no k is better" if best == 0 else f"k = {best} is not better beyond chance"
        return f"no speculation at {where}: by {by} {told}"
    gain = f"{chosen.point.speedup:.2f}x as fast as k = 0" if chosen.point.speedup else ""
    if plain is None:
        gain = "where k = 0 cannot keep up or was not measured"
    told = f"k = {k} at {where} by {by}, {gain}"
    return told if chosen is leader else f"{told}, tied with k = {leader.point.k}"


def crossover(best: Mapping[Rate, Best]) -> Crossover:
    """The largest rate at which some k > 0 is recommended, and the smallest at which k = 0 is."""
    known = {rate: one.k for rate, one in best.items() if rate != "inf" and one.k is not None}
    speculating = [rate for rate, k in known.items() if k]
    plain = [rate for rate, k in known.items() if not k]
    return Crossover(below=max(speculating, default=None), above=min(plain, default=None))
