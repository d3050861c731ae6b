"""The types of values in a recipe, and their checks."""

import re
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
)
from pydantic_core import PydanticCustomError

from specdec_cli.text import is_unicode, parse_bytes, shown

_YES = frozenset({"yes", "on", "y", "true"})
_NO = frozenset({"no", "off", "n", "false"})
_EXPONENTIAL = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+")


def _switch_word(value: object) -> object:
    """Turn booleans, "yes" and "no" into "on" or "off". YAML 1.1 tools treat an unquoted `on` or
    `off` as a boolean, and may write it back as true or false."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return {"yes": "on", "no": "off"}.get(value, value) if isinstance(value, str) else value


def _yes_or_no(value: object) -> object:
    """Turn words such as "yes" and "off" into booleans. The YAML reader in `source` leaves them as
    text, since only true and false are booleans in YAML 1.2."""
    word = value.lower() if isinstance(value, str) else None
    return True if word in _YES else False if word in _NO else value


def _number(value: object) -> object:
    """Reject text and booleans where a number is expected. Text such as "1e-6" is allowed, because
    YAML 1.1 readers return this number as text."""
    if isinstance(value, bool) or (isinstance(value, str) and not _EXPONENTIAL.fullmatch(value)):
        raise PydanticCustomError("float_type", "Input should be a valid number")
    return value


def _byte_count(value: object) -> object:
    """Turn sizes such as 8GiB into bytes."""
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value)
    except ValueError as problem:
        raise PydanticCustomError("size", "{told}", {"told": str(problem)}) from None


def _refusing(is_wrong: Callable[[str], bool], told: str) -> AfterValidator:
    """Make a validator that rejects text for which `is_wrong` is true. told: the error message."""

    def check(value: str) -> str:
        if is_wrong(value):
            raise PydanticCustomError("text", told)
        return value

    return AfterValidator(check)


# Reject text that cannot be encoded as UTF-8, and text that no file system accepts as a path.
_ENCODED = _refusing(lambda text: not is_unicode(text), "should be valid Unicode text")
_NO_NUL = _refusing(lambda text: "\0" in text, "should not contain a NUL character")
_NOT_BLANK = _refusing(lambda text: not text.strip(), "should be more than white space")
# Reject line breaks, so that messages that quote the value stay on one line.
_ONE_LINE = _refusing(lambda text: "\n" in text, "should not contain a line break")
_NO_EQUALS = _refusing(lambda text: "=" in text, "should not contain an equals sign")
_GGUF = _refusing(
    lambda name: not name.endswith(".gguf") or not {"", ".."}.isdisjoint(name.split("/")),
    "should name a .gguf file in the model's folder",
)

# These limits keep counts well below the largest valid tensor index or file size.
MAX_COUNT = 2**31 - 1
MAX_BATCH = 2**16  # far more sequences than any device decodes at once
MAX_BYTES = 2**63 - 1
# torch stores a timeout as nanoseconds in 64 bits, which would overflow at ten times this limit.
MAX_SECONDS = 1e9
MIN_RATE, MAX_RATE = 1e-6, 1e6  # the least is a request in twelve days
MAX_K = 1024  # proposed tokens per round

Text = Annotated[StrictStr, _ENCODED, _NO_NUL]
Words = Annotated[StrictStr, Field(min_length=1), _ENCODED, _NO_NUL]
Name = Annotated[Words, _NOT_BLANK]
VariableName = Annotated[Name, _NO_EQUALS]  # of the environment
Place = Annotated[Name, _ONE_LINE]
GgufName = Annotated[Place, _GGUF]
Count = Annotated[StrictInt, Field(ge=1, le=MAX_COUNT)]
_Bytes = Annotated[StrictInt, Field(ge=1, le=MAX_BYTES)]
ByteCount = Annotated[_Bytes, BeforeValidator(_byte_count, json_schema_input_type=_Bytes | str)]
CountOrZero = Annotated[StrictInt, Field(ge=0, le=MAX_COUNT)]
Truth = Annotated[StrictBool, BeforeValidator(_yes_or_no)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch_word)]
# NUMBER must come after Field(...) in Annotated, or Field's limits are lost from the JSON Schema.
NUMBER = BeforeValidator(_number)
Probability = Annotated[float, Field(ge=0.0, le=1.0), NUMBER]
Part = Annotated[float, Field(gt=0.0, le=1.0), NUMBER]
Seconds = Annotated[float, Field(gt=0.0, le=MAX_SECONDS), NUMBER]
BatchSize = Annotated[StrictInt, Field(ge=1, le=MAX_BATCH)]
Tokens = Annotated[StrictInt, Field(ge=0, le=MAX_K)]


def _rates(value: object) -> object:
    """Return a single rate or a list of rates as a tuple; None stays None. Infinity, which
    is how YAML reads `.inf`, becomes the text "inf"."""
    each = list(value) if isinstance(value, list | tuple) else [value]
    return None if value is None else tuple("inf" if one == float("inf") else one for one in each)


def _rate(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value != "inf" and not (is_number and MIN_RATE <= float(str(value)) <= MAX_RATE):
        told = "should be a number of requests per second from 1e-6 to 1e6, or inf, not {value}"
        raise PydanticCustomError("rate", told, {"value": shown(value)})
    return value


def _rising(rates: tuple[float | str, ...]) -> tuple[float | str, ...]:
    if not rates:
        raise PydanticCustomError("rate", "should not be empty")
    return tuple(sorted(set(rates), key=float))


_Rate = Annotated[float | Literal["inf"], BeforeValidator(_rate)]
Rates = Annotated[
    tuple[_Rate, ...],
    AfterValidator(_rising),
    BeforeValidator(_rates, json_schema_input_type=tuple[_Rate, ...] | _Rate | None),
]


def entry(default: object, description: str, **more: Any) -> Any:
    """Declare a key of a recipe, with its default and description. more: further arguments of
    `pydantic.Field`."""
    return Field(default=default, description=description, **more)


class Section(BaseModel):
    """A section of a recipe. It is immutable, and unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, serialize_by_alias=True
    )
