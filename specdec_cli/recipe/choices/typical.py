"""Typical acceptance and its keys in a recipe."""

from specdec_cli.recipe.choices.base import RuleChoice
from specdec_cli.recipe.fields import Probability, Section, entry


class TypicalKeys(Section):
    """Keys of typical acceptance."""

    typical_threshold: Probability = entry(
        0.09, "typical: proposals above this probability are always accepted"
    )
    typical_alpha: Probability = entry(
        0.3, "typical: proposals above this multiple of exp(-entropy) are accepted"
    )


TYPICAL = RuleChoice("lossy, accepts likely proposals", keys=TypicalKeys)
