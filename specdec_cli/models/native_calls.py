"""Calls of native code: their time is bounded, and their lines stay out of results.

Does not know what the code does. It cannot be interrupted, and panics in it are no `Exception`.
"""

import fcntl
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from specdec_cli.text import inert, shortened

T = TypeVar("T")

TEXT_SECONDS = 10.0  # for a text, and as much again for each million of characters or ids


def is_panic(problem: BaseException) -> bool:
    """Whether native code panicked, which Python has no `Exception` for."""
    return type(problem).__name__ == "PanicException"


def in_time(work: Callable[[], T], length: int) -> T:
    """The result of `work` on a text of a length, without the lines of native code.

    Raises `TimeoutError` if it takes too long. Native code cannot be interrupted; it is left behind
    in its thread.
    """
    global _worker
    with native_lines():
        worker, _worker = _worker or _Worker(), None
        worker.asked.put(work)
        try:
            found, problem = worker.answered.get(timeout=TEXT_SECONDS * (1 + length / 1e6))
        except queue.Empty:
            told = f"it takes over {TEXT_SECONDS:g} seconds for {length} characters or ids"
            raise TimeoutError(told) from None
        _worker = worker  # not one that still owes an answer, after an interrupt too
        if problem is not None:
            raise problem
        result: T = found
        return result


class _Worker:
    """A thread that does one piece of work after another: starting one for each takes longer."""

    def __init__(self) -> None:
        self.asked: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self.answered: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            work = self.asked.get()
            try:
                self.answered.put((work(), None))
            except BaseException as problem:
                self.answered.put((None, problem))


_worker: _Worker | None = None


def _forget_worker() -> None:
    global _worker
    _worker = None


os.register_at_fork(after_in_child=_forget_worker)  # a fork has none of the threads


@contextmanager
def native_lines() -> Iterator[None]:
    """Keep lines of native code from standard output, and the lines of its panics from both.

    They go to the file descriptors 1 and 2, so these lead to memory meanwhile. A result may be on
    standard output: what native code says there goes to standard error instead. Lines of other
    threads come out at the end.
    """
    with _held:
        held: dict[int, tuple[int, int]] = {}  # a copy of the descriptor, and the memory
        for descriptor in (1, 2):
            # A closed stream, or another system than Linux.
            with suppress(OSError, AttributeError):
                held[descriptor] = _copy(descriptor), _memory()
        is_panicking = False
        try:
            for descriptor, (_, memory) in held.items():
                os.dup2(memory, descriptor)
            yield
        except BaseException as problem:
            is_panicking = is_panic(problem)
            raise
        finally:
            for descriptor, (copy, _) in held.items():
                os.dup2(copy, descriptor)
            said = b""
            for descriptor, (copy, memory) in held.items():
                text = os.pread(memory, os.fstat(memory).st_size, 0)
                said += _escaped(text) if descriptor == 1 else text
                os.close(copy)
                os.close(memory)
            if is_panicking:
                said = re.split(rb"\n?thread '[^\n]* panicked at ", said)[0]
            if said:
                with suppress(OSError):
                    os.write(2, said)


def _copy(descriptor: int) -> int:
    """A copy of a descriptor. Its number is none of the standard streams', which may be closed."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def _memory() -> int:
    """A descriptor of a file in memory."""
    made = os.memfd_create("lines")
    try:
        return _copy(made)
    finally:
        os.close(made)


def _escaped(said: bytes) -> bytes:
    """Lines without control characters: they may quote names in files."""
    lines = said.decode(errors="replace").splitlines()
    return "".join(f"{inert(shortened(line))}\n" for line in lines).encode()


_held = threading.RLock()  # one thread at a time changes what the descriptors are
