"""Makes untrusted text safe for terminals, and shortens messages and values."""

import codecs
import json
import re
import sys
from typing import Any, TextIO

# Control bytes (escape sequences start with one), line separators, direction overrides that reorder
# the text, the invisible byte order mark, and lone surrogates, which no stream can encode. Tab and
# newline are harmless.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
_SHOWN_CHARACTERS = 40
_MAX_LINES = 5


def inert(text: str) -> str:
    """Replace every harmful character of a text by its escape, such as `\\x1b`."""
    return _HARMFUL.sub(lambda match: _escape(match[0]), text)


def say(line: str, stream: TextIO | None = None) -> None:
    """Print a line with harmful characters escaped, on stderr unless a stream is given."""
    print(inert(line), file=stream or sys.stderr, flush=True)


def inert_json(document: str) -> str:
    """Replace harmful characters of a JSON document by JSON escapes. The document still parses to
    the same value."""
    # In JSON, such characters can occur only inside strings, where escapes are allowed.
    return _HARMFUL.sub(lambda match: f"\\u{ord(match[0]):04x}", document)


def _json_escapes(problem: UnicodeError) -> tuple[str, int]:
    """Replace the characters that a stream cannot encode by JSON escapes."""
    assert isinstance(problem, UnicodeEncodeError)
    return json.dumps(problem.object[problem.start : problem.end])[1:-1], problem.end


JSON_ESCAPES = "specdec.json"  # the name of the error handler
codecs.register_error(JSON_ESCAPES, _json_escapes)


def one_line(text: str) -> str:
    """Make a name, such as a key, safe to put into a message: escape characters that are not
    printable, and cut it to 80 characters."""
    shown = "".join(char if char.isprintable() else _escape(char) for char in text[:80])
    return shown if len(text) <= 80 else f"{shown}…"


def shortened(line: str) -> str:
    """Return a line, without its middle if it is very long."""
    return line if len(line) <= 1000 else f"{line[:495]} … {line[-495:]}"


def first_line(problem: BaseException) -> str:
    """Return the first non-blank line of an exception's message, or "" if there is none."""
    return "".join(str(problem).strip().splitlines()[:1])


def unexpected(problem: BaseException) -> str:
    """Return an exception's type and the first non-blank line of its message. Use this for errors
    that nothing foresees: a message such as that of a KeyError means little without the type."""
    return f"{type(problem).__name__}: {first_line(problem)}".removesuffix(": ")


def reason_of(problem: BaseException) -> str:
    """Return the first non-blank line of an exception's message, cut to 200 characters. If the line
    ends with a colon, add the next one. If there is no message, return the name of the exception's
    type. A `KeyError` gets it too, since its message is usually only a key."""
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    told = lines[:2] if lines and lines[0].endswith(":") else lines[:1]
    is_bare = not told or isinstance(problem, KeyError)
    return (unexpected(problem) if is_bare else " ".join(told))[:200]


def shown(value: object) -> str:
    """Write a value as JSON, cut to 40 characters."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def in_lines(told: list[str], what: str, where: str = "") -> str:
    """List up to five problems, one per line, and say how many more there are.

    what: the noun for an item that has a problem, such as "line".
    where: the file that has the problems; "" if no file is to be named.
    """
    shown, more = told[:_MAX_LINES], len(told) - _MAX_LINES
    rest = f"{where}: and" if where else "and"
    return "\n".join([*shown, f"{rest} {counted(more, f'more bad {what}')}"] if more > 0 else shown)


def counted(number: int, noun: str) -> str:
    """Write a number with its noun, such as `1 tensor` or `2 tensors`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def of_many(told: list[str], what: str) -> str:
    """Write the number of bad items, and the first of their problems."""
    if len(told) == 1:
        return f"1 bad {what}: {told[0]}"
    return f"{len(told)} bad {what}s, the first of them: {told[0]}"


def parse_bytes(text: str) -> int:
    """Parse a size such as `80GiB`, `141G` or a number of bytes. Units such as GB are powers of
    1000; GiB and G are powers of 1024.

    Raises `ValueError` if it is not a size, or if it is so small that a unit was probably
    forgotten.
    """
    match = re.fullmatch(r"\s*([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmgt]?)(i?b)?\s*", text, re.I)
    if match is None or not (number := float(match[1])):
        raise ValueError(f"expected a size such as 80GiB, got {text!r}")
    if not match[2] and number < 1024:  # a number that was probably meant as GiB
        raise ValueError(f"{text.strip()} is {text.strip()} bytes; did you mean {match[1]}GiB?")
    base = 1000 if (match[3] or "").lower() == "b" else 1024
    return int(number * base ** " kmgt".index(match[2].lower() or " "))


def digest(value: Any) -> str:
    """Convert a value to JSON and compute a short hash of it. The order of keys does not matter.

    Run folders contain such hashes, so the computation must not change.
    """
    import hashlib  # imported here, so that --help does not load it

    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def is_unicode(text: str) -> bool:
    """Return True if a text can be encoded as UTF-8, that is, if it contains no lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
