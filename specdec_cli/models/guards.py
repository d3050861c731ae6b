"""Guards around tokenizers, whose files come with a model: sizes, growth of texts, templates, and
calls of their native code.

Does not know transformers. A chat template is a program, which may never end. Native code cannot be
interrupted, its panics are no `Exception`, and it aborts the process when memory runs out. So its
time is bounded from outside, and the growth of texts before it runs.
"""

import fcntl
import os
import re
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from specdec_cli.text import inert, shortened

T = TypeVar("T")

TEXT_SECONDS = 10.0  # for a text, and as much again for each million of characters or ids
TEMPLATE_SECONDS = 10.0  # of the processor's time, for one conversation
TEMPLATE_BYTES = 2 * 2**30  # of memory beyond what the process has
MOST_CHARACTERS = 2**25  # of a rendered conversation, and of a text that steps make longer
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
    """The most by which steps, as tokenizer.json describes them, can multiply a text's length.

    Raises `ValueError`, which names the `part`, if they are so many that native code would abort.
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
    """The number of times that a post-processor's template repeats a text."""
    pieces = template if isinstance(template, list) else []
    return sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces)


def check_length(length: int, growth: int) -> None:
    """Raise `ValueError` if steps could make too long a text of one of `length` characters."""
    if growth > 1 and length * growth > MOST_CHARACTERS:
        raise ValueError(
            f"it can make a text {growth} times as long, and there is one of {length} characters"
        )


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


def is_panic(problem: BaseException) -> bool:
    """Whether native code panicked, which Python has no `Exception` for."""
    return type(problem).__name__ == "PanicException"


@contextmanager
def refusing(
    error: Callable[[BaseException], Exception], passed: type[Exception]
) -> Iterator[None]:
    """Turn failures and panics inside into an `error`, except those that are `passed` on."""
    try:
        yield
    except passed:
        raise
    except BaseException as problem:
        if not (isinstance(problem, Exception) or is_panic(problem)):
            raise
        raise error(problem) from problem


def in_time(work: Callable[[], T], length: int) -> T:
    """The result of `work` on a text of a length. Raises `TimeoutError` if it takes too long; then
    it is left behind in its thread."""
    done = Future[T]()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as problem:
            done.set_exception(problem)

    with native_lines():
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(TEXT_SECONDS * (1 + length / 1e6))
        if thread.is_alive():
            told = f"it takes over {TEXT_SECONDS:g} seconds for {length} characters or ids"
            raise TimeoutError(told)
        return done.result()


@contextmanager
def native_lines() -> Iterator[None]:
    """Lead lines of native code, but those of its panics, from descriptors 1 and 2 to standard
    error, by way of memory, at the end."""
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
