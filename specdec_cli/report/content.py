"""Collects the content of a report, which is the same in every format.

The content includes a conclusion for each section, which appears at the top of the section and in
the caption of its plot. Plots are drawn in `drawings`.
"""

from collections.abc import Callable, Mapping

from specdec_cli.core.figures import STAGES
from specdec_cli.experiment.folders.records import Point
from specdec_cli.experiment.statistics.promise import lossless_in_words
from specdec_cli.report import findings, tables
from specdec_cli.report.card import card
from specdec_cli.report.cells import Table
from specdec_cli.report.findings import (
    Finding,
    longest_proposals,
    residuals_in_words,
    setting_in_words,
    times,
)
from specdec_cli.report.folder import ReportedRun, baseline_of
from specdec_cli.report.tables import arm_in_words, tokens_over_all_rounds
from specdec_cli.report.vllm import deployment
from specdec_cli.text import counted


class Content:
    """The content of a report on a run, whether or not the run was completed.

    bests: the finding at each batch size or request rate.
    answers: a sentence or two about each finding.
    reasons: the reasons that the run recorded for its conclusive findings, without repetitions. For
        compare-tp, the last one names the pairs of target TP and draft TP that did not run, if any.
    lossless: the result of the lossless check as text; None if it was not made.
    tables: the tables by name. A table without rows is not shown.
    shown: the point whose figures are shown for each category; None if there is none.
    category_point: a description of this point; "" if there is none.
    """

    def __init__(self, run: ReportedRun) -> None:
        self.run = run
        self.bests = findings.best_by_batch_size(run)
        self.title = f"specdec {run.kind}: {run.path.resolve().name}"
        self.headline = findings.headline(run, self.bests)
        self.answers = [findings.answer(run, best) for best in self.bests]
        decided = [best for best in self.bests if best.reason and not best.is_open]
        self.reasons = list(dict.fromkeys(best.reason for best in decided))
        if run.is_comparison and (skipped := [p for p in run.points if p.status == "skipped"]):
            pairs = [f"target TP {p.target_tp} with draft TP {p.draft_tp}" for p in skipped]
            told = (f"{pair} ({p.reason})" for pair, p in zip(pairs, skipped, strict=True))
            self.reasons.append(f"Not run: {'; '.join(dict.fromkeys(told))}.")
        self.notices = findings.warnings(run)
        self.warnings = [one.message for one in self.notices]
        self.lossless = lossless_in_words(run.summary)
        self.setup = _setup(run)
        shown = _point_for_categories(run, self.bests)
        of_shown = next((b for b in self.bests if shown and b.at.level == shown.level), None)
        self.tables: Mapping[str, Table] = {
            "results": tables.results(run, self.bests),
            "load": tables.load(run, self.bests),
            "degrees": tables.degrees(run),
            "break_even": tables.break_even(run),
            "comparisons": tables.comparisons(run),
            "category_pairs": tables.category_pairs(run),
            "rounds": tables.times_of_a_round(run),
            "latencies": tables.latencies(run),
            "first_tokens": tables.first_tokens(run),
            "predictions": tables.predictions(run),
            "categories": tables.categories(run, shown, of_shown),
        }
        self.category_point, self.shown = "", shown
        if shown is not None:
            setting = findings.setting_in_words(run, shown)
            self.category_point = f"{setting}, {shown.level_in_words}."
        self.deployment = deployment(run, self.bests)
        self.card = card(run, self.bests, self.deployment)


def _point_for_categories(run: ReportedRun, bests: list[Finding]) -> Point | None:
    """Choose the point whose figures are shown for each category of prompts.

    This is the first best point with proposals or, if plain decoding is best everywhere, the
    fastest point with proposals. Returns None if no such point has a speed-up.
    """
    for best in bests:
        if best.point is not None and best.point.is_ok and not best.point.is_baseline:
            return best.point
    known = [p for p in run.points if not p.is_baseline and p.speedup is not None]
    return max(reversed(known), key=lambda p: p.speedup or 0.0, default=None)


def _setup(run: ReportedRun) -> str:
    """Describe the setup of a run in one line."""
    parts = [f"target {run.setting('target', 'model') or '?'}"]
    if run.drafts:
        parts.append(f"{'drafts' if run.drafts[1:] else 'draft'} {', '.join(run.drafts)}")
    prompts = {int(n) for p in run.points if (n := p.number("num_prompts")) is not None}
    data = run.setting("data", "path")
    if prompts:
        # At a rate the requests cycle through the prompts, and metrics count requests.
        is_load = any(p.request_rate is not None for p in run.points)
        count = counted(max(prompts), "request" if is_load else "prompt")
        parts.append(f"{count}{f' of {data}' if data else ''}")
    if (temperature := run.setting("sampling", "temperature")) is not None:
        parts.append("greedy" if temperature == 0 else f"temperature {temperature}")
    device = run.environment.get("gpu") or run.environment.get("device")
    if device:
        parts.append(f"on {device}, {run.environment.get('dtype', '?')}")
    return " · ".join(parts)


def conclusion(name: str, content: Content) -> str:
    """Return the conclusion of the section whose plot or table has this name; "" if it has none."""
    return _CONCLUSIONS[name](content).strip() if name in _CONCLUSIONS else ""


def speedup(content: Content) -> str:
    return content.headline if content.bests else ""


def break_even(content: Content) -> str:
    """Describe the point that exceeds its break-even by the largest factor or, if no point exceeds
    it, the point that comes closest. Break-even is the number of tokens per round that a point
    needs to be as fast as plain decoding. Returns "" if it is unknown at all points."""
    run = content.run
    found = [
        (length / needed, point, even)
        for point in run.points
        if (even := point.break_even) is not None
        and (needed := even.tokens_per_round)
        and (length := tokens_over_all_rounds(point)) is not None
    ]
    if not found:
        return ""
    ratio, point, even = max(found, key=lambda item: item[0])
    rate = point.number("draft_acceptance_rate")
    name = f"{setting_in_words(run, point)} {point.at_level}"
    if ratio <= 1:
        return f" No point does: the closest, {name}, is {100 * (1 - ratio):.0f} % below."
    needs = even.draft_acceptance_rate
    of = ""
    if needs is not None and rate is not None:
        of = f": it needs {100 * needs:.0f} % of its proposals accepted, and {100 * rate:.0f} % are"
    return f" The point with the largest margin is {name}{of}."


def comparisons(content: Content) -> str:
    """Say how much faster one draft is than the other, or that they are tied, for each pair of
    drafts that the run compared. Returns "" if there are no such pairs."""
    told = []
    found = content.run.summary.comparisons
    has_sizes = len({one.batch_size for one in found}) > 1
    for one in found:
        if not (one.arm.k and one.against.k) or one.speed_ratio is None:
            continue
        arm, other = (arm_in_words(content.run, side) for side in (one.arm, one.against))
        ends = one.speed_ratio_ci
        how = f"{times(one.speed_ratio)} as fast as"
        how = how if not one.tied else "tied with"
        at = f" at batch size {one.batch_size}" if has_sizes else ""
        told.append(f"{arm} is {how if ends else 'not told apart from'} {other}{at}")
    return f" {'; '.join(told)}." if told else ""


def acceptance(content: Content) -> str:
    """State how often the first and the last proposal of a round are accepted, for each draft at
    its largest k. The plot shows the same points."""
    told = []
    for point in longest_proposals(content.run).values():
        rates = (point.metrics.acceptance_rate_per_pos if point.metrics else None) or []
        if len(rates) > 1:
            name = setting_in_words(content.run, point)
            shares = f"{100 * rates[0]:.0f} % of rounds, the last in {100 * rates[-1]:.0f} %"
            told.append(f"ith {name} the first proposal is accepted in {shares}")
    return f"W{'; w'.join(told)}." if told else ""


def latencies(content: Content) -> str:
    """Compare the median latencies of the point `content.shown` with those of plain decoding."""
    point = content.shown
    plain = baseline_of(content.run.points, point) if point is not None else None
    if point is None or plain is None:
        return ""
    figures = [(p.number("tpot_ms", "p50"), p.number("ttft_ms", "p50")) for p in (point, plain)]
    if any(value is None for pair in figures for value in pair):
        return ""
    (each, first), (slower, earlier) = figures
    name = setting_in_words(content.run, point)
    return (
        f"With {name} the first token takes {first:.1f} ms, and each further one {each:.2f} ms; in "
        f"plain decoding {earlier:.1f} and {slower:.2f} ms (medians over prompts)."
    )


def rounds(content: Content) -> str:
    """State how long a round takes at the point `content.shown`, and which stage takes longest."""
    point = content.shown
    whole = point.number("round_ms") if point is not None else None
    if point is None or not whole:
        return ""
    shares = {stage: (point.number(f"{stage}_ms") or 0.0) / whole for stage in STAGES}
    stage = max(shares, key=lambda name: shares[name])
    name = setting_in_words(content.run, point)
    return f" With {name} a round takes {whole:.2f} ms, {100 * shares[stage]:.0f} % of it {stage}."


def experts(content: Content) -> str:
    """State how much the number of experts read and the verify time grow from k = 0 to the largest
    k. If the weights are random, add that this makes the choice of experts unrealistic."""
    is_random = content.run.setting("target", "load_format") == "dummy"
    remark = " The weights are random, so experts are chosen evenly, unlike with trained routers."
    known = [p for p in content.run.points if p.number("distinct_experts")]
    plain = [p for p in known if p.is_baseline]
    if not plain or len(known) == len(plain):
        return remark if is_random and known else ""
    size = plain[0].batch_size
    widest = max((p for p in known if p.batch_size == size), key=lambda point: point.k)
    names = ("distinct_experts", "verify_ms")
    grown = [(widest.number(n) or 0.0) / (plain[0].number(n) or 1.0) for n in names]
    return (
        f" At batch size {size} scoring {widest.k + 1} tokens reads {times(grown[0])} as many "
        f"experts as scoring one, and takes {times(grown[1])} as long.{remark if is_random else ''}"
    )


def categories(content: Content) -> str:
    """Name the fastest and the slowest category, and say whether the difference is significant."""
    point = content.shown
    rows = point.per_category.items() if point is not None else ()
    known = sorted((row.speedup, name, row.speedup_ci) for name, row in rows if row.speedup)
    if len(known) < 2:
        return ""
    (slow, last, below), (fast, first, above) = known[0], known[-1]
    doubt = ""
    if below is None or above is None:
        doubt = "; too few prompts to tell them apart"
    elif below[1] >= above[0]:
        doubt = "; their intervals overlap"
    return f" Fastest on {first} ({times(fast)}), slowest on {last} ({times(slow)}){doubt}."


_ALL = (speedup, break_even, comparisons, acceptance, rounds, experts, categories, latencies)
_CONCLUSIONS: Mapping[str, Callable[[Content], str]] = {
    **{of.__name__: of for of in _ALL},
    "speeds": speedup,
    "predictions": lambda content: residuals_in_words(content.run),
}
