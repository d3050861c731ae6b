"""Reads Hugging Face datasets by id, and folders with the same layout, with the package `datasets`.

The module `folders` reads a folder's files, unless they are compressed, have another format or need
settings. Rows are converted to prompts elsewhere.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec_cli.errors import SetupError, SpecdecError, UsageError
from specdec_cli.prompts.folders import (
    files_of,
    only_split,
    parts_of,
    source_name,
    source_of_files,
    warn_of_unread,
)
from specdec_cli.prompts.lines import Rows
from specdec_cli.prompts.records import BODY_KEY
from specdec_cli.prompts.tables import wanted, without_nulls
from specdec_cli.prompts.types import Source
from specdec_cli.text import one_line, reason_of

_HUB_S = 10.0
_CARD_BYTES = 1 << 20  # `datasets` parses only 100 KiB of settings per second
_LIBRARIES = ("datasets", "huggingface_hub")


def hub_source(
    path: str, subset: str | None, split: str | None, column: str | None, *, is_folder: bool
) -> Source:
    """Open one split of a dataset. Without `split`, the dataset must have only one split.

    path: a hub id, or a folder if `is_folder` is True.
    split: a split's name or a slice of it (`train[:100]`).
    column: the column that holds the prompts; None if it has one of the usual names
        (`records.PROMPT_KEYS`).

    Raises `UsageError` for an unknown subset or split, with the names of the known ones, and
    `SetupError` if the dataset is not available.
    """
    try:
        import datasets
    except ImportError:
        raise SetupError(
            f"{path}: reading a dataset needs the package datasets", "pip install datasets"
        ) from None
    if is_folder:
        _refuse_special_files(Path(path))
        _refuse_long_card(Path(path))
    folder = Path(path) if is_folder else None
    with _quiet(datasets):
        try:
            if folder is None:
                folder = _downloaded(datasets, path)
            if is_folder and _is_saved(Path(path)):
                data = _from_disk(datasets, path, subset, split)
            else:
                place = path if folder is None else str(folder)
                builder = datasets.load_dataset_builder(place, name=subset)
                files = files_of(datasets, builder, folder, column) if folder else {}
                if is_folder and files:
                    warn_of_unread(builder, Path(path), files)
                if files:
                    return source_of_files(datasets, path, files, split, column)
                data = _loaded(datasets, builder, path, place, subset, split)
        except (SpecdecError, MemoryError):
            raise
        except Exception as problem:
            raise _refusal(path, problem, is_local=folder is not None) from problem
    columns = tuple(data.column_names)
    name = source_name(path, split)
    rows = _rows(data.select_columns(wanted(columns, column)), name)
    has_bodies = isinstance(data.features.get(BODY_KEY), dict)
    return Source(name, rows, columns, has_bodies=has_bodies)


def _refuse_special_files(folder: Path) -> None:
    """Raise `UsageError` for pipes and devices, because `datasets` might read them forever."""
    for file in folder.rglob("*"):
        if file.exists() and not file.is_file() and not file.is_dir():
            raise UsageError(
                f"{file} is not a regular file, so {folder} cannot be read as a dataset",
                "move it out of the folder",
            )


def _refuse_long_card(folder: Path) -> None:
    """Raise `UsageError` for a dataset card with long settings, which `datasets` parses slowly."""
    for name, end in (("README.md", b"\n---"), (".huggingface.yaml", None)):
        file = folder / name
        if not file.is_file():
            continue
        with file.open("rb") as stream:
            begin = stream.read(_CARD_BYTES + 1)
        has_settings = end is None or begin.startswith(b"---")
        if has_settings and len(begin) > _CARD_BYTES and (end is None or end not in begin[3:]):
            raise UsageError(
                f"{file}: the settings of the dataset are longer than {_CARD_BYTES >> 10} KiB",
                "shorten them, or pass the files of rows themselves",
            )


def _downloaded(datasets: Any, path: str) -> Path | None:
    """Return the folder in the hub's cache with the files of a dataset's id. Return None if
    `datasets` can read the dataset itself, from its prepared rows or from the hub.

    Raises the hub's error at once if the dataset is nowhere; `datasets` would retry for half a
    minute. `datasets` does not read the hub's cache when the hub cannot be reached.
    """
    from datasets.naming import camelcase_to_snakecase
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    *owner, name = path.split("/")
    prepared = "___".join([*owner, camelcase_to_snakecase(name)])
    if Path(datasets.config.HF_DATASETS_CACHE, prepared).exists():
        return None
    try:
        HfApi().dataset_info(path, timeout=_HUB_S)
    except Exception as problem:
        try:
            return Path(snapshot_download(path, repo_type="dataset", local_files_only=True))
        except LocalEntryNotFoundError:
            raise problem from None
    return None


def _loaded(
    datasets: Any, builder: Any, path: str, place: str, subset: str | None, split: str | None
) -> Any:
    known = list(builder.info.splits or ())
    if split is None and len(known) == 1:
        split = known[0]
    # Some datasets list their splits only after `load_dataset` has prepared them.
    data = datasets.load_dataset(place, name=subset, split=split)
    return data if split is not None else data[only_split(path, list(data))]


def _is_saved(folder: Path) -> bool:
    """Return True if `save_to_disk` of `datasets` wrote the folder."""
    names = ("dataset_dict.json",), ("state.json", "dataset_info.json")
    return any(all((folder / name).is_file() for name in one) for one in names)


def _from_disk(datasets: Any, path: str, subset: str | None, split: str | None) -> Any:
    if subset is not None:
        raise UsageError(f"{path}: a saved dataset has no subsets", "leave data.subset out")
    data = datasets.load_from_disk(path)
    splits = data if isinstance(data, dict) else {str(data.split or "train"): data}
    if split is None:
        return splits[only_split(path, list(splits))]
    sizes = {name: len(rows) for name, rows in splits.items()}
    return datasets.concatenate_datasets(
        [
            splits[part.splitname].select(range(part.from_, part.to))
            for part in parts_of(datasets, split, sizes)
        ]
    )


def _rows(data: Any, name: str) -> Rows:
    number = 0
    try:
        for number, record in enumerate(data, start=1):
            yield f"{name}: row {number}", without_nulls(record)
    except MemoryError:
        raise
    except Exception as problem:  # a damaged file can raise any exception
        told = f"cannot be read: {one_line(reason_of(problem))}"
        raise UsageError(f"{name}: row {number + 1}: {told}") from problem


def _refusal(path: str, problem: Exception, *, is_local: bool) -> SpecdecError:
    kind = type(problem).__name__
    if type(problem) is ValueError:  # unknown split or subset; the error lists the known ones
        return UsageError(
            f"{path}: {' '.join(map(one_line, str(problem).split()))}",
            "name another data.split or data.subset",
        )
    if is_local or kind in ("DatasetGenerationError", "DataFilesNotFoundError"):
        why = one_line(reason_of(problem.__cause__ or problem))
        return UsageError(f"{path}: cannot be read as a dataset: {why}")
    if kind in ("DatasetNotFoundError", "RepositoryNotFoundError"):
        return SetupError(
            f"no dataset {path} on the hub, or access to it is restricted",
            "check the spelling; log in with `hf auth login`, or pass a local file",
        )
    return SetupError(
        f"the dataset {path} is neither a local file nor in the local cache, and could not be "
        f"downloaded ({kind})",
        f"run `hf download --repo-type dataset {path}` where the hub can be reached, or pass a "
        "local file",
    )


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """Hide the libraries' progress bars and log lines. They also raise the errors that they log."""
    shown = datasets.utils.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    loggers = list(map(logging.getLogger, _LIBRARIES))
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)
