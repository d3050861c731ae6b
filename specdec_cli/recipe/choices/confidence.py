"""The length policy `confidence` in a recipe."""

from pydantic import Field

from specdec_cli.recipe.fields import Probability, Section


class ConfidenceKeys(Section):
    """The keys of the policy that stops a draft which is unsure."""

    threshold: Probability = Field(
        default=0.4, description="confidence: a draft stops behind a less likely token"
    )
