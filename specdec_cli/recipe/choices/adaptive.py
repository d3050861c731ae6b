"""The length policy `adaptive` in a recipe."""

from specdec_cli.recipe.fields import Section, Tokens, entry


class AdaptiveKeys(Section):
    """The keys of the policy that chooses k by its measured gain."""

    choices: tuple[Tokens, ...] = entry(
        (0, 1, 2, 4, 8), "adaptive: lengths to choose from, besides k itself"
    )
