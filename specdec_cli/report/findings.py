"""Finds the best point at each batch size or request rate of a run, and describes it in sentences.

If the run was cut short, it recorded no conclusions, so only its points are used.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean

from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.conclusions import Best, BestPair, Fastest
from specdec_cli.experiment.folders.records import Point, rate_name
from specdec_cli.experiment.statistics.noise import disturbances, off_points
from specdec_cli.experiment.sweep.recommend import in_words
from specdec_cli.recipe.choices.registry import is_given
from specdec_cli.report.folder import ReportedRun

_UNTESTED = "This is the fastest point so far; ties were not tested."
_speed = attrgetter("speed")


@dataclass(frozen=True, slots=True)
class Finding:
    """The finding at the batch size or request rate of the point `at`.

    point: the best point, which has k = 0 if speculation does not help; None if there is none.
    recorded: the best point as the run recorded it. None if the run ended before it recorded one;
        `point` is then the fastest measured point.
    tied: names of other points whose speeds do not differ significantly from the fastest.
    is_disturbed: whether the run warned that something disturbed its times.
    fastest: the fastest point. It may differ from `point`, because a point that is statistically
        tied with it may be recommended. None if it is unknown, if nothing was recorded, and for
        compare-tp.
    """

    at: Point
    point: Point | None
    recorded: Best | BestPair | None = None
    tied: tuple[str, ...] = ()
    is_disturbed: bool = False
    fastest: Point | None = None

    @property
    def reason(self) -> str:
        return self.recorded.reason if self.recorded is not None else ""

    @property
    def verdict(self) -> str:
        """The verdict that the run recorded: "inconclusive" if it recorded no best point, and
        "none" if the record has no verdict, for example because all points were overloaded."""
        return "inconclusive" if self.recorded is None else self.recorded.verdict or "none"

    @property
    def is_open(self) -> bool:
        """True if the evidence is inconclusive, so that the best point is not a recommendation."""
        return self.recorded is not None and self.verdict == "inconclusive"

    @property
    def advised(self) -> Point | None:
        """The best point; None if the evidence is inconclusive, so that nothing is advised."""
        return None if self.is_open else self.point

    @property
    def by_category(self) -> Mapping[str, Best]:
        """The run's own recommendation for each category."""
        return self.recorded.per_category if isinstance(self.recorded, Best) else {}


def longest_proposals(run: ReportedRun) -> dict[str, Point]:
    """Return the point with the largest k of each draft, by the draft's label.

    If several points have this k, the one with the smallest batch size is returned. Points whose
    acceptance is unknown are left out; some servers do not report it. For compare-tp, the result is
    a single point with the key "all".
    """
    longest: dict[str, Point] = {}
    for point in run.points:
        is_known = point.metrics is not None and point.metrics.acceptance_rate_per_pos is not None
        if not is_known or point.is_baseline:
            continue
        name = "all" if run.is_comparison else run.labels[point.draft]
        if name not in longest or point.k > longest[name].k:
            longest[name] = point
    return dict(sorted(longest.items()))


def residual(point: Point) -> float | None:
    """Return the relative error of the predicted speed-up; None if it is not known."""
    predicted, measured = point.predicted_speedup, point.speedup
    return predicted / measured - 1 if predicted is not None and measured else None


def residuals_in_words(run: ReportedRun) -> str:
    """Describe the mean and the range of prediction errors, for captions; "" if there are no
    predictions."""
    points = [p for p in run.points if not p.is_baseline and residual(p) is not None]
    errors = [residual(p) or 0.0 for p in points]
    if not errors:
        return ""
    low, high, mean = 100 * min(errors), 100 * max(errors), 100 * fmean(errors)
    off = [error for _, error in off_points(points)]
    tested = [of for p in points if (of := p.prediction) is not None and of.speedup_error_ci]
    known = [of for of in tested if of.drafts_of_k is None]
    chance = ""
    if known:
        which = "" if len(known) == len(errors) else " with an interval"
        chance = f" {len(off)} of {len(known)}{which} are off by more than their intervals"
        ways = {"too high" if error > 0 else "too low" for error in off}
        chance += f", all of them {ways.pop()}." if len(ways) == 1 and len(off) > 1 else "."
    if len(errors) > 2 and (low > 0 or high < 0):
        way = "high" if low > 0 else "low"
        return (
            f" All {len(errors)} predictions are too {way}, by {abs(mean):.1f} % on average "
            f"({low:+.1f} to {high:+.1f} %).{chance}"
        )
    return f" Predictions are {mean:+.1f} % off on average ({low:+.1f} to {high:+.1f} %).{chance}"


def best_by_batch_size(run: ReportedRun) -> list[Finding]:
    """Find the best point at each batch size or rate, in order."""
    found = []
    for level in sorted({p.level for p in run.points}):
        at = [p for p in run.points if p.level == level]
        best: Best | BestPair | None = run.summary.best_by_batch_size.get(str(at[0].batch_size))
        if (rate := at[0].request_rate) is not None:
            best = run.summary.best_by_request_rate.get(rate_name(rate))
        named = _recorded(run, at, best) if best is not None else None
        found.append(named or _fastest(run, at))
    return found


def _recorded(run: ReportedRun, every: Sequence[Point], best: Best | BestPair) -> Finding | None:
    points = [p for p in every if p.is_ok or p.is_predicted]
    if points and best.k is None:
        return Finding(every[0], None, best)
    chosen = next((p for p in points if _is_named(p, best)), None)
    if chosen is None:
        return None
    if isinstance(best, BestPair):
        # In compare-tp, the record names the fastest pair of target TP and draft TP, even if plain
        # decoding is faster.
        plain = max((p for p in points if p.is_baseline), key=_speed, default=chosen)
        is_slower = best.verdict is None and plain.speed > chosen.speed
        chosen = plain if best.verdict == "none" or is_slower else chosen
    drafts = {p.draft for p in points if p.draft is not None}
    if isinstance(best, BestPair):
        tied = [f"target TP {one.target_tp} draft TP {one.draft_tp}" for one in best.tied]
        fastest = None
    else:
        # `tied` lists only ks of the chosen draft; `tied_points` includes points of other drafts.
        of_drafts = best.tied_points if len(drafts) > 1 else ()
        tied = [_named(one.k, one.draft) for one in of_drafts] or [f"k = {k}" for k in best.tied]
        leader = best.fastest
        fastest = next((p for p in points if leader and _is_named(p, leader)), None)
        if fastest is None and every[0].request_rate is None:
            fastest = max(points, key=_gain)
    own = (f"k = {chosen.k}", _named(chosen.k, chosen.draft))
    return Finding(
        chosen,
        chosen,
        best,
        tuple(one for one in dict.fromkeys(tied) if one not in own),
        bool(disturbances(run.summary.warnings, every[0].batch_size, every[0].request_rate)),
        fastest,
    )


def _is_named(point: Point, best: Best | BestPair | Fastest) -> bool:
    if isinstance(best, BestPair):
        degrees = (best.k, best.target_tp, best.draft_tp)
        return (point.k, point.target_tp, point.draft_tp) == degrees
    return point.k == best.k and (point.is_baseline or point.draft == best.draft)


def _gain(point: Point) -> float:
    """Return a point's measured speed-up, or the predicted one if the point was not to be measured;
    0 if it is unknown."""
    found = point.predicted_speedup if point.is_predicted else point.speedup
    return found or 0.0


def _over_plain(
    run: ReportedRun, best: Finding, point: Point
) -> tuple[float, Sequence[float] | None]:
    """Return a point's speed-up over plain decoding, with its interval; 0 and None if unknown.

    In compare-tp this is over the fastest plain decoding of any target TP, as the run recorded it
    for the best pair. The speed-up of a point is over its own target TP only.
    """
    pair = best.recorded
    if isinstance(pair, BestPair) and pair.speedup_vs_plain is not None and _is_named(point, pair):
        return pair.speedup_vs_plain, pair.speedup_vs_plain_ci
    if run.is_comparison:
        level = [p for p in run.points if p.level == point.level and p.is_baseline]
        plain = max(map(_speed, level), default=0.0)
        return point.speed / plain if plain else 0.0, None
    if not point.is_predicted:
        return _gain(point), point.speedup_ci
    return _gain(point), point.prediction.speedup_ci if point.prediction is not None else None


def _named(k: int, draft: str | None) -> str:
    """Name a point by its k and its draft. The draft is left out at k = 0 or if it is None."""
    return in_words(k, draft, with_draft=draft is not None)


def _fastest(run: ReportedRun, every: Sequence[Point]) -> Finding:
    # Compare tokens/s in compare-tp, where each target TP has its own baseline for speed-ups.
    gain = _speed if run.is_comparison else _gain
    known = [p for p in every if p.is_ok and gain(p)]
    fastest = max(known, key=lambda p: (gain(p), -p.k), default=None)
    return Finding(every[0], fastest)


def setting_in_words(run: ReportedRun, point: Point) -> str:
    """Name a point's setting, such as `k = 4 with draft-1b`."""
    if point.is_baseline:
        return f"target TP {point.target_tp} alone" if run.is_comparison else "no speculation"
    if run.is_comparison:
        return f"target TP {point.target_tp} with draft TP {point.draft_tp}"
    named = f" with {run.labels[point.draft]}" if point.draft is not None else ""
    return f"k = {point.k}{named}"


def times(value: float) -> str:
    """Write a speed-up as text."""
    return f"{value:.2f}×"


def interval_in_words(interval: Sequence[float] | None) -> str:
    return f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""


def gain_in_words(run: ReportedRun, best: Finding, point: Point, unit: str = "") -> str:
    """Describe the speed-up over plain decoding that was measured at a point, or predicted for it,
    with its interval; "" if it is unknown. In compare-tp it is over the fastest plain decoding of
    any target TP.

    best: the finding at the point's batch size or rate. unit: words after the number.
    """
    gain, interval = _over_plain(run, best, point)
    return f"{times(gain)}{unit}{interval_in_words(interval)}" if gain else ""


def answer(run: ReportedRun, best: Finding) -> str:
    """Describe the finding at one batch size in a sentence or two."""
    point = best.point
    at = best.at.at_level
    if best.is_open:
        return f"Inconclusive {at}: {best.reason}."
    if point is None:
        return f"Nothing was measured {at}."
    if point.is_baseline:
        which = f", on target TP {point.target_tp}" if run.is_comparison else ""
        why = f"plain decoding is fastest{which}"
        if _is_within_chance(run, best):
            why = "nothing is faster than plain decoding beyond chance"
        told = "No point with proposals was measured."
        if any(p.load and p.load.overloaded for p in run.points if p.level == point.level and p.k):
            told = "Every point with proposals is overloaded."
        if (second := fastest_with_proposals(run, best)) is not None:
            how = "is predicted to be" if second.is_predicted else "is"
            what = setting_in_words(run, second)
            told = f"The best with proposals, {what}, {how} {gain_in_words(run, best, second)}."
        if best.recorded is None:
            return f"Fastest {at}: {setting_in_words(run, point)}. {told} {_UNTESTED}"
        return f"No speculation {at}: {why}. {told}"
    what = setting_in_words(run, point)
    fast = gain_in_words(run, best, point, " the speed of plain decoding")
    fast = fast and f", {'predicted to be ' if point.is_predicted else ''}{fast}"
    if best.recorded is None:
        return f"Fastest {at}: {what}{fast}. {_UNTESTED}"
    tied = _against_fastest(run, best)
    if best.is_disturbed:
        tied += " Not called significant: times were disturbed (see the warnings)."
    return f"{'Best' if run.is_comparison else 'Recommended'} {at}: {what}{fast}.{tied}"


def _against_fastest(run: ReportedRun, best: Finding) -> str:
    """Name the fastest point and the points tied with it. If another point is recommended, say
    why."""
    point, leader = best.point, best.fastest
    own = {f"k = {leader.k}", _named(leader.k, leader.draft)} if leader is not None else ()
    others = "; ".join(one for one in best.tied if one not in own)
    how = "Statistically" if leader is None or leader is point else "Also"
    also = f" {how} tied: {others}." if others else ""
    if leader is None or point is None:
        return also
    if leader is point:
        return f" It is the fastest.{also}"
    gain = f"{'a predicted ' if leader.is_predicted else ''}{gain_in_words(run, best, leader)}"
    is_smaller = leader.draft == point.draft and point.k < leader.k
    why = "and it proposes less" if is_smaller else "which is not faster beyond chance"
    if leader.is_baseline:
        return f" The fastest is plain decoding, with which it is tied, {why}.{also}"
    return f" It is tied with the fastest, {setting_in_words(run, leader)} at {gain}, {why}.{also}"


def fastest_with_proposals(run: ReportedRun, best: Finding) -> Point | None:
    """Return the fastest point with proposals at the finding's batch size or rate: the one that the
    run recorded as the fastest or, if it recorded none or plain decoding, the one with the highest
    measured or predicted speed-up. In compare-tp, where each target TP has its own baseline,
    tokens/s are compared instead. Returns None if no point with proposals has a speed-up."""
    if best.fastest is not None and not best.fastest.is_baseline and _gain(best.fastest):
        return best.fastest
    points = [p for p in run.points if p.level == best.at.level and not p.is_baseline]
    by = _speed if run.is_comparison else _gain
    return max(filter(_gain, points), key=by, default=None)


def _is_within_chance(run: ReportedRun, best: Finding) -> bool:
    """Return True if plain decoding was chosen although another point was measured, or predicted to
    be, faster. This happens if the difference may be due to chance."""
    point, plain = fastest_with_proposals(run, best), best.point
    if point is None or plain is None or best.recorded is None:
        return False
    return _over_plain(run, best, point)[0] > 1


def headline(run: ReportedRun, bests: list[Finding]) -> str:
    """Return the whole run's answer in one line."""
    found = [best for best in bests if best.point is not None or best.is_open]
    if not found:
        return "No point was measured."
    if len(found) == 1:
        return answer(run, found[0])
    if any(best.is_open or best.recorded is None for best in found):
        return " ".join(answer(run, best) for best in found)
    if all(b.point is not None and b.point.is_baseline for b in found):
        if any(_is_within_chance(run, best) for best in found):
            return "No speculation: nothing is faster than plain decoding beyond chance."
        return f"No speculation: plain decoding is fastest at every {_levels(found, bests)}."
    settings = {setting_in_words(run, b.point) for b in found if b.point is not None}
    if len(settings) == 1:
        measured = [(b, b.point) for b in found if b.point and not b.point.is_predicted]
        speeds = [s for b, point in measured if (s := _over_plain(run, b, point)[0])]
        span = ""
        if len(speeds) == len(found):  # speed-ups are missing where plain decoding was overloaded
            span = f", {times(min(speeds))} to {times(max(speeds))} the speed of plain decoding"
        (what,) = settings
        word = "Best" if run.is_comparison else "Recommended"
        return f"{word} at every {_levels(found, bests)}: {what}{span}."
    parts = [
        f"at {b.at.batch_size if (r := b.at.request_rate) is None else rate_name(r)}: "
        f"{setting_in_words(run, b.point)}"
        for b in found
        if b.point is not None
    ]
    which = "best" if run.is_comparison else "recommended k"
    return f"The {which} depends on {_levels(found, bests)}. A{'; '.join(parts)[1:]}."


def _levels(found: Sequence[Finding], every: Sequence[Finding]) -> str:
    which = "batch size" if found[0].at.request_rate is None else "request rate"
    return which if len(found) == len(every) else f"{which} with a result"


def warnings(run: ReportedRun) -> list[Notice]:
    """Return warnings for readers of the report: warnings that the report adds, the warnings that
    the run recorded, and notes on damaged files."""
    told = []
    if run.is_partial:
        told.append(
            "This run is incomplete: there is no summary. The report is based on the finished "
            "points."
        )
        if not run.is_comparison and run.has_samples:
            told[-1] += f" `specdec merge {run.path} -o NEW` computes points from all its samples."
    recorded = run.summary.warnings
    is_said = any(one.code == "acceptance_rule" for one in recorded)
    if is_given(run.setting("speculation", "acceptance")) and not is_said:
        told.append("Acceptance was given, not measured: the text is not the target's.")
    if "dummy" in (run.setting("target", "load_format"), run.setting("draft", "load_format")):
        told.append(
            "The weights are random: times are real, but acceptance is not that of a real pair."
        )
    return [
        *(Notice("report", one) for one in told),
        *(one for one in recorded if one.code != "random_weights"),  # it is reworded above
        *(Notice("damaged", note) for note in run.notes),
    ]
