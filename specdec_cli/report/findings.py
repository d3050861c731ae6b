"""The findings of a run: the best point by batch size, and the answer in words.

For a run that was cut short they are computed from its points. Knows nothing of HTML or plots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.records import Point
from specdec_cli.experiment.statistics.disturbed import disturbances, off_points
from specdec_cli.recipe.choices.registry import is_given
from specdec_cli.report.folder import ReportedRun

# Recorded warnings for which a report has its own words.
_SAID_ABOVE = ("acceptance is synthetic", "the weights are random")


@dataclass(frozen=True, slots=True)
class Best:
    """The best point at a batch size.

    point: None if nothing could be measured; k = 0 means no speculation. tied: other points that do
    not differ statistically from the fastest, in words. is_recorded: the run recorded it; else it
    is the fastest of the points there are. is_disturbed: the run says that times were disturbed.
    fastest: the fastest point, with which a recommended one is tied; None where nothing was
    recorded. by_category: the run's own records of the best for each category's prompts.
    """

    batch_size: int | None
    point: Point | None
    tied: tuple[str, ...]
    reason: str
    is_recorded: bool
    is_disturbed: bool = False
    fastest: Point | None = None
    by_category: Mapping[str, Any] = field(default_factory=dict)


def residual(point: Point) -> float | None:
    """The relative error of the predicted speed-up."""
    predicted, measured = point.predicted_speedup, point.speedup
    return predicted / measured - 1 if predicted is not None and measured else None


def residuals_in_words(run: ReportedRun) -> str:
    """How far predictions are off, and in which direction: a sentence for captions, or ""."""
    points = [p for p in run.points if not p.is_baseline and residual(p) is not None]
    errors = [residual(p) or 0.0 for p in points]
    if not errors:
        return ""
    low, high, mean = 100 * min(errors), 100 * max(errors), 100 * fmean(errors)
    off = [error for _, error in off_points(points)]
    known = any(p.prediction and p.prediction.speedup_error_ci for p in points)
    chance = ""
    if known:
        chance = f" {len(off)} of {len(errors)} are off by more than their intervals"
        ways = {"too high" if error > 0 else "too low" for error in off}
        chance += f", all of them {ways.pop()}." if len(ways) == 1 and len(off) > 1 else "."
    if len(errors) > 2 and (low > 0 or high < 0):
        way = "high" if low > 0 else "low"
        return (
            f" All {len(errors)} predictions are too {way}, by {abs(mean):.1f} % on average "
            f"({low:+.1f} to {high:+.1f} %).{chance}"
        )
    return f" Predictions are {mean:+.1f} % off on average ({low:+.1f} to {high:+.1f} %).{chance}"


def best_by_batch_size(run: ReportedRun) -> list[Best]:
    """The best point at each batch size, in order."""
    sizes = sorted({p.batch_size for p in run.points})
    recorded = (run.summary or {}).get("best_by_batch_size")
    found = []
    for size in sizes:
        entry = recorded.get(str(size)) if isinstance(recorded, Mapping) else None
        if entry is None and len(sizes) == 1:
            entry = (run.summary or {}).get("best")
        best = _recorded(run, size, entry) if isinstance(entry, Mapping) else None
        found.append(best or _fastest(run, size))
    return found


def _recorded(run: ReportedRun, size: int, entry: Mapping[str, Any]) -> Best | None:
    keys = [key for key in ("k", "draft", "target_tp", "draft_tp") if key in entry]
    points = [p for p in run.points if (p.is_ok or p.is_predicted) and p.batch_size == size]

    def matches(point: Point) -> bool:
        if entry.get("k") == 0:
            return point.is_baseline
        return all(getattr(point, key) == entry[key] for key in keys)

    matching = [p for p in points if matches(p)]
    if not matching:
        return None
    chosen = matching[0]
    drafts = {p.draft for p in points if p.draft is not None}
    # With several drafts, `tied` lists only ks of the chosen one.
    tied = entry.get("tied_points") if len(drafts) > 1 else None
    tied = tied or entry.get("tied")
    others = [_tied_in_words(one) for one in tied] if isinstance(tied, list) else []
    own = [_tied_in_words({"k": chosen.k} | named) for named in ({}, {"draft": chosen.draft})]
    others = [one for one in dict.fromkeys(others) if one and one not in own]
    reason = entry.get("reason")
    told = (run.summary or {}).get("warnings")
    notices = map(Notice.read, told if isinstance(told, list) else ())
    leader = entry.get("fastest")
    named = [p for p in points if isinstance(leader, Mapping) and _is_named(p, leader)]
    if not named and not run.is_comparison:
        known = [(_gain(p), p) for p in points]
        named = [max(known, key=lambda item: item[0])[1]]
    categories = entry.get("per_category")
    return Best(
        size,
        chosen,
        tuple(others),
        reason if isinstance(reason, str) else "",
        True,
        bool(disturbances(notices)),
        named[0] if named else None,
        categories if isinstance(categories, Mapping) else {},
    )


def _is_named(point: Point, entry: Mapping[str, Any]) -> bool:
    return point.k == entry.get("k") and (
        point.is_baseline or point.draft == entry.get("draft") or entry.get("draft") is None
    )


def _gain(point: Point) -> float:
    """A point's speed-up, else the predicted one."""
    found = point.predicted_speedup if point.speedup is None else point.speedup
    return found or 0.0


def _tied_in_words(one: object) -> str:
    if isinstance(one, Mapping):
        words = {
            "k": "k =",
            "draft": "with draft",
            "target_tp": "target TP",
            "draft_tp": "draft TP",
        }
        said = [
            f"{word} {one[key]}"
            for key, word in words.items()
            # At k = 0 the draft plays no part.
            if one.get(key) is not None and not (key == "draft" and one.get("k") == 0)
        ]
        return " ".join(said)
    return f"k = {one}" if isinstance(one, int) else str(one)


def _fastest(run: ReportedRun, size: int) -> Best:
    points = [p for p in run.points if p.is_ok and p.batch_size == size]
    # Speed-ups at different target TPs have different baselines.
    name = "decode_tokens_per_second"
    by_speed = run.is_comparison
    speeds = [
        (s, -p.k, p) for p in points if (s := p.number(name) if by_speed else p.speedup) is not None
    ]
    if not speeds:
        return Best(size, None, (), "", False)
    return Best(size, max(speeds, key=lambda item: item[:2])[2], (), "", False)


def setting_in_words(run: ReportedRun, point: Point) -> str:
    """The name of a point's setting: `k = 4 with draft-1b`."""
    if point.is_baseline:
        is_comparison = run.is_comparison
        return f"target TP {point.target_tp} alone" if is_comparison else "no speculation"
    if run.is_comparison:
        return f"target TP {point.target_tp} with draft TP {point.draft_tp}"
    named = f" with {run.labels[point.draft]}" if point.draft is not None else ""
    return f"k = {point.k}{named}"


def times(value: float) -> str:
    """A speed-up as text."""
    return f"{value:.2f}×"


def interval_in_words(interval: Sequence[float] | None) -> str:
    return f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""


def answer(run: ReportedRun, best: Best) -> str:
    """The finding at one batch size, a sentence or two."""
    point = best.point
    at = f"at batch size {best.batch_size}"
    if point is None:
        return f"Nothing was measured {at}."
    measured = point.speedup
    if point.is_baseline:
        which = f", on target TP {point.target_tp}" if run.is_comparison else ""
        why = f"plain decoding is fastest{which}"
        if _is_within_chance(run, best):
            why = "nothing is faster than plain decoding beyond chance"
        return f"No speculation {at}: {why}. {_runner_up(run, best)}"
    what = setting_in_words(run, point)
    fast = ""
    if point.is_predicted and (predicted := point.predicted_speedup) is not None:
        fast = f", predicted to be {times(predicted)} the speed of plain decoding"
    if measured is not None:
        fast = f", {times(measured)} the speed of plain decoding"
        fast += interval_in_words(point.speedup_ci)
    if measured is not None and measured < 1 and run.is_comparison:
        fast += ", so no speculation would be faster still"
    if not best.is_recorded:
        least = "This is the fastest point so far, without a test of ties."
        return f"Fastest {at}: {what}{fast}. {least}"
    tied = f"{_against_fastest(run, best)}{_tied_of(run, best)}"
    if best.is_disturbed:
        tied += " Not called significant: times were disturbed (see the warnings)."
    return f"{'Best' if run.is_comparison else 'Recommended'} {at}: {what}{fast}.{tied}"


def _against_fastest(run: ReportedRun, best: Best) -> str:
    """The fastest point in words, and why another one is recommended."""
    point, leader = best.point, best.fastest
    if leader is None or point is None:
        return ""
    if leader is point:
        return " It is the fastest."
    gain = f"{times(_gain(leader))}{interval_in_words(leader.speedup_ci)}"
    is_smaller = leader.draft == point.draft and point.k < leader.k
    why = "and it proposes less" if is_smaller else "which is not faster beyond chance"
    if leader.is_baseline:
        return f" The fastest is plain decoding, with which it is tied, {why}."
    return f" It is tied with the fastest, {setting_in_words(run, leader)} at {gain}, {why}."


def _tied_of(run: ReportedRun, best: Best) -> str:
    leader = best.fastest
    own = set()
    if leader is not None:
        own = {_tied_in_words({"k": leader.k} | d) for d in ({}, {"draft": leader.draft})}
    tied = [one for one in best.tied if one not in own]
    if not tied:
        return ""
    is_also = leader is not None and leader is not best.point
    return f" {'Also' if is_also else 'Statistically'} tied: {'; '.join(tied)}."


def _with_proposals(run: ReportedRun, best: Best) -> list[tuple[float, Point]]:
    """The measured points with proposals at a batch size, each after its speed-up."""
    return [
        (s, p)
        for p in run.points
        if p.batch_size == best.batch_size and not p.is_baseline and (s := p.speedup) is not None
    ]


def _is_within_chance(run: ReportedRun, best: Best) -> bool:
    """Whether plain decoding was chosen because faster points may be faster by chance."""
    faster = [s for s, _ in _with_proposals(run, best) if s > 1]
    return bool(faster) and best.is_recorded and not run.is_comparison


def _runner_up(run: ReportedRun, best: Best) -> str:
    """The best point with proposals in words, if plain decoding won."""
    rest = _with_proposals(run, best)
    if not rest:
        return "No point with proposals was measured."
    fastest, point = max(rest, key=lambda item: item[0])
    interval = interval_in_words(point.speedup_ci)
    what = f"{setting_in_words(run, point)}, is {times(fastest)}{interval}"
    return f"The best with proposals, {what}."


def headline(run: ReportedRun, bests: list[Best]) -> str:
    """The answer of the whole run, in a line."""
    found = [best for best in bests if best.point is not None]
    if not found:
        return "No point was measured."
    if len(found) == 1:
        return answer(run, found[0])
    if all(b.point is not None and b.point.is_baseline for b in found):
        if any(_is_within_chance(run, best) for best in found):
            return "No speculation: nothing is faster than plain decoding beyond chance."
        return "No speculation: plain decoding is fastest at every batch size."
    settings = {setting_in_words(run, b.point) for b in found if b.point is not None}
    if len(settings) == 1:
        speeds = [s for b in found if b.point and (s := b.point.speedup) is not None]
        span = f", {times(min(speeds))} to {times(max(speeds))}" if speeds else ""
        (what,) = settings
        word = "Best" if run.is_comparison else "Recommended"
        return f"{word} at every batch size: {what}{span} the speed of plain decoding."
    parts = [
        f"at {b.batch_size}: {setting_in_words(run, b.point)}" for b in found if b.point is not None
    ]
    which = "best" if run.is_comparison else "recommended k"
    return f"The {which} depends on batch size. A{'; '.join(parts)[1:]}."


def warnings(run: ReportedRun) -> list[Notice]:
    """Warnings for readers of the figures."""
    found = [Notice("report", told) for told in _own_warnings(run)]
    recorded = (run.summary or {}).get("warnings")
    if isinstance(recorded, list):
        told = map(Notice.read, recorded)
        found += [one for one in told if not one.message.startswith(_SAID_ABOVE)]
    return [*found, *(Notice("damaged", note) for note in run.notes)]


def _own_warnings(run: ReportedRun) -> list[str]:
    found = []
    if run.is_partial:
        found.append(
            "This run did not come to its end: there is no summary. What is shown was computed "
            "from the points that were finished."
        )
        if not run.is_comparison and run.samples:
            found[-1] += f" `specdec merge {run.path} -o NEW` makes points of all its samples."
    if is_given(run.setting("speculation", "acceptance")):
        found.append("Acceptance was given, not measured: the text is not the target's.")
    if "dummy" in (run.setting("target", "load_format"), run.setting("draft", "load_format")):
        found.append(
            "Random weights of a model's shape were run: times are real, acceptance is no pair's."
        )
    return found
