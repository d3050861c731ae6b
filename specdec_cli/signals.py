"""Turns signals into exceptions that end a command."""

import atexit
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from specdec_cli.errors import ExitCode

# Signals within this many seconds of each other count as one request to stop. For example, a user
# presses Ctrl-C twice, or a process gets a signal both directly and through its process group.
_SAME_REQUEST_S = 5.0

# Python's default handlers. Only these are replaced; handlers set by nohup or a caller are kept.
_USUAL: dict[signal.Signals, Callable[[int, FrameType | None], object] | signal.Handlers] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


@contextlib.contextmanager
def signals(*, is_last: bool) -> Iterator[list[signal.Signals]]:
    """Raise an exception in the block on SIGINT, SIGTERM or SIGHUP, so that the command cleans up
    before it ends. Yield the list of signals received so far.

    A second signal within `_SAME_REQUEST_S` is ignored, so that it does not interrupt the clean-up.
    A later one raises an exception again, because the clean-up may hang, or Python may have
    swallowed the first exception (it does so in a `__del__`).

    is_last: whether the process ends after this block. If it does, signals that come within
        `_SAME_REQUEST_S` after the block are ignored. Later ones end the process at once, because
        an exit handler, such as a plugin's, may hang.
    """
    taken: list[signal.Signals] = []
    asked: list[signal.Signals] = []
    raised_at = left_at = 0.0

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal raised_at
        if asked and time.monotonic() - raised_at < _SAME_REQUEST_S:
            return
        raised_at = time.monotonic()
        asked.append(signal.Signals(signum))
        is_interrupt = signum == signal.SIGINT
        raise KeyboardInterrupt if is_interrupt else SystemExit(int(ExitCode.SIGTERM))

    def end_at_once(signum: int, frame: FrameType | None) -> None:
        if time.monotonic() - left_at >= _SAME_REQUEST_S:
            os._exit(int(ExitCode.SIGINT if signum == signal.SIGINT else ExitCode.SIGTERM))

    if is_last:
        # This runs after all exit handlers that the block registers. Python would reset handlers
        # like the one above to those that kill a process while it ends.
        atexit.register(_ignore, taken)
    # Outside the main thread, setting a handler raises `ValueError`. It is ignored, because only
    # the main thread receives signals.
    with contextlib.suppress(ValueError):
        for number, usual in _USUAL.items():
            if signal.getsignal(number) == usual:
                signal.signal(number, end)
                taken.append(number)
    try:
        yield asked
    finally:
        left_at = time.monotonic()
        for number in taken:
            signal.signal(number, end_at_once if is_last else _USUAL[number])


def _ignore(numbers: Iterable[signal.Signals]) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def postponed() -> Iterator[None]:
    """Hold back signals that Python code handles until the block ends; the first of them counts.

    A handler's exception would end the process where it meets C++ code that calls Python, as in an
    import of torch.
    """
    came: list[int] = []
    handlers = {}
    with contextlib.suppress(ValueError):  # outside the main thread, as above
        for number in _USUAL:
            if callable(handler := signal.getsignal(number)):
                handlers[number] = handler
                signal.signal(number, lambda signum, _: came.append(signum))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
