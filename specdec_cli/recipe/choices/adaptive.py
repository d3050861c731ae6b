"""The length policy `adaptive` in a recipe."""

from typing import Annotated

from pydantic import Field, StrictInt

from specdec_cli.recipe.fields import Section


class AdaptiveKeys(Section):
    """The keys of the policy that chooses k by its gain."""

    choices: tuple[Annotated[StrictInt, Field(ge=0, le=1024)], ...] = Field(
        default=(0, 1, 2, 4, 8), description="adaptive: lengths to choose from, beside k itself"
    )
