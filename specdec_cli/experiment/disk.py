"""Files that a crash leaves whole, and the disk's errors as lines for users. Imports no torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specdec_cli.errors import SetupError


@contextmanager
def or_setup_error(what: str, hint: str | None = None) -> Iterator[None]:
    """Turn the system's errors during the block into `SetupError`s. what: the part that failed."""
    try:
        yield
    except OSError as problem:
        raise SetupError(f"{what}: {problem.strerror or problem}", hint) from None


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that a crash leaves the old or the new content."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
