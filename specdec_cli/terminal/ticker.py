"""A line of progress now and then on a stderr that is no terminal, such as a job's log."""

import threading
import time
from collections.abc import Callable

from specdec_cli.terminal import render

_SILENCE_S = 30.0  # after which a line comes
_LOOK_S = 1.0


class Ticker:
    """Prints `text()` whenever nothing was said for half a minute, from a thread, until `close`."""

    def __init__(self, text: Callable[[], str]) -> None:
        self._text = text
        self._began = self._last = time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def say(self, line: str) -> None:
        """Print a line, after which the next silence begins."""
        self._last = time.monotonic()
        render.say(line)

    def close(self) -> None:
        """Say nothing more."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            now = time.monotonic()
            if now - self._last >= _SILENCE_S:
                minutes, seconds = divmod(round(now - self._began), 60)
                self.say(f"{self._text()} after {minutes}:{seconds:02d}")
