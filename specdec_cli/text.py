"""Text that we did not write made harmless on a terminal; short forms of messages and values.

Knows nothing of who prints it or where.
"""

import hashlib
import json
import re
from typing import Any

# Control bytes (escape sequences start with one), line and direction overrides that reorder what
# is read, the byte order mark, which cannot be seen, and lone surrogates, which no stream can
# encode. Tab and newline stay.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)
_SHOWN_CHARACTERS = 40


def inert(text: str) -> str:
    """The text with every harmful character written as its escape, such as `\\x1b`."""
    return _HARMFUL.sub(lambda match: _escape(match[0]), text)


def inert_json(document: str) -> str:
    """The same JSON with harmful characters as its own escapes, so that it reads back equal."""
    # Outside of strings JSON has none of them.
    return _HARMFUL.sub(lambda match: f"\\u{ord(match[0]):04x}", document)


def one_line(text: str) -> str:
    """A name, such as a key, for the middle of a message: nothing in it is invisible or long."""
    shown = "".join(char if char.isprintable() else _escape(char) for char in text[:80])
    return shown if len(text) <= 80 else f"{shown}…"


def first_line(problem: BaseException) -> str:
    """The first line of what an exception says that says anything; empty where none does."""
    return "".join(str(problem).strip().splitlines()[:1])


def shown(value: object) -> str:
    """A value as JSON, and nearly YAML, would have it, cut short."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def digest(value: Any) -> str:
    """A short name for a value as JSON, whatever the order of its keys.

    Run folders hold it, so what it is computed from may not change.
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
