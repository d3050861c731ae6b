"""The length policies `confidence` and `head` in a recipe."""

from specdec_cli.recipe.fields import Probability, Section, entry


class ConfidenceKeys(Section):
    """The keys of the policies that stop a draft of low confidence."""

    threshold: Probability = entry(
        0.4,
        "confidence: a draft stops after a less likely token; head: before a token whose "
        "acceptance its confidence head finds less likely",
    )
