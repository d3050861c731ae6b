"""Text and JSON files, read line by line so that each bad line can be named.

Does not know what makes a row a prompt: rows are text or records.
"""

import json
from collections.abc import Iterator
from json.decoder import JSONDecodeError, JSONDecoder
from typing import BinaryIO

from specdec_cli.errors import UsageError
from specdec_cli.prompts.types import BadRow
from specdec_cli.text import shown

MAX_LINE_BYTES = 8 * 1024 * 1024
BOM = b"\xef\xbb\xbf"

_TOO_LONG = f"longer than {MAX_LINE_BYTES // 2**20} MiB, not a prompt"
_JSON_SPACE = " \t\r\n"

Rows = Iterator[tuple[str, object]]


def text_rows(file: BinaryIO, name: str) -> Rows:
    """Each line that is not blank."""
    for number, raw in numbered_lines(file):
        try:
            line = decoded(raw)
        except BadRow as bad:
            yield f"{name}:{number}", bad
        else:
            if line.strip():
                yield f"{name}:{number}", line


def jsonl_rows(file: BinaryIO, name: str) -> Rows:
    """The object on each line that is not blank."""
    for where, line in text_rows(file, name):
        if isinstance(line, str):
            try:
                record = _parsed(line)
                if not isinstance(record, dict):
                    raise BadRow('should be a JSON object, such as {"prompt": "..."}')
            except BadRow as bad:
                yield where, bad
            else:
                yield where, record
        else:
            yield where, line


def json_rows(file: BinaryIO, name: str) -> Rows:
    """The items of a JSON list, or the objects of a file with one object a line."""
    start = file.tell()
    if not file.read(1024).removeprefix(BOM).lstrip().startswith(b"["):
        file.seek(start)
        yield from jsonl_rows(file, name)
        return
    file.seek(start)
    yield from _items(_whole(file, name), name)


def _whole(file: BinaryIO, name: str) -> str:
    raw = file.read().removeprefix(BOM)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(f"{name}:{line}: not UTF-8 text") from None


def _items(text: str, name: str) -> Rows:
    """Decode one item after the other, so that each has its line number."""
    twice: list[str] = []

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) < len(pairs):
            keys = [key for key, _ in pairs]
            twice.append(next(key for key in keys if keys.count(key) > 1))
        return found

    decoder = JSONDecoder(object_pairs_hook=unique)
    place, line, seen = _skip_space(text, text.index("[") + 1), 1, 0
    if text[place : place + 1] == "]":
        _check_end(text, place + 1, name)
        return
    while True:
        line, seen = line + text.count("\n", seen, place), place
        where = f"{name}:{line}"
        twice.clear()
        try:
            item, place = decoder.raw_decode(text, place)
        except JSONDecodeError as error:
            raise UsageError(f"{name}:{error.lineno}: {_not_json(error)}") from None
        except RecursionError:
            raise UsageError(f"{where}: not usable JSON: nested too deeply") from None
        except ValueError:  # an integer of thousands of digits
            raise UsageError(f"{where}: not usable JSON: a number is too long") from None
        yield where, BadRow(f"duplicate key {shown(twice[0])}") if twice else item
        place = _skip_space(text, place)
        separator = text[place : place + 1]
        if separator == "]":
            _check_end(text, place + 1, name)
            return
        if separator != ",":
            line += text.count("\n", seen, place)
            raise UsageError(f"{name}:{line}: not JSON: expected a comma or the end of the list")
        place = _skip_space(text, place + 1)


def _check_end(text: str, place: int, name: str) -> None:
    """Raise `UsageError` if anything but space follows the list that ended before `place`."""
    place = _skip_space(text, place)
    if place < len(text):
        line = text.count("\n", 0, place) + 1
        raise UsageError(
            f"{name}:{line}: not JSON: there is more after the end of the list",
            "make one list of several, or a .jsonl file with an object a line",
        )


def _skip_space(text: str, place: int) -> int:
    while text[place : place + 1] in _JSON_SPACE and place < len(text):
        place += 1
    return place


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines counted from 1, without byte order mark; a too long line is cut after the limit."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        rest = raw
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
            pass
        yield number, raw.removeprefix(BOM) if number == 1 else raw


def decoded(raw: bytes) -> str:
    """A line as text, without its line end. Raises `BadRow`."""
    if len(raw) > MAX_LINE_BYTES:
        raise BadRow(_TOO_LONG)
    if b"\0" in raw:
        raise BadRow("holds a NUL byte: a binary file, or UTF-16?")
    try:
        return raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise BadRow(f"not UTF-8 text (byte {error.start + 1} of the line)") from None


def _parsed(line: str) -> object:
    try:
        return json.loads(line, object_pairs_hook=_object)
    except JSONDecodeError as error:
        raise BadRow(f"{_not_json(error)} at column {error.colno}") from None
    except RecursionError:
        raise BadRow("not usable JSON: nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise BadRow("not usable JSON: a number is too long") from None


def _not_json(error: JSONDecodeError) -> str:
    return f"not JSON: {error.msg.removesuffix(' at')}"


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; refuses duplicate keys, since Python would silently keep the last value."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise BadRow(f"duplicate key {shown(key)}")
        found[key] = value
    return found
