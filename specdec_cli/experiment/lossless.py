"""Whether points wrote the same tokens, where they have to: greedy decoding is lossless.

Computed from samples alone. Knows no engine and no terminal.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from specdec_cli.experiment.points import Samples, without_errors

_LABELS = {
    "target_tp": "target TP {}",
    "draft_tp": "draft TP {}",
    "draft": "draft {}",
    "batch_size": "batch size {}",
    "k": "k = {}",
}


def compare_tokens(
    points: Iterable[tuple[dict[str, Any], Samples]],
    *,
    is_comparable: bool,
    dtype: str,
) -> dict[str, Any]:
    """What is to be told of the tokens of `points`, each its labels and its samples by prompt.

    is_comparable: greedy, and acceptance not made up. dtype: the target's. Of each prompt the first
    point that has it is what the others are held against. In float32 a difference is a fault. In
    narrower formats sums in another order move near-ties, so there the number of prompts that
    diverge is for information.
    """
    found: dict[str, Any] = {
        "compared": is_comparable,
        "must_be_identical": is_comparable and dtype == "float32",
        "identical": None,
        "diverging": [],
    }
    if not is_comparable:
        return found
    reference: dict[int, list[int]] = {}
    diverging = []
    for labels, whole in points:
        samples = without_errors(whole)
        for index, sample in samples.items():
            reference.setdefault(index, sample.token_ids)
        differing = [i for i, s in sorted(samples.items()) if s.token_ids != reference[i]]
        if differing:
            counts = {"num_prompts": len(samples), "num_diverging": len(differing)}
            diverging.append(labels | counts | {"first": differing[0]})
    if not reference:
        return found
    return found | {"identical": not diverging, "diverging": diverging}


def is_broken(tokens: Mapping[str, Any]) -> bool:
    """Whether tokens differ that must not."""
    return bool(tokens["must_be_identical"]) and tokens["identical"] is False


def tokens_line(tokens: Mapping[str, Any]) -> str | None:
    """What is to be said of tokens, or None where there is nothing to compare."""
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
    return f"tokens diverge, as sums in another order make them: at most in {where}"
