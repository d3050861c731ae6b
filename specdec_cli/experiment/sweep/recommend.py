"""Recommends a draft and a k: computes the field `best` of a sweep's document."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.conclusions import Arm, Best, Fastest
from specdec_cli.experiment.folders.records import Key, Point
from specdec_cli.experiment.folders.samples import Samples, prompts_by_category
from specdec_cli.experiment.statistics.evidence import Ends, claimed, judged
from specdec_cli.experiment.statistics.factors import choose, reach_of
from specdec_cli.experiment.statistics.stats import FEWEST, SumRatio
from specdec_cli.experiment.sweep.gains import Gains, seconds_of
from specdec_cli.recipe.choices.registry import without_draft
from specdec_cli.text import counted


def recommend(
    points: Sequence[Point], gains: Gains, seed: int, disturbed: Sequence[Notice] = ()
) -> Best:
    """Recommend one of the points at one batch size. The points may have different drafts.

    Candidates are the points that are tied with the fastest point and significantly faster than
    k = 0, as the best of all points that were tried (`stats.joint_reach`). The recommended draft is
    that of the fastest candidate, and k is the smallest among the candidates with that draft.
    Without candidates, k is 0 ("no speculation"). If some points were predicted instead of
    measured, predicted speed-ups are compared, by the same rules.

    disturbed: warnings that something disturbed the times. If there are any, no recommendation is
        called significant.
    """
    candidates = list(gains.points)
    if not candidates:
        return Best.none(gains.why_none, verdict="inconclusive")
    first, alike = choose([gains.of(p) for p in candidates], seed)
    fastest, tied = candidates[first], [candidates[i] for i in alike]
    proposing = [p for p in candidates if p.k]
    reach = reach_of([gains.of(p) for p in proposing])

    def claim(point: Point) -> Ends:
        return claimed(gains.value(point), gains.interval(point), reach)

    def pays(point: Point) -> bool:
        # A speed-up without an interval only has to be above 1.
        ends = claim(point)
        return point.k > 0 and (ends[0] if ends is not None else gains.value(point)) > 1.0

    paying = [p for p in tied if pays(p)]
    if paying:
        # Take the draft of the fastest point or, if that point is not significantly faster than
        # k = 0, of the fastest point that is. A smaller k is preferred only for the same draft,
        # since proposals of different drafts differ in cost.
        draft = max(paying, key=lambda p: (p is fastest, gains.value(p))).draft
        chosen = min((p for p in paying if p.draft == draft), key=lambda p: p.k)
    else:
        chosen = next(p for p in candidates if p.k == 0)
    leader = max(proposing, key=gains.value, default=None)
    arm = chosen if chosen.k or leader is None else leader
    # Add the chosen k, which `tied` may lack: after an interruption, the comparison with k = 0 and
    # the comparison with the other points may be over different prompts.
    same_draft = {chosen.k} | {p.k for p in tied if p.draft == arm.draft or p.k == 0}
    ends = [gains.interval(p) for p in proposing]
    own = claim(chosen) if chosen.k else None
    found = None
    if leader is not None:
        measured = len(gains.prompts), gains.seconds
        found = gains.value(leader), claim(leader), *measured, leader.batch_size
    verdict, needed, doubt = judged(own, ends, found, disturbed)
    basis = ""
    if gains.is_predicted:
        parts = counted(gains.num_parts, "part")
        basis = f"predicted from the texts of the largest k and {parts} of the time curve: "
    told = _reason(
        *(chosen, fastest, gains, min(same_draft)),
        with_draft=has_several_drafts(points),
        is_open=verdict == "inconclusive",
    )
    return Best(
        k=chosen.k,
        draft=chosen.draft,
        tied=sorted(same_draft),
        reason=f"{basis}{told}{doubt}",
        speedup=gains.value(chosen),
        fastest=Fastest(k=fastest.k, draft=fastest.draft, speedup=gains.value(fastest)),
        tied_points=[Arm(k=p.k, draft=p.draft) for p in tied],
        significant=verdict == "use",
        verdict=verdict,
        needed=needed,
    )


def recommend_by_category(
    gains: Gains, samples: Mapping[Key, Samples], seed: int, disturbed: Sequence[Notice] = ()
) -> dict[str, Best]:
    """Recommend a point for each category. Returns an empty dict if there are fewer than two
    categories, or if speed-ups are predicted."""
    if gains.is_predicted or not gains.points:
        return {}
    prompts = sorted(gains.prompts)
    place_of = {index: place for place, index in enumerate(prompts)}
    found = {}
    for name, chosen in prompts_by_category(samples[Key.of(gains.points[0])], prompts).items():
        rows = [place_of[index] for index in chosen]
        points = [
            p.model_copy(update={"speedup": own.speedup, "speedup_ci": own.speedup_ci})
            for p in gains.points
            if (own := p.per_category.get(name)) is not None and own.speedup is not None
        ]
        whole = {Key.of(p): m for p in points if isinstance(m := gains.of(p), SumRatio)}
        part = Gains(
            points,
            {key: replace(m, columns=m.columns[rows]) for key, m in whole.items()},
            prompts=frozenset(chosen),
            seconds=seconds_of(samples, points, chosen),
            why_none="no point could be compared with k = 0",
        )
        found[name] = recommend(points, part, seed, disturbed)
    return found


def has_several_drafts(points: Sequence[Point]) -> bool:
    """Return True if the points have several drafts, so that k alone does not identify a point."""
    return len({p.draft for p in points if p.k}) > 1


def in_words(k: int, draft: str | None, *, with_draft: bool) -> str:
    """Describe a point to the user by its k and, if `with_draft` is true and k is not 0, by its
    draft, or by its method if that needs no draft."""
    if not with_draft or not k:
        return f"k = {k}"
    return f"k = {k} with {'' if without_draft(draft) else 'draft '}{draft}"


def _reason(
    chosen: Point, fastest: Point, gains: Gains, least_tied: int, *, with_draft: bool, is_open: bool
) -> str:
    """Explain the recommendation to the user.

    least_tied: the smallest tied k with the chosen draft.
    is_open: whether the verdict is inconclusive.
    """
    gain_of, count = gains.value, len(gains.prompts)
    over = f" over {counted(count, 'prompt')}"
    gain = f"{gain_of(fastest):.2f}x the speed of k = 0{over}"
    which, leader = (in_words(p.k, p.draft, with_draft=with_draft) for p in (chosen, fastest))
    none = "" if is_open else "no speculation: "
    if not any(p.k for p in gains.points):
        return f"no k but k = 0 was measured{over} (--k 0-8 measures others)"
    if fastest.k == 0:
        ends = [e for p in gains.points if p.k and (e := gains.interval(p)) is not None]
        is_possible = not ends or any(high > 1.0 for _, high in ends)
        doubt = ", but one may be" if is_open and is_possible else ""
        return f"{none}no k is faster than k = 0{over}{doubt}"
    if chosen.k == 0:
        own, tried = gains.interval(fastest), sum(p.k > 0 for p in gains.points)
        among = f" as the best of {tried}" if own is not None and own[0] > 1.0 else ""
        return f"{none}the fastest, {leader} at {gain}, is not faster beyond chance{among}"
    if chosen is fastest:
        found = f"{which} is the fastest, {gain}"
        if least_tied < chosen.k:
            return f"{found}; smaller tied k may not pay at all"
        weak = f"{found}, which is weak evidence"
        if count < FEWEST:
            return f"{weak}: too few prompts for an interval"
        if gains.interval(chosen) is None:
            why = "all prompts share a batch and end together"
            if gains.is_predicted:
                why = "the time curve has one part"
            return f"{weak}: there is no interval, because {why}"
        that = " with that draft" if with_draft else ""
        return f"{found}, and no smaller k{that} is tied with it"
    why = "and proposes less"
    if chosen.draft != fastest.draft or chosen.k > fastest.k:
        why = "which is not faster beyond chance"
    return f"{which} at {gain_of(chosen):.2f}x is tied with the fastest, {leader} at {gain}, {why}"
