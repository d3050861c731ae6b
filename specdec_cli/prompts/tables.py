"""Reads rows of CSV, TSV and parquet files; `records` turns the rows into prompts."""

import csv
import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from specdec_cli.errors import SetupError, UsageError
from specdec_cli.prompts.lines import HAS_NUL, MAX_LINE_BYTES, Rows
from specdec_cli.prompts.records import BODY_KEY, MORE_KEYS, PROMPT_KEYS
from specdec_cli.prompts.turns import LATER_KEY
from specdec_cli.prompts.types import BadRow, Source
from specdec_cli.text import first_line, is_unicode, one_line

NEEDS_DATASETS = "install it with `pip install datasets`"

_BATCH_ROWS = 1024
_OPEN_QUOTE = "unexpected end of data"  # from the csv module


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
    if any("\0" in cell for cell in header):
        raise UsageError(f"{name}:1: {HAS_NUL}")
    _refuse_twins(header, f"{name}:1")
    return Source(name, _csv_rows(reader, header, name), tuple(header))


def _refuse_twins(columns: Sequence[str], where: str) -> None:
    """Raise `UsageError` if two columns have one name, since only the last could be read."""
    if len(set(columns)) < len(columns):
        (twice, _), *_ = Counter(columns).most_common(1)
        raise UsageError(f"{where}: two columns are called {one_line(twice)!r}")


def _csv_rows(reader: Any, header: Sequence[str], name: str) -> Rows:
    while True:
        where = f"{name}:{reader.line_num + 1}"
        try:
            with _long_cells():
                cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if str(error) == _OPEN_QUOTE:  # the rest of the file was read as one cell
                told = "a quote in this row is never closed, so the rest of the file is one cell"
                raise UsageError(f"{where}: {told}", 'close it, or double it: ""') from None
            yield where, BadRow(f"not a row of the table: {error}")
            continue
        if not cells:  # a blank line
            continue
        yield where, _record(header, cells)


def _record(header: Sequence[str], cells: Sequence[str]) -> dict[str, str] | BadRow:
    if len(cells) != len(header):
        return BadRow(f"has {len(cells)} cells; the header names {len(header)} columns")
    if any("\0" in cell for cell in cells):
        return BadRow(HAS_NUL)
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
    schema = file.schema_arrow
    columns = tuple(schema.names)
    _refuse_twins(columns, name)
    has_bodies = BODY_KEY in columns and pyarrow.types.is_struct(schema.field(BODY_KEY).type)
    rows = _parquet_rows(file, name, wanted(columns, column))
    return Source(name, rows, columns, has_bodies=has_bodies)


def _parquet_rows(file: Any, name: str, columns: list[str]) -> Rows:
    import pyarrow

    number = 0
    try:
        for batch in file.iter_batches(_BATCH_ROWS, columns=columns):
            for record in batch.to_pylist():
                number += 1
                yield f"{name}: row {number}", without_nulls(record)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        what = f"cannot be read as parquet: {one_line(first_line(error))}"
        raise UsageError(f"{name}: row {number + 1}: {what}") from None


def wanted(columns: Sequence[str], column: str | None) -> list[str]:
    """Return the columns of a table that are needed to make prompts. The others, such as images,
    need not be decoded.

    column: the column with the prompt; None if it has one of the usual names (`PROMPT_KEYS`).
    """
    own = (*PROMPT_KEYS, LATER_KEY, BODY_KEY) if column is None else (column,)
    return [name for name in columns if name in (*own, *MORE_KEYS)]


def without_nulls(record: Mapping[str, object]) -> dict[str, object]:
    """Return a row of an Arrow table without the null members of the objects in it.

    Arrow gives every object of a column the keys of all rows, such as the properties of other rows'
    tools, with null for those that a row lacks. Columns and items of lists may be null. So may a
    message's content, which templates read even if it is null.
    """
    return {name: _without_nulls(value) for name, value in record.items()}


def _without_nulls(value: object) -> object:
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    kept = "content" if isinstance(value.get("role"), str) else None
    return {
        key: _without_nulls(one) for key, one in value.items() if one is not None or key == kept
    }
