"""Typical acceptance in a recipe."""

from specdec_cli.recipe.fields import Probability, Section, entry


class TypicalKeys(Section):
    """The keys of typical acceptance."""

    typical_threshold: Probability = entry(
        0.09, "typical: proposals of higher probability are always accepted"
    )
    typical_alpha: Probability = entry(
        0.3, "typical: share of exp(-entropy) above which a proposal is accepted"
    )
