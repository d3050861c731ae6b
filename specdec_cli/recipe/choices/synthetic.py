"""Synthetic acceptance: its recipe keys, and the acceptance rates computed from them."""

from itertools import pairwise
from typing import Annotated

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from specdec_cli.errors import UsageError
from specdec_cli.recipe.choices.base import RuleChoice
from specdec_cli.recipe.fields import NUMBER, Probability, Section, entry


class SyntheticKeys(Section):
    """Keys of synthetic acceptance. A recipe with this rule needs exactly one of them."""

    synthetic_acceptance_rates: tuple[Probability, ...] | None = entry(
        None, "marginal chance that position i is accepted; at least k rates, in descending order"
    )
    synthetic_acceptance_length: Annotated[float, Field(ge=1.0), NUMBER] | None = entry(
        None, "mean number of tokens per round, including the bonus token (1 to k + 1)"
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
            "acceptance: synthetic needs exactly one of synthetic_acceptance_rates "
            "and synthetic_acceptance_length",
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


def even_rate(length: float, k: int) -> float:
    """Compute the acceptance rate at which rounds of k proposals yield `length` tokens on average.

    The rate is the chance that a proposal is accepted if all proposals before it were accepted. It
    is the same at all k positions. Solves (1 - a^(k+1)) / (1 - a) = length for a (Leviathan et al.,
    equation 1).
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**i for i in range(k + 1)) < length else (low, rate)
    return high


def marginal_rates(keys: SyntheticKeys, own_k: int, k: int) -> tuple[float, ...]:
    """Return the marginal acceptance rates of at least the first k positions.

    If the recipe gives a mean length instead of rates, compute the acceptance rate that yields this
    length at `own_k`, and use the same rate at every k.

    own_k: the k in the recipe. In a sweep, k may differ from it. If it is 0, k is used instead.
    Raises `UsageError` if the recipe gives fewer rates than k.
    """
    rates, length = keys.synthetic_acceptance_rates, keys.synthetic_acceptance_length
    if rates is None:
        assert length is not None, "the recipe's schema checks this"
        return tuple(even_rate(length, own_k or k) ** place for place in range(1, k + 1))
    if len(rates) < k:
        raise UsageError(
            f"synthetic_acceptance_rates: {len(rates)} are given, but --k goes up to {k}",
            "give a rate for every position, or synthetic_acceptance_length",
        )
    return rates


SYNTHETIC = RuleChoice(
    "lossy; accepts proposals at the rates that you give",
    keys=SyntheticKeys,
    is_given=True,
    check=_check,
)
