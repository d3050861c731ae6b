"""Limits on the harm that a model's tokenizer files can do. The limits apply to file sizes,
text lengths, chat templates and calls to native code.

A chat template is a program and may never end, so its time and memory are limited. Native code
cannot be interrupted, its panics do not derive from `Exception`, and it aborts the process when
memory runs out. So it is called only after checking that it cannot make a text too long, and in a
thread that is abandoned after a time limit.
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

TEXT_SECONDS = 10.0  # time limit for native code, plus 10 s per million characters or ids
TEMPLATE_SECONDS = 10.0  # limit on the CPU time for rendering one conversation
TEMPLATE_BYTES = 2 * 2**30  # memory that rendering may use in addition to the process's own
# The maximum length of a rendered conversation, and of a text that the steps in tokenizer.json have
# lengthened.
MOST_CHARACTERS = 2**25
FILE_BYTES = 2**28
_READ = {".json", ".txt", ".jinja", ".model", ".tiktoken", ".bpe"}
_MOST_GROWTH = 10_000
_MOST_STEPS = 1000


def unsafe_file(folder: Path) -> Path | None:
    """Return the first tokenizer file in `folder` that is too large to read or is not a regular
    file, or None if there is none."""
    for file in sorted(folder.iterdir()):
        if file.suffix in _READ and (not file.is_file() or file.stat().st_size > FILE_BYTES):
            return file
    return None


def growth_of(steps: Any, part: str) -> int:
    """Return the largest factor by which `steps` can multiply the length of a text. part: the
    section of tokenizer.json that contains the steps.

    Raises a `ValueError` that names the section if the factor is too large, or if there are so many
    steps that native code would abort.
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
            raise ValueError(
                f"its {part} can lengthen a text by a factor of more than {_MOST_GROWTH}"
            )
        if count > _MOST_STEPS:
            raise ValueError(f"its {part} has over {_MOST_STEPS} steps")
    return growth


def _copies(template: Any) -> int:
    """Return the number of times that a post-processor's template repeats a text."""
    pieces = template if isinstance(template, list) else []
    return sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces)


def check_length(length: int, growth: int) -> None:
    """Raise `ValueError` if a text of `length` characters would be too long after a tokenizer's
    steps have lengthened it by a factor of `growth`."""
    if growth > 1 and length * growth > MOST_CHARACTERS:
        raise ValueError(
            f"it can lengthen a text by a factor of {growth}, too much for a text of {length} "
            "characters"
        )


@contextmanager
def bounded(seconds: float, size: int) -> Iterator[None]:
    """Limit the time and memory of Python code in the block. This works in the main thread only; in
    other threads there is no limit.

    seconds: the CPU time after which `TimeoutError` is raised.
    size: the number of bytes that the code may use in addition to what the process uses now. Beyond
    that, `MemoryError` is raised.
    """
    if threading.current_thread() is not threading.main_thread():  # only it receives signals
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
    """Return True if native code panicked. Python sees a panic as a `BaseException`, not as an
    `Exception`."""
    return type(problem).__name__ == "PanicException"


@contextmanager
def refusing(
    error: Callable[[BaseException], Exception], passed: type[Exception]
) -> Iterator[None]:
    """Turn exceptions and panics in the block into the exception that `error` returns for them.
    Exceptions of the type `passed` are raised unchanged."""
    try:
        yield
    except passed:
        raise
    except BaseException as problem:
        if not (isinstance(problem, Exception) or is_panic(problem)):
            raise
        raise error(problem) from problem


def in_time(work: Callable[[], T], length: int) -> T:
    """Run `work` on a text of `length` characters or ids, and return its result. Raises
    `TimeoutError` if the work takes too long; its thread keeps running."""
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
    """Collect the lines that native code writes to descriptors 1 and 2 during the block.
    Afterwards, write them to standard error, except those about a panic."""
    with _held:
        held: dict[int, tuple[int, int]] = {}  # descriptor: (its duplicate, a file in memory)
        for descriptor in (1, 2):
            # These errors mean that the stream is closed, or that the system is not Linux.
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
    """Duplicate a descriptor. The new number is at least 3, even if a standard stream is closed."""
    return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)


def _memory() -> int:
    """Make a file in memory and return its descriptor."""
    made = os.memfd_create("lines")
    try:
        return _copy(made)
    finally:
        os.close(made)


def _escaped(said: bytes) -> bytes:
    """Shorten lines and remove control characters from them. Lines may quote names in a model's
    files, which may contain such characters."""
    lines = said.decode(errors="replace").splitlines()
    return "".join(f"{inert(shortened(line))}\n" for line in lines).encode()


_held = threading.RLock()  # only one thread at a time may redirect the descriptors
