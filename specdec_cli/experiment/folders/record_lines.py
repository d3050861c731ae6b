"""Reads and writes records as JSON, one object per line.

Every record is validated when it is read, because a file may have been damaged or edited. Does not
import torch.
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from specdec_cli.core.figures import Record
from specdec_cli.errors import Notice, SetupError
from specdec_cli.text import inert_json, one_line

R = TypeVar("R", bound=Record)


def read_records(
    path: Path, kind: type[R], further: Callable[[R], str | None] = lambda _: None
) -> list[R]:
    """Read the records of a .jsonl file. Return an empty list if the file is missing. An unfinished
    last line is ignored.

    further: an additional check, which returns an error message for a record, or None.

    Raises `SetupError` if the file cannot be read, or at the first line without a valid record.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise SetupError(f"cannot read {path}: {problem.strerror}") from None
    records = []
    for number, line in enumerate(lines, start=1):
        found = parsed(line, kind)
        told = found if isinstance(found, str) else further(found)
        if isinstance(found, str) or told is not None:
            of_run = f" of this run: {told}" if told else ""
            raise SetupError(
                f"{path}:{number}: not a record{of_run}", "the file was damaged or edited"
            )
        records.append(found)
    return records


def added_records(path: Path, kind: type[R]) -> Callable[[], list[R]]:
    """Return a function that reads the records added to a .jsonl file since its previous call."""
    offset = 0

    def read() -> list[R]:
        nonlocal offset
        try:
            with path.open("rb") as file:
                file.seek(offset)
                whole = file.read().rpartition(b"\n")[0]
        except OSError:
            return []
        offset += len(whole)
        found = (parsed(line, kind) for line in whole.split(b"\n"))
        return [record for record in found if not isinstance(record, str)]

    return read


def parsed(line: bytes, kind: type[R]) -> R | str:
    """Parse a line into a record, or return an error message. The message is empty if the line is
    not a JSON object."""
    return checked(json_of(line), kind)


def json_of(text: bytes | str) -> Any:
    """Parse a JSON text. Return None if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def checked(found: object, kind: type[R]) -> R | str:
    """Turn a value read from JSON into a record, or return an error message."""
    if not isinstance(found, dict):
        return ""
    try:
        return kind.model_validate(found)
    except ValidationError as problem:
        errors = problem.errors(include_url=False)
        return described(min(errors, key=lambda error: error["type"] == "missing"))


def elsewhere(record: Record, known: Mapping[str, Collection[Any]]) -> str | None:
    """Return a message about the first field whose value is not allowed, or None if there is none.

    known: the allowed values by field name. Fields that the record lacks are not checked.
    """
    for name, values in known.items():
        if (value := getattr(record, name, None)) not in values and hasattr(record, name):
            return f"its {name} is {one_line(str(value))}"
    return None


def described(error: ErrorDetails) -> str:
    """Turn a validation error of pydantic into a short message."""
    key = ".".join(one_line(part) for part in error["loc"] if isinstance(part, str))
    match error["type"]:
        case "impossible":
            return error["msg"]
        case "missing":
            return f"it has no {key}"
        case "literal_error":
            return f"its {key} is {one_line(str(error['input']))}"
    return f"{key} is damaged"


def to_json(document: Any) -> str:
    """Format a document as one line of strict JSON. Characters that could harm a terminal are
    escaped. Numbers that are not finite become null."""
    try:
        text = json.dumps(document, ensure_ascii=False, allow_nan=False, default=_as_dict)
    except ValueError:  # some number is not finite
        loose = json.dumps(document, default=_as_dict)
        text = json.dumps(json.loads(loose, parse_constant=lambda _: None), ensure_ascii=False)
    return inert_json(text)


def _as_dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, Record | Notice):
        raise TypeError(f"{type(value).__name__} has no JSON form")
    return value.as_dict()
