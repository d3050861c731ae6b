"""Describes the promise that decoding is lossless, and the result of checking it, in sentences for
the user. Does not import torch."""

from collections.abc import Mapping

from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.conclusions import CheckResult, Diverging, Summary, Tokens
from specdec_cli.experiment.folders.records import Key
from specdec_cli.experiment.folders.samples import Samples, without_errors
from specdec_cli.experiment.folders.settings_file import RunSettings
from specdec_cli.text import counted

_LABELS = {
    "target_tp": "target TP {}",
    "draft_tp": "draft TP {}",
    "draft": "draft {}",
    "batch_size": "batch size {}",
    "request_rate": "{} requests/s",
    "k": "k = {}",
}
_EXACT = "with greedy decoding in float32, speculation writes the text of plain decoding"
_NARROW = (
    "in bfloat16 and float16 texts differ only where the two best next tokens are nearly tied, "
    "since passes of different widths round differently"
)
_SAMPLED = "sampled text follows the target's distribution, and is not compared word for word"


def tokens_line(tokens: Tokens) -> str | None:
    """Describe whether all points of a run gave the same tokens; None if there was nothing to
    compare."""
    if tokens.identical is None:
        return None
    if tokens.identical:
        return "tokens are the same at every point"
    worst = max(tokens.diverging, key=lambda point: point.num_diverging / point.num_prompts)
    place = ", ".join(
        text.format(value)
        for name, text in _LABELS.items()
        if (value := getattr(worst, name)) not in (None, 0 if name == "batch_size" else None)
    )
    where = f"{worst.num_diverging} of {worst.num_prompts} prompts at {place}"
    if tokens.must_be_identical:
        return f"tokens differ between points, but must be the same in float32: {where}"
    return f"tokens diverge, because sums in another order round differently: at most in {where}"


def check_line(check: CheckResult) -> str:
    """Describe the result of `--check-lossless` in one line."""
    compared, parted, count = check.num_compared, check.num_diverging, check.num_prompts
    of = f"{counted(count, 'prompt')}, {counted(compared, 'text')} against the target alone"
    if not parted:
        return f"lossless: the same greedy tokens in {check.dtype} ({of})"
    near, unexplained = check.num_near_ties, check.num_unexplained
    which = f"{parted} of {compared} texts diverge in {check.dtype}"
    unseen = parted - near - unexplained
    rest = f" ({unseen} were not examined)" if unseen else ""
    size = ""
    if check.largest_gap is not None and check.noise is not None:
        gap, noise = check.largest_gap, check.noise
        size = f"; the largest logit gap is {gap:.3g}, the rounding error {noise:.3g}"
    if check.must_be_identical:
        return f"not lossless: {which} ({of}){size}"
    if unexplained:
        return f"not lossless: {which}, {unexplained} of them without a near-tie{rest}{size}"
    return f"lossless: {which}, all near-ties{rest}{size}"


def lossless_in_words(summary: Summary) -> str | None:
    """Describe in one line whether a run was lossless, and what specdec promises about it. Returns
    None if there is nothing to say."""
    if (tokens := summary.tokens) is None:
        return None
    found = check_line(check) if (check := summary.lossless_check) is not None else None
    line = tokens_line(tokens)
    if found is None and line is None:
        if tokens.compared:
            return None
        return f"Losslessness was not checked (`--check-lossless`). The promise: {_SAMPLED}."
    if tokens.identical:
        line = "every point has the same text as plain decoding"
    told = f"Losslessness: {line}" if found is None else f"{found[0].upper()}{found[1:]}"
    is_exact = tokens.must_be_identical
    promise = _EXACT if is_exact else f"{_EXACT}; {_NARROW if tokens.compared else _SAMPLED}"
    ask = ""
    if found is None and not is_exact and tokens.identical is False:
        ask = " `--check-lossless` says whether they were near-ties."
    return f"{told}. The promise: {promise}.{ask}"


def compare_tokens(settings: RunSettings, points: Mapping[Key, Samples]) -> Tokens:
    """Compare the tokens of a run's points, and return the result for the run's JSON document.

    Points are compared only if decoding is greedy and keeps the target's text. The tokens of
    each prompt are compared with those of the first point, in the order of `points`, that has the
    prompt. In float32 a difference is a fault. In narrower formats a different order of summation
    can flip near-ties, so the number of diverging prompts is only informational.
    """
    is_comparable = settings.keeps_greedy
    reference: dict[int, list[int] | str | None] = {}
    diverging = []
    for key, whole in points.items() if is_comparable else ():
        samples = without_errors(whole)
        for sample in samples.values():
            reference.setdefault(sample.index, sample.token_ids or sample.text)
        ordered = [sample for _, sample in sorted(samples.items())]
        differing = [s.index for s in ordered if (s.token_ids or s.text) != reference[s.index]]
        if differing:
            labels = key.as_dict()
            if key.target_tp is not None:
                del labels["draft"]  # all points of a comparison have the same draft
            diverging.append(
                Diverging(
                    **labels,
                    num_prompts=len(samples),
                    num_diverging=len(differing),
                    first=differing[0],
                )
            )
    return Tokens(
        compared=is_comparable,
        must_be_identical=is_comparable and settings.dtype == "float32",
        identical=not diverging if reference else None,
        diverging=diverging,
    )


def tokens_notice(tokens: Tokens) -> list[Notice]:
    """Return a warning if tokens differ although they must be identical, otherwise an empty
    list."""
    if not tokens.is_broken:
        return []
    told = (
        f"{tokens_line(tokens)}: this is a bug in the engine or a plugin; do not use the figures "
        "of these points, and report it with the tokens that `sweep-k --check-lossless` lists"
    )
    return [Notice("tokens_differ", told, {"diverging": tokens.diverging})]
