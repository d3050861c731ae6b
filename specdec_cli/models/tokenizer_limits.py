"""Limits of tokenizers, whose files come with a model: sizes, growth of texts, and templates.

Does not know transformers. A chat template is a program, which may never end. Native code aborts
the process when memory runs out, so the growth of texts is bounded before it runs.
"""

import resource
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

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
    """The most by which the steps of a tokenizer can multiply the length of a text.

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
