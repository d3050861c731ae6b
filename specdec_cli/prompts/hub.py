"""Reads Hugging Face datasets by id, and folders with the same layout, with the package `datasets`.

Rows are converted to prompts elsewhere.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec_cli.errors import SetupError, SpecdecError, UsageError
from specdec_cli.prompts.lines import Rows
from specdec_cli.prompts.tables import wanted
from specdec_cli.prompts.types import Source
from specdec_cli.text import first_line, one_line

_HUB_S = 10.0
_CARD_BYTES = 1 << 20  # `datasets` parses only 100 KiB of settings per second


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
        from huggingface_hub import HfApi
    except ImportError:
        raise SetupError(
            f"{path}: reading a dataset needs the package datasets", "pip install datasets"
        ) from None
    if is_folder:
        _refuse_special_files(Path(path))
        _refuse_long_card(Path(path))
    with _quiet(datasets):
        try:
            if not is_folder and not _is_cached(datasets, path):
                # Fail at once if the hub has no such id; `datasets` would retry for half a minute.
                HfApi().dataset_info(path, timeout=_HUB_S)
            is_saved = is_folder and _is_saved(Path(path))
            load = _from_disk if is_saved else _loaded
            data = load(datasets, path, subset, split)
        except (SpecdecError, MemoryError):
            raise
        except Exception as problem:
            raise _refusal(path, problem, is_folder=is_folder) from problem
    columns = tuple(data.column_names)
    name = f"{path}:{split}" if split is not None else path
    return Source(name, _rows(data.select_columns(wanted(columns, column)), name), columns)


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


def _loaded(datasets: Any, path: str, subset: str | None, split: str | None) -> Any:
    builder = datasets.load_dataset_builder(path, name=subset)
    known = list(builder.info.splits or ())
    if split is None and len(known) == 1:
        split = known[0]
    # Some datasets list their splits only after `load_dataset` has prepared them.
    data = datasets.load_dataset(path, name=subset, split=split)
    return data if split is not None else data[_only_split(path, list(data))]


def _is_cached(datasets: Any, path: str) -> bool:
    """Return True if the local cache has files of the dataset with this id."""
    from huggingface_hub import constants

    prepared = Path(datasets.config.HF_DATASETS_CACHE, path.replace("/", "___"))
    downloaded = Path(constants.HF_HUB_CACHE, f"datasets--{path.replace('/', '--')}")
    return prepared.exists() or downloaded.exists()


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
        return splits[_only_split(path, list(splits))]
    sizes = {name: len(rows) for name, rows in splits.items()}
    wanted_rows = datasets.ReadInstruction.from_spec(split).to_absolute(sizes)
    return datasets.concatenate_datasets(
        [splits[part.splitname].select(range(part.from_, part.to)) for part in wanted_rows]
    )


def _only_split(path: str, known: list[str]) -> str:
    if len(known) > 1:
        raise UsageError(
            f"{path}: the dataset has several splits: {', '.join(map(one_line, known))}",
            f"choose one with data.split, or with {path}:{known[0]}",
        )
    return known[0]


def _rows(data: Any, name: str) -> Rows:
    number = 0
    try:
        for number, record in enumerate(data, start=1):
            yield f"{name}: row {number}", record
    except MemoryError:
        raise
    except Exception as problem:  # a damaged file can raise any exception
        told = f"cannot be read: {one_line(first_line(problem))}"
        raise UsageError(f"{name}: row {number + 1}: {told}") from problem


def _refusal(path: str, problem: Exception, *, is_folder: bool) -> SpecdecError:
    kind = type(problem).__name__
    if type(problem) is ValueError:  # unknown split or subset; the error lists the known ones
        return UsageError(
            f"{path}: {' '.join(map(one_line, str(problem).split()))}",
            "name another data.split or data.subset",
        )
    if is_folder or kind in ("DatasetGenerationError", "DataFilesNotFoundError"):
        cause = problem.__cause__ or problem
        why = one_line(first_line(cause))
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
    """Hide the library's progress bars on stderr."""
    shown = datasets.utils.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()
