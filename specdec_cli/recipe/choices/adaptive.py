"""The recipe's keys for the length policy `adaptive`."""

from specdec_cli.recipe.fields import Section, Tokens, entry


class AdaptiveKeys(Section):
    """Keys of the length policy that chooses k by measured speed."""

    choices: tuple[Tokens, ...] = entry(
        (0, 1, 2, 4, 8), "adaptive: lengths to choose from, besides k itself"
    )
