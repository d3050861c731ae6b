"""Server-sent events: bytes in, the data of whole events out. Knows no dialect."""

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")


class Events:
    """A parser of one stream, whose pieces may be cut anywhere.

    Comments and other fields than `data` are skipped, and the lines of one event joined, as the
    HTML standard on server-sent events says.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that `piece` completes."""
        text = self._rest + piece
        # A carriage return at the end may be the first half of a line's end.
        held = b"\r" if text.endswith(b"\r") else b""
        *lines, rest = _LINE_END.split(text[: len(text) - len(held)])
        self._rest = rest + held
        found = []
        for line in lines:
            if line:
                field, _, value = line.partition(b":")
                if field == b"data":
                    self._data.append(value.removeprefix(b" "))
            elif self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found
