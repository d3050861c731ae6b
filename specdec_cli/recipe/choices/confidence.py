"""The length policies `confidence` and `head` in a recipe."""

from specdec_cli.recipe.fields import Probability, Section, entry


class ConfidenceKeys(Section):
    """The keys of the policies that stop a draft which is unsure."""

    threshold: Probability = entry(
        0.4,
        "confidence: a draft stops behind a less likely token; head: before one that "
        "its confidence head finds less likely to stand",
    )
