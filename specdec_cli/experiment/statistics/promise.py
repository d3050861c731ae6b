"""The promise of lossless decoding, and how it was kept, in words. Imports no torch."""

from collections.abc import Mapping
from typing import Any

_LABELS = {
    "target_tp": "target TP {}",
    "draft_tp": "draft TP {}",
    "draft": "draft {}",
    "batch_size": "batch size {}",
    "k": "k = {}",
}
_EXACT = "with greedy decoding in float32, speculation writes the text of plain decoding"
_NARROW = (
    "in bfloat16 and float16 text parts only where the two best next tokens are nearly tied, since "
    "passes of other widths round differently"
)
_SAMPLED = "sampled text follows the target's distribution, and is not compared word for word"


def tokens_line(tokens: Mapping[str, Any]) -> str | None:
    """The result of comparing a run's points in words, or None if there was nothing to compare."""
    if tokens["identical"] is None:
        return None
    if tokens["identical"]:
        return "tokens are the same at every point"
    worst = max(tokens["diverging"], key=lambda d: d["num_diverging"] / d["num_prompts"])
    place = ", ".join(
        text.format(worst[name]) for name, text in _LABELS.items() if worst.get(name) is not None
    )
    where = f"{worst['num_diverging']} of {worst['num_prompts']} prompts at {place}"
    if tokens["must_be_identical"]:
        return f"tokens differ between points, which in float32 they must not: {where}"
    return f"tokens diverge, as other orders of summation make them: at most in {where}"


def check_line(check: Mapping[str, Any]) -> str:
    """The result of `--check-lossless` in a line."""
    compared, parted = check["num_compared"], check["num_diverging"]
    count = check["num_prompts"]
    of = f"{count} prompt{'s' if count > 1 else ''}, {compared} texts against the target alone"
    if not parted:
        return f"lossless: the same greedy tokens in {check['dtype']} ({of})"
    near, unexplained = check["num_near_ties"], check["num_unexplained"]
    which = f"{parted} of {compared} texts diverge in {check['dtype']}"
    unseen = parted - near - unexplained
    rest = f" ({unseen} were not looked at)" if unseen else ""
    size = ""
    if near or unexplained:
        gap, noise = check["largest_gap"], check["noise"]
        size = f"; the largest gap of logits is {gap:.3g}, the rounding {noise:.3g}"
    if check["must_be_identical"]:
        return f"not lossless: {which} ({of}){size}"
    if unexplained:
        return f"not lossless: {which}, {unexplained} of them by no near-tie{rest}{size}"
    return f"lossless: {which}, all near-ties{rest}{size}"


def lossless_in_words(summary: Mapping[str, Any] | None) -> str | None:
    """A line on losslessness in a run, and on the promise; None for runs that do not say.

    summary: a document of `sweep-k` or `compare-tp`.
    """
    tokens = (summary or {}).get("tokens")
    check = (summary or {}).get("lossless_check")
    if not isinstance(tokens, Mapping) or "identical" not in tokens:
        return None
    try:
        found = check_line(check) if isinstance(check, Mapping) else None
        line = tokens_line(tokens)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    exact, compared = bool(tokens.get("must_be_identical")), bool(tokens.get("compared"))
    if found is None and line is None:
        if compared:
            return None
        return f"Losslessness was not checked (`--check-lossless`). The promise: {_SAMPLED}."
    if tokens["identical"]:
        line = "the same text at every point, as plain decoding writes"
    told = f"Losslessness: {line}" if found is None else f"{found[0].upper()}{found[1:]}"
    promise = _EXACT if exact else f"{_EXACT}; {_NARROW if compared else _SAMPLED}"
    ask = ""
    if found is None and not exact and tokens["identical"] is False:
        ask = " `--check-lossless` says whether they were near-ties."
    return f"{told}. The promise: {promise}.{ask}"
