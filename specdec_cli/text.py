"""Making text that we did not write harmless on a terminal.

Knows nothing of who prints it or where.
"""

import re

# Control bytes (escape sequences start with one), line and direction overrides that reorder what
# is read, and lone surrogates, which no stream can encode. Tab and newline stay.
_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def inert(text: str) -> str:
    """The text with every harmful character written as its escape, such as `\\x1b`."""
    return _HARMFUL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)
