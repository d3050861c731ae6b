"""The names that a recipe may choose from: built in, and added by plugins.

This module needs no heavy imports. The registries of `methods`, `acceptance` and `lengths` map each
name to its implementation.
"""

from collections.abc import Callable
from typing import Annotated

from pydantic import AfterValidator, StrictStr, WithJsonSchema
from pydantic_core import PydanticCustomError

METHOD, ACCEPTANCE, POLICY = "method", "acceptance", "policy"
_NAMES: dict[str, list[str]] = {
    METHOD: ["draft_model", "ngram", "none"],
    ACCEPTANCE: ["rejection", "block", "typical", "synthetic"],
    POLICY: ["fixed", "confidence", "adaptive"],
}


def add_name(kind: str, name: str) -> None:
    """Let recipes choose `name`. Raises ValueError where it is taken."""
    if name in _NAMES[kind]:
        raise ValueError(f"{kind} {name!r} is registered already")
    _NAMES[kind].append(name)


def remove_name(kind: str, name: str) -> None:
    """Take back what `add_name` added."""
    _NAMES[kind].remove(name)


def _checker(kind: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        if value not in _NAMES[kind]:
            expected = ", ".join(map(repr, _NAMES[kind]))
            raise PydanticCustomError(
                "literal_error", "should be one of {expected}", {"expected": expected}
            )
        return value

    return check


def _schema(kind: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "enum": list(_NAMES[kind])})


MethodName = Annotated[StrictStr, AfterValidator(_checker(METHOD)), _schema(METHOD)]
RuleName = Annotated[StrictStr, AfterValidator(_checker(ACCEPTANCE)), _schema(ACCEPTANCE)]
PolicyName = Annotated[StrictStr, AfterValidator(_checker(POLICY)), _schema(POLICY)]
