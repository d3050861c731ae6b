"""The length policies `confidence` and `head` in a recipe."""

from pydantic import Field

from specdec_cli.recipe.fields import Probability, Section


class ConfidenceKeys(Section):
    """The keys of the policies that stop a draft which is unsure."""

    threshold: Probability = Field(
        default=0.4,
        description="confidence: a draft stops behind a less likely token; head: before one that "
        "its confidence head finds less likely to stand",
    )
