"""The recipe's keys for the length policies `confidence` and `head`."""

from specdec_cli.recipe.fields import Probability, Section, entry


class ConfidenceKeys(Section):
    """Keys of the length policies that stop drafting when confidence is low."""

    threshold: Probability = entry(
        0.4,
        "confidence: drafting stops after a token with a lower probability; head: before a token "
        "to which the draft's confidence head gives a lower chance of acceptance",
    )
