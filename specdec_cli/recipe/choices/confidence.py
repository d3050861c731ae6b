"""The length policies `confidence` and `head`, and their keys in a recipe."""

from specdec_cli.recipe.choices.base import Choice
from specdec_cli.recipe.fields import Probability, Section, entry


class ConfidenceKeys(Section):
    """Keys of the length policies that stop drafting when confidence is low."""

    threshold: Probability = entry(
        0.4,
        "confidence: drafting stops after a token with a lower probability; head: before a token "
        "to which the draft's confidence head gives a lower chance of acceptance",
    )


CONFIDENCE = Choice("drafting stops after an unlikely token", keys=ConfidenceKeys)
HEAD = Choice(
    "drafting stops before a token to which the draft's confidence head gives a low score",
    keys=ConfidenceKeys,
)
