"""Reads the files in a dataset's folder as if they were named themselves.

The package `datasets` finds the files of each split. Rows are converted to prompts elsewhere.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from specdec_cli.errors import UsageError
from specdec_cli.prompts.dataset import is_slice, slice_of
from specdec_cli.prompts.files import EXTENSIONS, file_source
from specdec_cli.prompts.lines import Rows
from specdec_cli.prompts.types import Source
from specdec_cli.text import one_line

# JSON files that `datasets` never takes for rows.
_NO_ROWS = ("config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json")
_log = logging.getLogger("specdec")

Files = Mapping[str, list[Path]]  # the files of each split


def files_of(datasets: Any, builder: Any, folder: Path, column: str | None) -> Files:
    """Return the files of each split of a folder. Return {} if `file_source` cannot read them, or
    does not support the folder's settings."""
    config = builder.config
    known = {
        str(split): list(map(Path, files)) for split, files in (config.data_files or {}).items()
    }
    endings = {file.suffix.lower() for file in chain.from_iterable(known.values())}
    shared = {one.name for one in fields(datasets.BuilderConfig)}
    own = [one for one in fields(config) if one.name not in shared]
    told = {one.name: value for one in own if (value := getattr(config, one.name)) != one.default}
    is_usual = not told or (told == {"sep": "\t"} and endings == {".tsv"})
    names_text = ".txt" in endings and column is not None  # `datasets` reads lines as a column
    if not is_usual or names_text or not endings <= {*EXTENSIONS}:
        return {}
    base = folder.resolve()  # as in `datasets`
    return {
        split: [folder / f.relative_to(base) if f.is_relative_to(base) else f for f in files]
        for split, files in known.items()
    }


def warn_of_unread(builder: Any, folder: Path, files: Files) -> None:
    """Warn the user about files of rows in a folder that belong to no split. `datasets` reads files
    of one kind, and leaves out the others."""
    if len(builder.BUILDER_CONFIGS) > 1:  # unread files belong to other subsets
        return
    read = {*chain.from_iterable(files.values())}
    unread = [
        str(file.relative_to(folder))
        for file in sorted(folder.rglob("*"))
        if file.suffix.lower() in EXTENSIONS and file.name not in _NO_ROWS
        if file not in read and file.is_file()
        if not any(part.startswith((".", "__")) for part in file.relative_to(folder).parts)
    ]
    if unread:
        has = _in_short([file.name for file in sorted(read)])
        _log.warning("%s: left out %s: the dataset has %s", folder, _in_short(unread), has)


def _in_short(names: list[str]) -> str:
    return one_line(names[0]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def source_of_files(
    datasets: Any, path: str, files: Files, split: str | None, column: str | None
) -> Source:
    """Join the rows of a split's files. path: the dataset's name, for messages."""

    def rows_of(name: str) -> Rows:
        for file in files[name]:
            with file_source(str(file), column) as source:
                yield from source.rows

    chosen = only_split(path, list(files)) if split is None else split
    if chosen == "all" and chosen not in files:  # as in `datasets`
        files = {chosen: [*chain.from_iterable(files.values())]}
    bare, bracket, rest = chosen.partition("[")
    rows: Iterable[tuple[str, object]]
    if bare in files and is_slice(bracket + rest):
        rows = slice_of(rows_of(bare), bracket + rest)
    else:
        whole = {name: list(rows_of(name)) for name in files}
        parts = parts_of(datasets, chosen, {name: len(found) for name, found in whole.items()})
        rows = chain.from_iterable(whole[one.splitname][one.from_ : one.to] for one in parts)
    first = files.get(bare) or next(iter(files.values()))
    with file_source(str(first[0]), column) as source:
        return replace(source, name=source_name(path, split), rows=rows, is_file=False)


def source_name(path: str, split: str | None) -> str:
    """Name the rows of a dataset, for messages."""
    return f"{path}:{split}" if split is not None else path


def only_split(path: str, known: list[str]) -> str:
    """Return the split of a dataset that has only one. Raises `UsageError` if it has several."""
    if len(known) > 1:
        raise UsageError(
            f"{path}: the dataset has several splits: {', '.join(map(one_line, known))}",
            f"choose one with data.split, or with {path}:{known[0]}",
        )
    return known[0]


def parts_of(datasets: Any, split: str, sizes: Mapping[str, int]) -> Any:
    """Return the parts of splits that a text such as `train[-5:]+test` names."""
    return datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
