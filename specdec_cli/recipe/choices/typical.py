"""Typical acceptance in a recipe."""

from pydantic import Field

from specdec_cli.recipe.fields import Probability, Section


class TypicalKeys(Section):
    """The keys of typical acceptance."""

    typical_threshold: Probability = Field(
        default=0.09, description="typical: proposals of higher probability always stand"
    )
    typical_alpha: Probability = Field(
        default=0.3, description="typical: share of exp(-entropy) that lets a proposal stand"
    )
