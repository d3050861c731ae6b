"""Fills the card at the top of a report: the verdict, the gain and the memory cost of speculation,
and the commands that start vLLM and SGLang with the recommended setting.

The card is plain text. `page` and `export` format it.
"""

from collections.abc import Sequence

from specdec_cli.experiment.folders.conclusions import MemoryCost
from specdec_cli.experiment.folders.records import Point
from specdec_cli.experiment.statistics.evidence import NEGLIGIBLE, minutes_in_words, rounded_up
from specdec_cli.report.findings import (
    Finding,
    fastest_with_proposals,
    gain_in_words,
    setting_in_words,
)
from specdec_cli.report.folder import ReportedRun
from specdec_cli.report.vllm import Deployment

_VERDICTS = {
    "use": "use it: faster than plain decoding beyond chance",
    "none": f"no speculation: nothing gains more than {100 * NEGLIGIBLE:.0f} % beyond chance",
    "inconclusive": "inconclusive: the evidence supports no recommendation",
}


def card(
    run: ReportedRun, bests: Sequence[Finding], deployment: Deployment | None
) -> list[tuple[str, str]]:
    """Return the card's lines as pairs of title and text.

    The card is about the first batch size or request rate that has a best point. It is empty if
    there is none, or if the run ended before it recorded a recommendation.
    """
    best = next((one for one in bests if one.point is not None), None)
    if best is None or best.recorded is None:
        return []
    point, leader = best.point, fastest_with_proposals(run, best)
    assert point is not None
    found = [("Verdict", _VERDICTS.get(best.verdict, best.verdict))]
    shown = leader if point.is_baseline or best.is_open else point
    name = "Recommended" if best.verdict == "use" else "Fastest with proposals"
    if shown is not None:
        found.append((name, f"{setting_in_words(run, shown)}, {shown.level_in_words}"))
        if gain := gain_in_words(run, best, shown):
            how = "predicted to be " if shown.is_predicted else ""
            found.append(("Gain", f"{how}{gain}"))
        found += [("Memory", told) for told in _memory(run, shown)]
    if deployment is not None and not best.is_open:
        found.append(("vLLM", deployment.command))
        if deployment.sglang_command is not None:
            found.append(("SGLang", deployment.sglang_command))
        found += [("For servers", told) for told in deployment.places]
    return [*found, *(("Would change it", told) for told in _would_change(best, shown))]


def _memory(run: ReportedRun, point: Point) -> list[str]:
    """Describe how much memory a point's draft takes; [] if the run did not record it."""
    if run.setting("engine", "kind") not in (None, "native"):
        return ["not reported by the servers"]
    costs = run.summary.memory
    place = point.draft, point.target_tp, point.draft_tp
    cost = next((one for one in costs if (one.draft, one.target_tp, one.draft_tp) == place), None)
    if cost is None:
        return []
    if not cost.draft_weight_bytes and not cost.draft_token_bytes:
        return ["none: there is no draft model"]
    more = 100 * cost.draft_token_bytes / max(cost.target_token_bytes, 1e-9)
    weights = 100 * cost.draft_weight_bytes / max(cost.target_weight_bytes, 1)
    told = (
        f"{cost.draft_weight_bytes / 2**20:,.0f} MiB of weights ({weights:.0f} % of the target's), "
        f"and {more:.0f} % more cache for each token"
    )
    which = "" if cost.target_tp is None else "on a rank with a part of the draft, "
    return [f"{which}{told}; {_sequences(cost)}"]


def _sequences(cost: MemoryCost) -> str:
    """Describe how many fewer sequences fit into memory because of the draft."""
    length = cost.longest_tokens
    plain = cost.target_token_bytes * length
    if cost.device_bytes is None:
        lost = cost.draft_weight_bytes / max(plain, 1.0)
        return f"its weights take as much memory as {lost:,.0f} sequences of {length:,} tokens"
    left = cost.device_bytes - cost.target_weight_bytes
    both = (cost.target_token_bytes + cost.draft_token_bytes) * length
    before, after = left / plain, (left - cost.draft_weight_bytes) / both
    return (
        f"{max(0, int(before)):,} sequences of {length:,} tokens fit without it, and "
        f"{max(0, int(after)):,} beside it"
    )


def _would_change(best: Finding, shown: Point | None) -> list[str]:
    needed = best.recorded.needed if best.recorded is not None else None
    if best.is_open:
        if needed is None:
            return []
        minutes = needed.minutes
        time = f", {minutes_in_words(minutes, is_quiet=True)}" if minutes is not None else ""
        many = f"about {rounded_up(needed.prompts):,}"
        if needed.at_least:
            many = f"at least {needed.prompts:,}"
        return [f"more evidence: {many} prompts like these{time}"]
    found = []
    if (told := _needed_acceptance(shown)) is not None:
        found.append(told)
    level = f"batch size than {best.at.batch_size}"
    if best.at.request_rate is not None:
        level = f"load than {best.at.level_in_words}"
    return [*found, f"a different {level}, since a round's cost grows with it"]


def _needed_acceptance(shown: Point | None) -> str | None:
    """Describe the acceptance rate at which a point would only be as fast as plain decoding.
    Returns None if it is unknown, or so low that any acceptance rate makes the point faster."""
    even = shown.break_even if shown is not None else None
    rate = shown.number("draft_acceptance_rate") if shown is not None else None
    if even is None or rate is None:
        return None
    needs = even.draft_acceptance_rate
    if needs is None:
        return "a cheaper round: no acceptance rate would make up for its cost here"
    if needs < 0.005:  # faster even if almost nothing is accepted
        return None
    way = "fewer" if rate > needs else "more"
    return (
        f"prompts or a draft with {way} than {100 * needs:.0f} % of proposals accepted "
        f"({100 * rate:.0f} % here)"
    )
