"""Opens a file of prompts by its extension, and provides its rows.

Rows are converted to prompts elsewhere.
"""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from specdec_cli.errors import UsageError
from specdec_cli.prompts.lines import json_rows, jsonl_rows, text_rows
from specdec_cli.prompts.tables import csv_source, parquet_source
from specdec_cli.prompts.types import Source
from specdec_cli.text import one_line

EXTENSIONS = (".txt", ".jsonl", ".json", ".csv", ".tsv", ".parquet")
GZIP_MAGIC = b"\x1f\x8b"
ONE_OBJECT = (
    'a .jsonl file has one JSON object per line, such as {"prompt": "..."}; --dataset FILE::KEY '
    "(data.column) names another key for it"
)


@contextmanager
def file_source(name: str, column: str | None) -> Iterator[Source]:
    """Open a file and provide its rows. The file is closed at the end of the `with` block. column:
    the column that holds the prompts; None if it has one of the usual names (`PROMPT_KEYS`)."""
    if not name.strip():  # from "$UNSET" in a script, for example
        raise UsageError("the name of the prompt file is empty")
    if "://" in name:
        raise UsageError(f"{one_line(name)}: is a URL", "download it and name the file")
    try:
        path = Path(name)
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(
                f"{name}: is a directory, not a prompt file",
                "name a file in it; a folder of a dataset goes into the recipe's data.path",
            )
        if not stat.S_ISREG(mode):  # opening a pipe could wait forever
            raise UsageError(
                f"{name}: not a regular file", "pipe prompts into standard input instead"
            )
        file = path.open("rb")
    except FileNotFoundError:
        raise UsageError(f"{name}: no such prompt file") from None
    except (OSError, ValueError) as error:
        raise _unreadable(name, error) from None
    with file:
        if file.read(2) == GZIP_MAGIC:
            raise UsageError(f"{name}: is compressed with gzip", "unpack it first: gunzip")
        file.seek(0)
        try:
            yield _source(file, path, name, column)
        except OSError as error:  # a failing disk
            raise _unreadable(name, error) from None


def _unreadable(name: str, error: OSError | ValueError) -> UsageError:
    why = error.strerror if isinstance(error, OSError) else "not a path"
    return UsageError(f"{name!r}: cannot be read: {why}")


def _source(file: BinaryIO, path: Path, name: str, column: str | None) -> Source:
    match path.suffix.lower():
        case ".txt":
            if column is not None:
                raise UsageError(f"{name}: a text file has no columns", "leave data.column out")
            return Source(name, text_rows(file, name))
        case ".jsonl":
            return Source(name, jsonl_rows(file, name), hint=ONE_OBJECT)
        case ".json":
            return Source(name, json_rows(file, name))
        case ".csv":
            return csv_source(file, name, ",")
        case ".tsv":
            return csv_source(file, name, "\t")
        case ".parquet":
            return parquet_source(path, name, column)
        case other:
            raise UsageError(
                f"{name}: unknown extension {other or '(none)'!r}",
                "known extensions are .txt (one prompt per line), .jsonl (one object per line), "
                ".json (a list), .csv, .tsv and .parquet",
            )
