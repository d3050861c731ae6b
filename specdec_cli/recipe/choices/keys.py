"""The keys that name a method, a rule and a policy, checked against the registry of choices."""

from collections.abc import Callable, Collection
from typing import Annotated

from pydantic import AfterValidator, Field, StrictInt, StrictStr, WithJsonSchema
from pydantic_core import PydanticCustomError

from specdec_cli.recipe.choices.registry import METHODS, POLICIES, RULES
from specdec_cli.recipe.fields import Section


def _one_of(names: Collection[str]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in names:
            expected = ", ".join(map(repr, names))
            raise PydanticCustomError(
                "literal_error", "should be one of {expected}", {"expected": expected}
            )
        return value

    return check


def _schema(names: Collection[str]) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "enum": list(names)})


MethodName = Annotated[StrictStr, AfterValidator(_one_of(METHODS)), _schema(METHODS)]
RuleName = Annotated[StrictStr, AfterValidator(_one_of(RULES)), _schema(RULES)]
PolicyName = Annotated[StrictStr, AfterValidator(_one_of(POLICIES)), _schema(POLICIES)]


class SpeculationKeys(Section):
    """The keys of `speculation` that every recipe has."""

    method: MethodName = Field(
        default="draft_model", description="who proposes; none when there is no draft model"
    )
    num_speculative_tokens: Annotated[StrictInt, Field(ge=0, le=1024)] = Field(
        default=5, description="proposed tokens a round (k); 0 is plain decoding"
    )
    acceptance: RuleName = Field(
        default="rejection",
        description="rejection and block are lossless, typical is not; synthetic fixes the rate",
    )


class LengthKeys(Section):
    """The keys of `speculation.length` that every recipe has."""

    policy: PolicyName = Field(
        default="fixed",
        description="confidence stops a draft that is unsure; adaptive chooses k by its gain",
    )
