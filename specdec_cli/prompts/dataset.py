"""Parses the value `PATH[:SPLIT[:COLUMN]]` of `--dataset`, and selects a split's rows from a file.

This module opens no files; it only tests whether a path exists.
"""

import os
import re
from collections.abc import Sized
from itertools import islice

from specdec_cli.demo import PREFIX
from specdec_cli.errors import UsageError
from specdec_cli.prompts.lines import Rows
from specdec_cli.text import one_line

# The text between colons. Colons in brackets (`train[10:20]`) are part of it.
_PART = re.compile(r"(?:\[[^\[\]]*\]|[^:])*")
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")
_SCHEME = re.compile(r"[A-Za-z][\w+.-]*://(?:[^/:]*:\d+(?=/|$))?")
_SLICE = re.compile(r"(?:\[(\d*):(\d*)\])?|\[(\d+%)?:(\d+%)?\]")
_FORM = "PATH, PATH:SPLIT or PATH:SPLIT:COLUMN, such as squad:train[:100]:question"


def parse_dataset(text: str) -> tuple[str, str | None, str | None]:
    """Parse `text` into a path, a split and a column. An empty part (`p.csv::question`) is None.

    A colon is not a separator if it is in brackets, after a drive letter, in `scheme://host:port`,
    in `demo:` or in a path that exists. Raises `UsageError` if there is no path, or if there are
    more than three parts.
    """
    start = next((m.end() for p in (_DRIVE, _SCHEME) if (m := p.match(text))), 0)
    if text.startswith(PREFIX):
        start = len(PREFIX)
    parts = _split_at_colons(text[start:])
    parts[0] = text[:start] + parts[0]
    for count in range(len(parts), 1, -1):
        path = ":".join(parts[:count])
        if os.path.exists(path):
            parts = [path, *parts[count:]]
            break
    if not parts[0].strip() or len(parts) > 3:
        what = "has no path" if not parts[0].strip() else "has more than three parts"
        raise UsageError(f"the dataset {one_line(text)!r} {what}", f"write {_FORM}")
    path, split, column = (*parts, "", "")[:3]
    return path, split or None, column or None


def _split_at_colons(text: str) -> list[str]:
    parts, place = [], 0
    while True:
        part = _PART.match(text, place)
        assert part is not None  # the pattern matches even the empty text
        parts.append(part[0])
        if part.end() == len(text):
            return parts
        place = part.end() + 1


def sliced(rows: Rows, split: str | None, name: str) -> Rows:
    """Return the rows of a single file that belong to a split.

    As in `datasets`, a file's only split is `train`, which may be sliced (`train[:100]`,
    `train[50%:]`). Raises `UsageError` for any other split.
    """
    if split is None:
        return rows
    part = split.removeprefix("train")
    if part == split or not is_slice(part):
        raise UsageError(
            f"{name}: a file has no split {one_line(split)!r}",
            "its only split is train; a slice such as train[:100] is possible",
        )
    return slice_of(rows, part)


def is_slice(text: str) -> bool:
    """Return True for a slice that `slice_of` reads: `[:100]`, `[50%:]`, or "" for all rows."""
    return _SLICE.fullmatch(text) is not None


def slice_of(rows: Rows, part: str) -> Rows:
    """Return the rows in a slice. Later rows are read only if its bounds are percentages."""
    found = _SLICE.fullmatch(part)
    assert found is not None
    first, last, first_percent, last_percent = found.groups()
    if not first_percent and not last_percent:
        return islice(rows, int(first or 0), int(last) if last else None)
    whole = list(rows)
    return iter(whole[_row(first_percent or "0%", whole) : _row(last_percent or "100%", whole)])


def _row(percent: str, whole: Sized) -> int:
    """Convert a percentage to a number of rows, rounded as in `datasets`."""
    return round(int(percent.removesuffix("%")) * len(whole) / 100)
