"""Reads text and JSON files line by line, so that errors can name each bad line.

Rows are text or records. They are converted to prompts elsewhere.
"""

import json
from collections.abc import Iterator
from json.decoder import JSONDecodeError, JSONDecoder
from typing import BinaryIO

from specdec_cli.errors import UsageError
from specdec_cli.prompts.types import BadRow
from specdec_cli.recipe import source
from specdec_cli.text import shown

MAX_LINE_BYTES = 8 * 1024 * 1024
BOM = b"\xef\xbb\xbf"
HAS_NUL = "holds a NUL byte: a binary file, or UTF-16?"

_TOO_LONG = f"longer than {MAX_LINE_BYTES // 2**20} MiB, not a prompt"
_JSON_SPACE = " \t\r\n"

Rows = Iterator[tuple[str, object]]


def text_rows(file: BinaryIO, name: str) -> Rows:
    """Yield a pair for each line that is not blank: its place (`prompts.txt:3`), and its text or a
    `BadRow`."""
    for number, raw in numbered_lines(file):
        line = decoded(raw)
        if isinstance(line, BadRow) or line.strip():
            yield f"{name}:{number}", line


def jsonl_rows(file: BinaryIO, name: str) -> Rows:
    """Yield a pair for each line that is not blank: its place (`prompts.jsonl:3`), and its JSON
    object or a `BadRow`."""
    for where, line in text_rows(file, name):
        yield where, _record(line) if isinstance(line, str) else line


def json_rows(file: BinaryIO, name: str) -> Rows:
    """Yield a pair for each item of a JSON list: its place (`prompts.json:3`), and the item or a
    `BadRow`. If the file is not a list, read one object per line, as `jsonl_rows` does."""
    start = file.tell()
    if not file.read(1024).removeprefix(BOM).lstrip().startswith(b"["):
        file.seek(start)
        yield from jsonl_rows(file, name)
        return
    file.seek(start)
    yield from _items(source.decoded(file.read(), name), name)


def _items(text: str, name: str) -> Rows:
    """Yield the items of a JSON list with their places. They are decoded one by one, because the
    `json` module does not report the line numbers of a list's items."""
    decoder = JSONDecoder(object_pairs_hook=_object)
    place, line, seen = _skip_space(text, text.index("[") + 1), 1, 0
    is_over = text[place : place + 1] == "]"
    place += is_over
    while not is_over:
        line, seen = line + text.count("\n", seen, place), place
        item: object
        try:
            try:
                item, place = decoder.raw_decode(text, place)
            except BadRow as bad:
                item, place = bad, JSONDecoder().raw_decode(text, place)[1]
        except (ValueError, RecursionError) as error:
            at = error.lineno if isinstance(error, JSONDecodeError) else line
            raise UsageError(f"{name}:{at}: {_not_json(error)}") from None
        yield f"{name}:{line}", item
        place = _skip_space(text, place)
        is_over = text[place : place + 1] == "]"
        if not is_over and text[place : place + 1] != ",":
            line += text.count("\n", seen, place)
            raise UsageError(f"{name}:{line}: not JSON: expected a comma or the end of the list")
        place = _skip_space(text, place + 1)
    if (rest := _skip_space(text, place)) < len(text):
        line = text.count("\n", 0, rest) + 1
        raise UsageError(
            f"{name}:{line}: not JSON: there is more after the end of the list",
            "join the lists into one, or write a .jsonl file with one object per line",
        )


def _skip_space(text: str, place: int) -> int:
    while text[place : place + 1] in _JSON_SPACE and place < len(text):
        place += 1
    return place


def numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its number, from 1, without a byte order mark. A line longer than
    `MAX_LINE_BYTES` is cut one byte past this limit, so that `decoded` refuses it."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        rest = raw
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
            pass
        yield number, raw.removeprefix(BOM) if number == 1 else raw


def decoded(raw: bytes) -> str | BadRow:
    """Decode a line, without its line ending. Returns a `BadRow` if it is not usable text."""
    if len(raw) > MAX_LINE_BYTES:
        return BadRow(_TOO_LONG)
    if b"\0" in raw:
        return BadRow(HAS_NUL)
    try:
        return raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        return BadRow(f"not UTF-8 text (byte {error.start + 1} of the line)")


def _record(line: str) -> dict[str, object] | BadRow:
    try:
        found = json.loads(line, object_pairs_hook=_object)
    except BadRow as bad:
        return bad
    except (ValueError, RecursionError) as error:
        at = f" at column {error.colno}" if isinstance(error, JSONDecodeError) else ""
        return BadRow(f"{_not_json(error)}{at}")
    if not isinstance(found, dict):
        return BadRow('should be a JSON object, such as {"prompt": "..."}')
    return found


def _not_json(error: Exception) -> str:
    if isinstance(error, JSONDecodeError):
        return f"not JSON: {error.msg.removesuffix(' at')}"
    # Python refuses an integer of thousands of digits with a plain ValueError.
    deep = isinstance(error, RecursionError)
    return f"not usable JSON: {'nested too deeply' if deep else 'a number is too long'}"


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Make a JSON object. Raises `BadRow` for a duplicate key, since Python would silently keep its
    last value."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise BadRow(f"duplicate key {shown(key)}")
        found[key] = value
    return found
