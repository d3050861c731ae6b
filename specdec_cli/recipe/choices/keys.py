"""The keys that name a method, a rule and a policy, checked against the registry of choices."""

from collections.abc import Callable, Mapping
from typing import Annotated

from pydantic import AfterValidator, Field, StrictInt, StrictStr, WithJsonSchema
from pydantic_core import PydanticCustomError

from specdec_cli.recipe.choices.registry import METHODS, POLICIES, RULES, Choice
from specdec_cli.recipe.fields import Section


def _one_of(names: Mapping[str, Choice]) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in names:
            expected = ", ".join(map(repr, names))
            raise PydanticCustomError(
                "literal_error", "should be one of {expected}", {"expected": expected}
            )
        return value

    return check


def _schema(names: Mapping[str, Choice]) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "enum": list(names)})


def _described(choices: Mapping[str, Choice]) -> str:
    return "; ".join(f"{name}: {choice.what}" for name, choice in choices.items())


MethodName = Annotated[StrictStr, AfterValidator(_one_of(METHODS)), _schema(METHODS)]
RuleName = Annotated[StrictStr, AfterValidator(_one_of(RULES)), _schema(RULES)]
PolicyName = Annotated[StrictStr, AfterValidator(_one_of(POLICIES)), _schema(POLICIES)]


class SpeculationKeys(Section):
    """The keys of `speculation` that every recipe has."""

    method: MethodName = Field(
        default="draft_model", description=f"who proposes; {_described(METHODS)}"
    )
    num_speculative_tokens: Annotated[StrictInt, Field(ge=0, le=1024)] = Field(
        default=5, description="proposed tokens a round (k); 0 is plain decoding"
    )
    acceptance: RuleName = Field(default="rejection", description=_described(RULES))


class LengthKeys(Section):
    """The keys of `speculation.length` that every recipe has."""

    policy: PolicyName = Field(default="fixed", description=_described(POLICIES))
