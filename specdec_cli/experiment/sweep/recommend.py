"""The recommended k: the contract's `best` among a sweep's points."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_cli.experiment import stats
from specdec_cli.experiment.points import Samples, baseline_of, speedup, without_errors
from specdec_cli.experiment.records import Key, Point
from specdec_cli.experiment.stats import SumRatio

Gain = Callable[[Point], float]
_TIE = 0.02  # relative difference of tied predictions, which have no intervals


def recommend(points: Sequence[Point], samples: Mapping[Key, Samples], seed: int) -> dict[str, Any]:
    """The contract's `best` among the points of one batch size, over all drafts.

    Candidates are the points that are tied with the fastest and faster than k = 0 beyond chance.
    The draft is that of the fastest candidate; k is the smallest candidate with that draft, or 0,
    "no speculation", without candidates. In sweeps with predicted points, predictions are compared.
    """
    measured = [p for p in points if p.status == "ok"]
    if any(p.status == "skipped" for p in points):
        return _recommend_predicted(points)
    candidates = [p for p in measured if p.speedup is not None]
    if not candidates:
        return _nothing("no point could be compared with k = 0")
    common = set.intersection(*(set(without_errors(samples[Key.of(p)])) for p in candidates))
    if not common:
        return _nothing("the points have no prompt in common")
    measures = [_against_plain(p, samples, common) for p in candidates]
    choice = stats.choose(measures, seed)
    tied = [candidates[i] for i in choice.tied]
    fastest = candidates[choice.best]
    chosen = _smallest_with_draft_of(fastest, list(filter(_pays, tied)), _measured)
    if chosen is None:
        chosen = next(p for p in candidates if p.k == 0 and p.draft in (fastest.draft, None))
    with_draft = has_several_drafts(points)
    return _Choice(chosen, fastest, tied, _measured, len(common), with_draft).as_dict()


def _smallest_with_draft_of(fastest: Point, tied: Sequence[Point], gain_of: Gain) -> Point | None:
    """The smallest k with the draft of the fastest point, or None.

    If the fastest is not among `tied`, the draft is that of the fastest there. A smaller k is
    preferred only for the same draft, since proposals of different drafts cost differently.
    """
    if not tied:
        return None
    draft = max(tied, key=lambda p: (p is fastest, gain_of(p))).draft
    return min((p for p in tied if p.draft == draft), key=lambda p: p.k)


def has_several_drafts(points: Sequence[Point]) -> bool:
    """Whether points are of several drafts, so that k alone does not name one."""
    return len({p.draft for p in points}) > 1


def in_words(k: int, draft: str | None, *, with_draft: bool) -> str:
    """The name of a point. with_draft: add the draft, except at k = 0, where it plays no part."""
    return f"k = {k} with draft {draft}" if with_draft and k else f"k = {k}"


def _measured(point: Point) -> float:
    return point.speedup or 0.0


def _predicted(point: Point) -> float:
    return point.predicted_speedup or 0.0


def _pays(point: Point) -> bool:
    """Whether a point is faster than k = 0 beyond chance, or at all if it has no interval."""
    low = point.speedup_ci[0] if point.speedup_ci is not None else _measured(point)
    return point.k > 0 and low > 1.0


def _against_plain(point: Point, samples: Mapping[Key, Samples], common: set[int]) -> SumRatio:
    key = Key.of(point)
    own, plain = samples[key], baseline_of(samples, key)
    found = speedup({i: own[i] for i in common}, {i: plain[i] for i in common})
    assert found is not None
    return found


def _recommend_predicted(points: Sequence[Point]) -> dict[str, Any]:
    candidates = [p for p in points if p.predicted_speedup is not None]
    if not candidates:
        return _nothing("nothing could be predicted")
    fastest = max(candidates, key=_predicted)
    least = _predicted(fastest) * (1 - _TIE)
    tied = [p for p in candidates if _predicted(p) >= least]
    chosen = _smallest_with_draft_of(fastest, tied, _predicted)
    assert chosen is not None
    with_draft = has_several_drafts(points)
    best = _Choice(chosen, fastest, tied, _predicted, None, with_draft).as_dict()
    return best | {"reason": f"predicted: {best['reason']}"}


@dataclass(frozen=True, slots=True)
class _Choice:
    """A recommendation. num_prompts: that points were compared on; None for predictions."""

    chosen: Point
    fastest: Point
    tied: Sequence[Point]
    gain_of: Gain
    num_prompts: int | None
    with_draft: bool

    def as_dict(self) -> dict[str, Any]:
        chosen, fastest, gain_of = self.chosen, self.fastest, self.gain_of
        same_draft = {p.k for p in self.tied if p.draft == chosen.draft or p.k == 0}
        return {
            "k": chosen.k,
            "draft": chosen.draft if chosen.k else None,
            "tied": sorted(same_draft),
            "reason": self.reason(min(same_draft)),
            "speedup": gain_of(chosen),
            "fastest": {"k": fastest.k, "draft": fastest.draft, "speedup": gain_of(fastest)},
            "tied_points": [{"k": p.k, "draft": p.draft} for p in self.tied],
        }

    def reason(self, least_tied: int) -> str:
        """The recommendation in words. least_tied: the smallest tied k with the chosen draft."""
        chosen, fastest, count = self.chosen, self.fastest, self.num_prompts
        over = "" if count is None else f" over {count} prompt{'s' if count > 1 else ''}"
        gain = f"{self.gain_of(fastest):.2f}x the speed of k = 0{over}"
        which, leader = (
            in_words(p.k, p.draft, with_draft=self.with_draft) for p in (chosen, fastest)
        )
        if fastest.k == 0:
            return f"no speculation: no k is faster than k = 0{over}"
        if chosen.k == 0:
            return f"no speculation: the fastest, {leader} at {gain}, is not faster beyond chance"
        if chosen is fastest:
            found = f"{which} is the fastest, {gain}"
            if least_tied < chosen.k:
                return f"{found}; smaller tied k may not pay at all"
            if count == 1:
                return f"{found}, which says little: no k has an interval"
            if count is not None and chosen.speedup_ci is None:
                return (
                    f"{found}, which says little: all of them share a batch and end together, and "
                    "so it has no interval"
                )
            that = " with that draft" if self.with_draft else ""
            return f"{found}, and no smaller k{that} is tied with it"
        why = "and proposes less"
        if chosen.draft != fastest.draft or chosen.k > fastest.k:
            why = "which is not faster beyond chance"
        return (
            f"{which} at {self.gain_of(chosen):.2f}x cannot be told from the fastest, {leader} at "
            f"{gain}, {why}"
        )


def _nothing(reason: str) -> dict[str, Any]:
    return {"k": None, "draft": None, "tied": [], "reason": reason}
