"""Limits of tokenizers, whose files come with a model: time, memory, growth of texts, panics.

Does not know transformers. A chat template is a program, which may never end. A regex may take
minutes for a line. Native code aborts the process when memory runs out, so the growth of texts is
bounded before it runs.
"""

import os
import queue
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")

TEMPLATE_SECONDS = 10.0  # of the processor's time, for one conversation
TEMPLATE_BYTES = 2 * 2**30  # of memory beyond what the process has
MOST_CHARACTERS = 2**25  # of a rendered conversation, and of a text that steps make longer
TEXT_SECONDS = 10.0  # for a text, and as much again for each million of characters or ids
FILE_BYTES = 2**28
_READ = {".json", ".txt", ".jinja", ".model", ".tiktoken", ".bpe"}
_MOST_GROWTH = 10_000
_MOST_STEPS = 1000


def unsafe_file(folder: Path) -> Path | None:
    """A file of a tokenizer that is no regular one, or too large to read, if there is one."""
    for file in sorted(folder.iterdir()):
        if file.suffix in _READ and (not file.is_file() or file.stat().st_size > FILE_BYTES):
            return file
    return None


def growth_of(steps: Any, part: str) -> int:
    """How many times as long as a text the steps of a tokenizer can make it, at most.

    steps: one, or a tree of them, as tokenizer.json describes them. Raises `ValueError`, which
    names the `part`, if they are so many, or replace so much, that native code would abort.
    """
    growth, count, inner = 1, 0, [steps]
    while inner:
        one = inner.pop()
        if isinstance(one, list):
            inner += one
        elif isinstance(one, dict):
            inner += one.values()
            count += 1
            texts = (len(str(one.get(key, ""))) for key in ("content", "prepend"))
            growth *= max(1, *texts, _copies(one.get("single")))
        if growth > _MOST_GROWTH:
            raise ValueError(f"its {part} can make a text over {_MOST_GROWTH} times as long")
        if count > _MOST_STEPS:
            raise ValueError(f"its {part} has over {_MOST_STEPS} steps")
    return growth


def _copies(template: Any) -> int:
    """How often a post-processor's template repeats a text."""
    pieces = template if isinstance(template, list) else []
    return sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces)


def check_length(length: int, growth: int) -> None:
    """Raise `ValueError` if steps could make too long a text of one of `length` characters."""
    if growth > 1 and length * growth > MOST_CHARACTERS:
        raise ValueError(
            f"it can make a text {growth} times as long, and there is one of {length} characters"
        )


def is_panic(problem: BaseException) -> bool:
    """Whether native code panicked, which Python has no `Exception` for."""
    return type(problem).__name__ == "PanicException"


def in_time(work: Callable[[], T], length: int) -> T:
    """The result of `work` on a text of a length, without the lines of its panics.

    Raises `TimeoutError` if it takes too long. Native code cannot be interrupted; it is left behind
    in its thread.
    """
    global _worker
    with silent_panics():
        _worker = _worker or _Worker()
        _worker.asked.put(work)
        try:
            found, problem = _worker.answered.get(timeout=TEXT_SECONDS * (1 + length / 1e6))
        except queue.Empty:
            _worker = None
            told = f"it takes over {TEXT_SECONDS:g} seconds for {length} characters or ids"
            raise TimeoutError(told) from None
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
def silent_panics() -> Iterator[None]:
    """Drop the lines that a panic of native code writes to standard error, and nothing else.

    The lines go to file descriptor 2 before Python knows of the panic, so the descriptor leads to
    memory meanwhile. Lines of other threads come out at the end.
    """
    with _held:
        try:
            stderr = os.dup(2)
            memory = os.memfd_create("stderr")
        except (OSError, AttributeError):  # a closed stderr, or another system than Linux
            yield
            return
        is_panicking = False
        os.dup2(memory, 2)
        try:
            yield
        except BaseException as problem:
            is_panicking = is_panic(problem)
            raise
        finally:
            os.dup2(stderr, 2)
            said = os.pread(memory, os.fstat(memory).st_size, 0)
            if is_panicking:
                said = re.split(rb"\n?thread '[^\n]* panicked at ", said)[0]
            with suppress(OSError):
                os.write(stderr, said)
            os.close(memory)
            os.close(stderr)


_held = threading.RLock()  # one thread at a time changes what descriptor 2 is


@contextmanager
def bounded(seconds: float, size: int) -> Iterator[None]:
    """Bound the Python code inside; works in the main thread only.

    seconds: processor time, after which it raises `TimeoutError`. size: bytes that it may take
    beyond what the process has; more raise `MemoryError`.
    """
    if threading.current_thread() is not threading.main_thread():  # signals arrive in that one
        yield
        return

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if (statm := Path("/proc/self/statm")).exists():
        most = int(statm.read_text().split()[0]) * resource.getpagesize() + size
        limits = [n for n in (soft, most) if n != resource.RLIM_INFINITY]
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before or signal.SIG_DFL)
