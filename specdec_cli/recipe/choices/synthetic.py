"""Synthetic acceptance in a recipe."""

from itertools import pairwise
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from specdec_cli.recipe.choices.base import RuleChoice
from specdec_cli.recipe.fields import NUMBER, Probability, Section


class SyntheticKeys(Section):
    """The keys of synthetic acceptance. A recipe with that rule needs one of them."""

    synthetic_acceptance_rates: tuple[Probability, ...] | None = Field(
        default=None, description="chance that position i is accepted, at least k of them, falling"
    )
    synthetic_acceptance_length: Annotated[float, Field(ge=1.0), NUMBER] | None = Field(
        default=None, description="mean tokens a round, bonus token included (1 to k + 1)"
    )

    @field_validator("synthetic_acceptance_rates")
    @classmethod
    def _rates_fall(cls, value: tuple[float, ...] | None) -> tuple[float, ...] | None:
        rates = value or ()
        if any(later > earlier for earlier, later in pairwise(rates)):
            raise PydanticCustomError(
                "order", "should not rise: position i is reached only when i - 1 was accepted"
            )
        return value


def _check(keys: SyntheticKeys, k: int) -> None:
    rates, length = keys.synthetic_acceptance_rates, keys.synthetic_acceptance_length
    if (rates is None) == (length is None):
        raise PydanticCustomError(
            "synthetic",
            "acceptance: synthetic needs one of synthetic_acceptance_rates and "
            "synthetic_acceptance_length",
            {"key": "acceptance"},
        )
    if rates is not None and len(rates) < k:
        raise PydanticCustomError(
            "synthetic",
            "should have at least num_speculative_tokens ({k}) rates, has {n}",
            {"key": "synthetic_acceptance_rates", "k": k, "n": len(rates)},
        )
    if length is not None and k > 0 and length > k + 1:
        raise PydanticCustomError(
            "synthetic",
            "should be at most num_speculative_tokens + 1 ({most})",
            {"key": "synthetic_acceptance_length", "most": k + 1},
        )


SYNTHETIC = RuleChoice("lossy, at given rates", is_given=True, check=_check)
