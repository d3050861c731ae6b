"""Writes files so that a crash never leaves a file half-written, and turns disk errors into
messages. Does not import torch."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from specdec_cli.errors import SetupError

MAX_FILE_BYTES = 2**30


@contextmanager
def or_setup_error(what: str, hint: str | None = None) -> Iterator[None]:
    """Turn each OSError in the block into a `SetupError`. what: the start of its message, such as
    `cannot read FILE`."""
    try:
        yield
    except OSError as problem:
        raise SetupError(f"{what}: {problem.strerror or problem}", hint) from None


def refuse_special_files(folder: Path) -> None:
    """Raise `SetupError` for pipes, devices, broken links and huge files in a run folder.

    Reading a pipe may never end, and devices and huge files would fill the memory.
    """
    if not os.path.isdir(folder):
        return  # the caller reports this when it reads a file
    with or_setup_error(f"cannot read {folder}"), os.scandir(folder) as entries:
        for entry in entries:
            is_file = os.path.isfile(entry.path)
            if not is_file and not os.path.isdir(entry.path):
                raise SetupError(
                    f"{folder / entry.name} is not a regular file", "move it out of the run folder"
                )
            is_read = is_file and entry.name.endswith((".json", ".jsonl", ".yaml"))
            if is_read and entry.stat().st_size > MAX_FILE_BYTES:
                raise SetupError(
                    f"{folder / entry.name} is larger than {MAX_FILE_BYTES >> 30} GiB",
                    "the file was damaged or edited, or belongs to several runs",
                )


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that after a crash it has either the old or the new content."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.unlink(missing_ok=True)  # mode x fails if a crash left the file
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
