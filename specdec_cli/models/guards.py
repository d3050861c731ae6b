"""Guards around tokenizers, whose files come with a model. They limit sizes, growth of texts,
templates, and calls of native code.

A chat template is a program, which may never end. Native code cannot be interrupted, its panics are
no `Exception`, and it aborts the process when memory runs out. So it runs in a thread with a time
limit, and the growth of texts is checked before it runs.
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

TEXT_SECONDS = 10.0  # seconds for a text, plus the same for each million characters or ids
TEMPLATE_SECONDS = 10.0  # seconds of the processor's time for one conversation
TEMPLATE_BYTES = 2 * 2**30  # bytes beyond the process's present memory
MOST_CHARACTERS = 2**25  # maximum characters of a text after rendering or other steps
FILE_BYTES = 2**28
_READ = {".json", ".txt", ".jinja", ".model", ".tiktoken", ".bpe"}
_MOST_GROWTH = 10_000
_MOST_STEPS = 1000


def unsafe_file(folder: Path) -> Path | None:
    """A tokenizer's file that is not regular or too large to read, if there is one."""
    for file in sorted(folder.iterdir()):
        if file.suffix in _READ and (not file.is_file() or file.stat().st_size > FILE_BYTES):
            return file
    return None


def growth_of(steps: Any, part: str) -> int:
    """The largest factor by which the steps in tokenizer.json can multiply a text's length. Raises
    a `ValueError` that names the `part` if there are so many steps that native code would abort.
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
    """Raise `ValueError` if steps could make a text of `length` characters too long."""
    if growth > 1 and length * growth > MOST_CHARACTERS:
        raise ValueError(
            f"it can make a text {growth} times as long, and there is one of {length} characters"
        )


@contextmanager
def bounded(seconds: float, size: int) -> Iterator[None]:
    """Bound the time and memory of Python code in the block, in the main thread only.

    seconds: processor time after which `TimeoutError` is raised. size: bytes that the code may take
    beyond the process's present memory; more raise `MemoryError`.
    """
    if threading.current_thread() is not threading.main_thread():  # signals arrive there
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
    """True if native code panicked. A panic is no `Exception` of Python's."""
    return type(problem).__name__ == "PanicException"


@contextmanager
def refusing(
    error: Callable[[BaseException], Exception], passed: type[Exception]
) -> Iterator[None]:
    """Turn failures and panics during the block into an `error`, except those in `passed`."""
    try:
        yield
    except passed:
        raise
    except BaseException as problem:
        if not (isinstance(problem, Exception) or is_panic(problem)):
            raise
        raise error(problem) from problem


def in_time(work: Callable[[], T], length: int) -> T:
    """The result of `work` on a text of `length` characters or ids. Raises `TimeoutError` if the
    work takes too long; its thread keeps running."""
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
    """Collect the lines that native code writes to descriptors 1 and 2, and write them to standard
    error at the end, without those about panics."""
    with _held:
        held: dict[int, tuple[int, int]] = {}  # a copy of the descriptor, and the memory file
        for descriptor in (1, 2):
            # The stream is closed, or the system is not Linux.
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
    """A copy of a descriptor. The copy's number is at least 3, even if a standard stream is
    closed."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def _memory() -> int:
    """The descriptor of a new file in memory."""
    made = os.memfd_create("lines")
    try:
        return _copy(made)
    finally:
        os.close(made)


def _escaped(said: bytes) -> bytes:
    """Lines without control characters. Quoted names in files may contain some."""
    lines = said.decode(errors="replace").splitlines()
    return "".join(f"{inert(shortened(line))}\n" for line in lines).encode()


_held = threading.RLock()  # only one thread at a time may redirect the descriptors
