"""The length policy `adaptive` and its keys in a recipe."""

from specdec_cli.recipe.choices.base import Choice
from specdec_cli.recipe.fields import Section, Tokens, entry


class AdaptiveKeys(Section):
    """Keys of the length policy that chooses k by measured speed."""

    choices: tuple[Tokens, ...] = entry(
        (0, 1, 2, 4, 8), "adaptive: lengths to choose from, besides k itself"
    )


ADAPTIVE = Choice("chooses k by its measured gain", keys=AdaptiveKeys)
