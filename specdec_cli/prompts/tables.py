"""Reads rows of CSV, TSV and parquet files; `records` turns the rows into prompts."""

import csv
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from specdec_cli.errors import SetupError, UsageError
from specdec_cli.prompts.lines import MAX_LINE_BYTES, Rows
from specdec_cli.prompts.records import MORE_KEYS, PROMPT_KEYS
from specdec_cli.prompts.turns import LATER_KEY
from specdec_cli.prompts.types import BadRow, Source
from specdec_cli.text import first_line, is_unicode, one_line

NEEDS_DATASETS = "install it with `pip install datasets`"

_BATCH_ROWS = 1024


def csv_source(file: BinaryIO, name: str, delimiter: str) -> Source:
    """Read a table with a header line; cells are text. A quoted cell may span several lines."""
    # Decode bytes that are not UTF-8 to lone surrogates instead of failing. `_record` then rejects
    # only the rows that contain them, and the rest of the file is still read.
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    try:
        with _long_cells():
            header = next(reader, None)
    except csv.Error as error:
        raise UsageError(f"{name}:1: not a table: {error}") from None
    if not header:
        raise UsageError(f"{name}:1: no header line with the names of the columns")
    if len(set(header)) < len(header):
        (twice, _), *_ = Counter(header).most_common(1)
        raise UsageError(f"{name}:1: two columns are called {one_line(twice)!r}")
    return Source(name, _csv_rows(reader, header, name), tuple(header))


def _csv_rows(reader: Any, header: Sequence[str], name: str) -> Rows:
    while True:
        where = f"{name}:{reader.line_num + 1}"
        try:
            with _long_cells():
                cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield where, BadRow(f"not a row of the table: {error}")
            continue
        if not cells:  # a blank line
            continue
        yield where, _record(header, cells)


def _record(header: Sequence[str], cells: Sequence[str]) -> dict[str, str] | BadRow:
    if len(cells) != len(header):
        return BadRow(f"has {len(cells)} cells; the header names {len(header)} columns")
    if any("\0" in cell for cell in cells):
        return BadRow("holds a NUL byte: a binary file, or UTF-16?")
    if not all(map(is_unicode, cells)):
        return BadRow("not UTF-8 text")
    return dict(zip(header, cells, strict=True))


@contextmanager
def _long_cells() -> Iterator[None]:
    """In the `with` block, raise the csv module's limit on a cell's length to `MAX_LINE_BYTES`, the
    limit on lines in other files. The csv module has one limit for the whole process, so the
    previous limit is restored afterwards."""
    before = csv.field_size_limit(MAX_LINE_BYTES)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def parquet_source(path: Path, name: str, column: str | None) -> Source:
    """Read a parquet file in batches of rows, and only the columns that are needed.

    Raises `SetupError` if pyarrow is not installed.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise SetupError(f"{name}: parquet needs the package pyarrow", NEEDS_DATASETS) from None
    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(
            f"{name}: cannot be read as parquet: {one_line(first_line(error))}"
        ) from None
    columns = tuple(file.schema_arrow.names)
    return Source(name, _parquet_rows(file, name, wanted(columns, column)), columns)


def _parquet_rows(file: Any, name: str, columns: list[str]) -> Rows:
    import pyarrow

    number = 0
    try:
        for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
            for record in batch.to_pylist():
                number += 1
                yield f"{name}: row {number}", record
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        what = f"cannot be read as parquet: {one_line(first_line(error))}"
        raise UsageError(f"{name}: row {number + 1}: {what}") from None


def wanted(columns: Sequence[str], column: str | None) -> list[str]:
    """Return the columns of a table that are needed to make prompts. The others, such as images,
    need not be decoded.

    column: the column with the prompt; None if it has one of the usual names (`PROMPT_KEYS`).
    """
    own = (*PROMPT_KEYS, LATER_KEY) if column is None else (column,)
    return [name for name in columns if name in (*own, *MORE_KEYS)]
