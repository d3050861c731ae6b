"""The conclusions of a comparison: which pair of TP degrees is best and why, at which batch sizes
the best pair changes, and whether all pairs generated the same tokens.

Everything is computed from points and samples.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from operator import attrgetter
from statistics import fmean, stdev
from typing import Any

from specdec_cli.core.figures import STAGES, Metrics
from specdec_cli.errors import Notice
from specdec_cli.experiment.compare.comparison_records import ComparisonRecords, merge_repeats
from specdec_cli.experiment.folders.conclusions import BestPair, Decision, Degrees, Tokens
from specdec_cli.experiment.folders.records import Pair, Point, Sample
from specdec_cli.experiment.folders.samples import without_errors
from specdec_cli.experiment.points import DISTURBED_BEYOND
from specdec_cli.experiment.statistics import stats
from specdec_cli.experiment.statistics.evidence import claimed, judged
from specdec_cli.experiment.statistics.factors import choose, reach_of
from specdec_cli.experiment.statistics.noise import disturbances
from specdec_cli.experiment.statistics.promise import compare_tokens
from specdec_cli.experiment.statistics.stats import SumRatio, measured_speed

Verdict = dict[str, Any]

_NOTABLE = 0.1  # stages with a smaller share of the whole difference are not mentioned
_ALIKE = 1e-6  # milliseconds; smaller differences are rounding
_speed = attrgetter("speed")
_SAME = 0.01  # smaller relative differences in tokens per round are not mentioned


def verdict_of(records: ComparisonRecords, warnings: Sequence[Notice] = ()) -> Verdict:
    """Compute the fields of the document that summarise all points: the best pairs, the batch sizes
    at which they change, and whether all pairs generated the same tokens.

    warnings: the run's warnings. If they say that something disturbed the times at a batch size, no
        difference is called significant there.
    """
    settings = records.settings
    sizes = settings.batch_sizes
    noise = {b: disturbances(warnings, b) for b in sizes}
    overall = {b: best_of(records, settings.target_tps, b, noise[b]) for b in sizes}
    by_target = {
        t: {b: best_of(records, [t], b, noise[b]) for b in sizes} for t in settings.target_tps
    }
    return {
        "best": overall[sizes[0]],
        "best_by_batch_size": {str(b): best for b, best in overall.items()},
        "best_by_target_tp": {
            str(t): {str(b): best for b, best in row.items()} for t, row in by_target.items()
        },
        "flips": [flip for t, row in by_target.items() for flip in _flips(t, row)],
        "tokens": tokens_of(records),
    }


def best_of(
    records: ComparisonRecords,
    target_tps: Iterable[int],
    batch_size: int,
    disturbed: Sequence[Notice] = (),
) -> BestPair:
    """Find the fastest pair at a batch size among the pairs with these target TPs. Also find the
    pairs tied with it, and the stage of a round in which the fastest pair saves the most time over
    the next best draft TP.

    Speeds are compared on the same prompts. A pair is tied if the 95 % interval over prompts does
    not show that it is slower than the fastest. Speeds also vary each time the ranks are started,
    which the interval does not include. A stage is named only if nothing disturbed the times, the
    fastest pair saves time in it, and the 95 % interval of that time does not contain 0.
    """
    chosen, settings = set(target_tps), records.settings
    at = [p for p in records.points if p.is_ok and p.batch_size == batch_size]
    points = [p for p in at if p.target_tp in chosen]
    proposing = [p for p in points if p.k > 0]
    candidates = [p for p in proposing if p.impossible_speedup is None]
    if not candidates:
        reason = (
            f"nothing was compared: {DISTURBED_BEYOND}" if proposing else "no pair was measured"
        )
        found: dict[str, Any] = dict.fromkeys(BestPair.model_fields)
        found |= {"tied": [], "reason": reason, "significant": False, "verdict": "inconclusive"}
        return BestPair(**found)
    best = max(candidates, key=_speed)
    # Compare speeds only on prompts that ran in all pairs.
    own = [records.of(Pair.of(p), batch_size, settings.k) for p in candidates]
    common = sorted(set.intersection(*(set(without_errors(samples)) for samples in own)))
    tied: list[Point] = []
    if common:
        measures = [measured_speed([samples[i] for i in common]) for samples in own]
        first, ties = choose(measures, settings.seed)
        best, tied = candidates[first], [candidates[i] for i in ties if i != first]
    plain = max((p for p in points if p.k == 0), key=_speed, default=None)
    rivals = [p for p in candidates if p.target_tp == best.target_tp and p is not best]
    rival = max(rivals, key=_speed, default=None)
    differing, decided = dict[str, float](), None
    if rival is not None and not disturbed:
        differing = _differing(records, best, rival)
        stage = max(differing, key=lambda name: differing[name], default=None)
        if stage is not None and (saved := differing[stage]) > 0:
            decided = Decision(stage=stage, saved_ms=saved, draft_tp=rival.draft_tp)
    gain = _against_plain(records, best, plain)
    ends = None if gain is None else stats.interval(gain, settings.seed)
    measured = claim = None
    if gain is not None:
        tried = [_against_plain(records, p, plain) for p in candidates]
        alike = [one for one in tried if one and len(one.columns) == len(gain.columns)]
        claim = claimed(gain.value, ends, reach_of(alike))
        measured = gain.value, claim, len(gain.columns), _seconds(records, candidates), batch_size
    verdict, needed, told = judged(claim, [ends], measured, disturbed)
    return BestPair(
        target_tp=best.target_tp,
        draft_tp=best.draft_tp,
        k=best.k,
        tied=[Degrees(target_tp=p.target_tp or 0, draft_tp=p.draft_tp) for p in tied],
        reason=_reason(best, rival, plain, gain, differing) + told,
        significant=verdict == "use",
        verdict=verdict,
        needed=needed,
        decided_by=decided,
        decode_tokens_per_second=best.speed,
        speedup=best.speedup,
        speedup_vs_equal_tp=best.speedup_vs_equal_tp,
        speedup_vs_plain=None if gain is None else gain.value,
        speedup_vs_plain_ci=ends,
    )


def _against_plain(records: ComparisonRecords, best: Point, plain: Point | None) -> SumRatio | None:
    """Divide the speed of a pair by that of the fastest plain decoding, which may be at another
    target TP."""
    settings, size = records.settings, best.batch_size
    pairs = [Pair.of(best)]
    if plain is not None and plain.target_tp != best.target_tp:
        pairs = [p for p in settings.pairs if p.target_tp == plain.target_tp]
    whole = [records.of(p, size, 0) for p in pairs if records.is_complete(p, size)]
    own = without_errors(records.of(Pair.of(best), size, settings.k))
    return stats.speedup(own, without_errors(merge_repeats(whole)))


def _seconds(records: ComparisonRecords, points: Iterable[Point]) -> float:
    """Add up the seconds that the pairs of these points spent in prefill and rounds, with those at
    k = 0 on the same ranks."""
    taken = (records.of(Pair.of(p), p.batch_size, k).values() for p in points for k in (0, p.k))
    return sum(sum(sample.seconds) for samples in taken for sample in samples)


def _differing(records: ComparisonRecords, best: Point, rival: Point) -> dict[str, float]:
    """Return how many milliseconds per round `best` saves over `rival` in each stage. Leave out
    stages whose difference may be due to chance: those whose 95 % interval over prompts contains 0.
    `host` is the part of a round outside all stages."""
    ours, theirs = (
        without_errors(records.of(Pair.of(p), p.batch_size, p.k)) for p in (best, rival)
    )
    common = sorted(ours.keys() & theirs.keys())
    saved = _saved(best, rival)
    if len(common) < stats.FEWEST:
        return {}
    found = {}
    for stage in saved:
        apart = [_stage_ms(theirs[i], stage) - _stage_ms(ours[i], stage) for i in common]
        reach = stats.student(len(apart) - 1) * stdev(apart) / len(apart) ** 0.5
        if abs(fmean(apart)) > reach + _ALIKE:
            found[stage] = saved[stage]
    return found


def _stage_ms(sample: Sample, stage: str) -> float:
    """Return the mean time in milliseconds that a stage takes per round of this prompt, over all
    repeats."""
    rounds = max(sum(sample.round_share), 1e-9)
    if stage == "host":
        spent = 1e3 * sum(sample.decode_seconds) - sum(map(sum, sample.stage_ms.values()))
    else:
        spent = sum(sample.stage_ms.get(stage, ()))
    return spent / rounds


def _metrics(point: Point) -> Metrics:
    assert point.metrics is not None, "it is ok"
    return point.metrics


def _reason(
    best: Point,
    rival: Point | None,
    plain: Point | None,
    gain: SumRatio | None,
    differing: Mapping[str, float],
) -> str:
    own = f", {best.speedup:.2f}x k = 0" if best.speedup is not None else ""
    what = "the fastest"
    if plain is not None and gain is not None and gain.value < 1:
        slower = f"slower than plain decoding at target TP {plain.target_tp} ({gain.value:.2f}x)"
        what += f" pair, and {slower}"
    said = f"{_name(best)} is {what}: {best.speed:.1f} tokens/s{own}"
    return said if rival is None else f"{said}; {_against(best, rival, differing)}"


def _saved(best: Point, rival: Point) -> dict[str, float]:
    """Return the milliseconds per round that the best pair saves in each stage. `host` is the part
    of a round outside all stages."""
    ours, theirs = _metrics(best), _metrics(rival)
    parts = {stage: theirs.stage_ms(stage) - ours.stage_ms(stage) for stage in STAGES}
    return parts | {"host": _round_ms(theirs) - _round_ms(ours) - sum(parts.values())}


def _round_ms(metrics: Metrics) -> float:
    assert metrics.round_ms is not None, "our own engine records its rounds"
    return metrics.round_ms


def _name(point: Point) -> str:
    return f"target TP {point.target_tp} with draft TP {point.draft_tp}"


def _against(best: Point, rival: Point, differing: Mapping[str, float]) -> str:
    """Describe how the best pair's round differs from that of the next best pair at the same target
    TP, stage by stage."""
    ours, theirs = _metrics(best), _metrics(rival)
    name = f"draft TP {rival.draft_tp}"
    faster = _round_ms(theirs) - _round_ms(ours)
    parts = _saved(best, rival)
    whole = sum(map(abs, parts.values()))
    ranked = sorted(parts, key=lambda stage: -abs(parts[stage]))
    told = [s for s in ranked if s in differing and abs(parts[s]) >= _NOTABLE * whole]
    words = ", ".join(f"{stage} {_difference(parts[stage])}" for stage in told)
    said = (
        f"a round takes {ours.round_ms:.2f} ms, {_difference(faster)} than with {name}"
        f"{f' ({words})' if words else ''}"
    )
    lengths = [m.mean_acceptance_length or 1.0 for m in (ours, theirs)]
    if abs(lengths[0] / lengths[1] - 1) > _SAME:
        said += f", and writes {lengths[0]:.2f} tokens instead of {lengths[1]:.2f}"
    if told[:1] == ["draft"] and faster > 0:
        which = "less" if (best.draft_tp or 0) < (rival.draft_tp or 0) else "more"
        why = f"splitting the draft's weights saves {which} than communication between ranks costs"
        said += f": {why}"
    return said


def _difference(milliseconds: float) -> str:
    """Format a saving as text, such as `0.40 ms less`. A positive number means that the best pair
    takes less time."""
    return f"{abs(milliseconds):.2f} ms {'less' if milliseconds >= 0 else 'more'}"


def _flips(target_tp: int, row: Mapping[int, BestPair]) -> list[dict[str, Any]]:
    """List the batch sizes at which the best draft TP for a target TP changes.

    row: the best pair by batch size.
    In the result, `is_tied` tells whether the previous best draft TP is tied with the new one.
    """
    known = [(b, best) for b, best in sorted(row.items()) if best.draft_tp is not None]
    return [
        {
            "target_tp": target_tp,
            "batch_size": batch_size,
            "from": before.draft_tp,
            "to": best.draft_tp,
            "is_tied": Degrees(target_tp=target_tp, draft_tp=before.draft_tp) in best.tied,
        }
        for (_, before), (batch_size, best) in pairwise(known)
        if before.draft_tp != best.draft_tp
    ]


def summary_lines(verdict: Verdict) -> list[str]:
    """Format the verdict as lines of text: the best pair for each batch size, then the best draft
    TP for each target TP."""
    overall: Mapping[str, BestPair] = verdict["best_by_batch_size"]
    lines = [_line(size, best, overall) for size, best in overall.items()]
    for target_tp, row in verdict["best_by_target_tp"].items():
        known = {size: best for size, best in row.items() if best.draft_tp is not None}
        if target_tp != "1" and known:
            lines.append(_degrees_line(target_tp, known))
            lines += [
                f"  {_line(size, best, overall)}"
                for size, best in known.items()
                if best.target_tp != overall[size].target_tp
            ]
    return lines


def _line(size: str, best: BestPair, sizes: Mapping[str, BestPair]) -> str:
    where = f"batch size {size}: " if len(sizes) > 1 else ""
    doubt = {"inconclusive": "inconclusive: ", "none": "no speculation: "}.get(
        str(best.verdict), ""
    )
    names = [f"{p.target_tp} x {p.draft_tp}" for p in best.tied]
    tied = f" (tied: {', '.join(names)})" if names else ""
    return f"{where}{doubt}{best.reason}{tied}"


def _degrees_line(target_tp: str, row: Mapping[str, BestPair]) -> str:
    """Format the best draft TPs for a target TP as a line, such as `at target TP 4 the best draft
    TP is 1 (tied: 2) at batch size 1, 8; 4 at batch size 32`."""
    parts = []

    def degree_of(item: tuple[str, BestPair]) -> str:
        best = item[1]
        ties = [str(p.draft_tp) for p in best.tied if str(p.target_tp) == target_tp]
        tied = f" (tied: {', '.join(ties)})" if ties else ""
        return f"{best.draft_tp}{tied}"

    for degree, group in groupby(row.items(), key=degree_of):
        parts.append(f"{degree} at batch size {', '.join(size for size, _ in group)}")
    # "best" reads as advice, so do not use it if a verdict is inconclusive.
    word = "fastest" if any(b.verdict == "inconclusive" for b in row.values()) else "best"
    return f"at target TP {target_tp} the {word} draft TP is {'; '.join(parts)}"


def tokens_of(records: ComparisonRecords) -> Tokens:
    """Compute the document's `tokens` field: whether all pairs generated the same tokens."""
    settings = records.settings
    keys = (
        settings.keys(pair, batch_size)
        for pair in sorted(settings.pairs)
        for batch_size in settings.batch_sizes
        if records.is_complete(pair, batch_size)
    )
    return compare_tokens(settings, {key: records.kept.samples[key] for of in keys for key in of})
