"""The losslessness check: greedy decoding has to write the same tokens at every point.

Computed from samples alone. Knows no engine and no terminal.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.run_settings import RunSettings
from specdec_cli.experiment.folders.samples import Samples, without_errors
from specdec_cli.experiment.statistics.promise import tokens_line


def compare_tokens(
    settings: RunSettings, dtype: str, points: Iterable[tuple[dict[str, Any], Samples]]
) -> dict[str, Any]:
    """The document's `tokens` for `points`, each with its labels and its samples by prompt.

    Points are comparable if decoding is greedy and acceptance not synthetic. dtype: the target's.
    The tokens of each prompt are compared with those of the first point that has it. In float32 a
    difference is a fault. In narrower formats another order of sums can flip near-ties, so there
    the number of diverging prompts is informational.
    """
    is_comparable = settings.is_greedy and not settings.has_given_acceptance
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
    """Whether tokens differ that must be identical."""
    return bool(tokens["must_be_identical"]) and tokens["identical"] is False


def tokens_notice(tokens: Mapping[str, Any]) -> list[Notice]:
    """A warning if tokens differ that must be identical."""
    if not is_broken(tokens):
        return []
    return [Notice("tokens_differ", tokens_line(tokens) or "", {"diverging": tokens["diverging"]})]
