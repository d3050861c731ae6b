"""Lines of progress on a stderr on which nothing can be redrawn.

Imports nothing heavy.
"""

import sys
import threading
import time
from collections.abc import Callable

from specdec_cli.text import say

_SILENCE_S = 30.0  # seconds of silence after which a line is printed
_LOOK_S = 1.0


def can_redraw() -> bool:
    """Return True if stderr is a terminal on which bars and live tables appear. On one that cannot
    move its cursor (TERM=dumb) rich shows none of them."""
    if not sys.stderr.isatty():
        return False
    from rich.console import Console

    out = Console(file=sys.stderr)
    return out.is_terminal and not out.is_dumb_terminal


class Ticker:
    """Prints the result of `text()` whenever half a minute has passed without output. It runs in a
    thread until `close`."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self._began = self._last = time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def say(self, line: str) -> None:
        """Print a line, and count the silence from now on."""
        self._last = time.monotonic()
        say(line)

    def close(self) -> None:
        """Stop printing."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            now = time.monotonic()
            if now - self._last >= _SILENCE_S:
                minutes, seconds = divmod(round(now - self._began), 60)
                self.say(f"{self._text()} after {minutes}:{seconds:02d}")
