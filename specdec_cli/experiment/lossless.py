"""The losslessness check: greedy decoding has to write the same tokens at every point.

Computed from samples alone. Knows no engine and no terminal.
"""

from collections.abc import Mapping

from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.conclusions import Diverging, Tokens
from specdec_cli.experiment.folders.records import Key
from specdec_cli.experiment.folders.run_settings import RunSettings
from specdec_cli.experiment.folders.samples import Samples, without_errors
from specdec_cli.experiment.statistics.promise import tokens_line


def compare_tokens(settings: RunSettings, points: Mapping[Key, Samples]) -> Tokens:
    """The document's `tokens` for the samples of `points`, in their order.

    Points are comparable if decoding is greedy and acceptance not synthetic. The tokens of each
    prompt are compared with those of the first point that has it. In float32 a difference is a
    fault. In narrower formats another order of sums can flip near-ties, so there the number of
    diverging prompts is informational.
    """
    is_comparable = settings.is_greedy and not settings.has_given_acceptance
    reference: dict[int, list[int]] = {}
    diverging = []
    for key, whole in points.items() if is_comparable else ():
        samples = without_errors(whole)
        for index, sample in samples.items():
            reference.setdefault(index, sample.token_ids)
        differing = [i for i, s in sorted(samples.items()) if s.token_ids != reference[i]]
        if differing:
            labels = key.as_dict()
            if key.target_tp is not None:
                del labels["draft"]  # comparisons have only one
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
    """A warning if tokens differ that must be identical."""
    if not tokens.is_broken:
        return []
    return [Notice("tokens_differ", tokens_line(tokens) or "", {"diverging": tokens.diverging})]
