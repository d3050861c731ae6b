"""Turns signals into exceptions that end a command."""

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from types import FrameType

from specdec_cli.errors import ExitCode

# A signal that comes this soon after another is the same request: a second Ctrl-C, or a signal to
# the whole process group.
_SAME_REQUEST_S = 5.0

# Python's default handlers. Handlers set by nohup or a caller are kept.
_USUAL: dict[signal.Signals, Callable[[int, FrameType | None], object] | signal.Handlers] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


@contextlib.contextmanager
def signals(*, is_last: bool) -> Iterator[list[signal.Signals]]:
    """During the block, raise an exception on SIGINT, SIGTERM and SIGHUP, so that the command ends
    with its clean-up.

    A signal soon after another is ignored, because it would interrupt the clean-up. A later signal
    raises again, because the clean-up may hang, or the first exception may be lost in a `__del__`.
    is_last: whether the process ends after this block; if so, and a signal came, later signals are
    ignored. Yields the list of signals received so far.
    """
    taken: list[signal.Signals] = []
    asked: list[signal.Signals] = []
    raised_at = 0.0

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal raised_at
        if asked and time.monotonic() - raised_at < _SAME_REQUEST_S:
            return
        raised_at = time.monotonic()
        asked.append(signal.Signals(signum))
        is_interrupt = signum == signal.SIGINT
        raise KeyboardInterrupt if is_interrupt else SystemExit(int(ExitCode.SIGTERM))

    # ValueError: only the main thread can set handlers, and only it receives signals.
    with contextlib.suppress(ValueError):
        for number, usual in _USUAL.items():
            if signal.getsignal(number) == usual:
                signal.signal(number, end)
                taken.append(number)
    try:
        yield asked
    finally:
        is_ending = is_last and bool(asked)
        for number in taken:
            signal.signal(number, signal.SIG_IGN if is_ending else _USUAL[number])
