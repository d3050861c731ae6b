"""The prompts that a command line names, and the data section that describes them.

Imports pydantic, so commands import it inside functions.
"""

import os
import stat
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from specdec_cli.commands import options
from specdec_cli.errors import UsageError
from specdec_cli.prompts import Prompt, as_conversations, load_prompts, parse_dataset, read_prompts
from specdec_cli.recipe import DataSection, Recipe
from specdec_cli.text import is_unicode


@dataclass(frozen=True, slots=True)
class Source:
    """The options of `generate` that say where prompts are."""

    given: list[str]
    file: str | None
    limit: int | None
    skip_bad: bool

    @property
    def recipe_path(self) -> str | None:
        """The prompt file, if it is the only source of prompts and a recipe can name it."""
        file = self.file
        if self.given or file is None or file == "-":
            return None
        return file if file.strip() and is_unicode(file) and "\0" not in file else None


def from_anywhere(
    source: Source, data: DataSection | None, sets: Mapping[str, object]
) -> tuple[list[Prompt], DataSection | None]:
    """Prompts from the options, else from a pipe, else from the recipe's data.

    Also returns the data section that names them, so that the resolved recipe never names prompts
    that were not run; None for prompts that no recipe can name.
    """
    limit, skip_bad = source.limit, source.skip_bad
    if (file := source.recipe_path) is not None:
        assert data is not None and data.path == file
        data = _limited(_of_another_file(data, sets), limit)
        found = load_prompts(data, skip_bad=skip_bad, is_file=True)
        return found, data.model_copy(update={"path": os.path.abspath(file)})
    if source.given or source.file is not None:
        stdin = sys.stdin if source.file == "-" else None
        found = read_prompts(source.given, source.file, stdin, limit=limit, skip_bad=skip_bad)
        return found, None
    if _is_piped() and (piped := read_prompts([], None, sys.stdin, limit=limit, skip_bad=skip_bad)):
        return piped, None
    if data is None:
        raise UsageError("no prompts", "pass --prompt or --prompt-file, or pipe them in")
    data = _limited(data, limit)
    return load_prompts(data, skip_bad=skip_bad), data


def dataset_options(dataset: str | None) -> dict[str, object]:
    """The parts of `--dataset`, by their names in `options.OPTION_KEYS`."""
    if dataset is None:
        return {}
    path, split, column = parse_dataset(dataset)
    return {"dataset": path, "dataset_split": split, "dataset_column": column}


def from_data(
    resolved: Recipe,
    dataset: str | None,
    sets: Sequence[str] | None,
    limit: int | None,
    chat: bool | None,
    system: str | None,
    *,
    skip_bad: bool,
) -> tuple[list[Prompt], Recipe]:
    """Prompts from `--dataset`, else from the recipe's data, and the recipe that names them.

    `resolved` already contains the values of `dataset_options` and of `sets`.
    """
    data = resolved.data
    use_chat, opening = chat_of(chat, system, data)
    if data is None:
        raise UsageError("no prompts", "pass --dataset, or give the recipe a data section")
    if dataset is not None:
        data = _of_dataset(data, dataset, sets)
    data = _limited(data, limit)
    prompts = as_conversations(load_prompts(data, skip_bad=skip_bad), use_chat, opening)
    data = data.model_copy(update={"chat": use_chat, "system": opening})
    return prompts, resolved.model_copy(update={"data": data})


def _of_dataset(data: DataSection, dataset: str, sets: Sequence[str] | None) -> DataSection:
    """`data` as changed by `--dataset` and `--set`; a local file gets its full path."""
    said = [name for name, value in dataset_options(dataset).items() if value is not None]
    keys = {options.OPTION_KEYS[name][1] for name in said}
    data = _of_another_file(data, keys | options.parse_sets(sets or ()).keys())
    if os.path.exists(data.path):
        data = data.model_copy(update={"path": os.path.abspath(data.path)})
    return data


def _of_another_file(data: DataSection, given: Collection[str]) -> DataSection:
    """`data` without the recipe's settings for its own prompts: only options describe this file.

    given: the dotted keys, or sections, that options set.
    """
    about_rows = ("split", "subset", "column", "limit")
    stale = [key for key in about_rows if "data" not in given and f"data.{key}" not in given]
    return data.model_copy(update=dict.fromkeys(stale))


def _limited(data: DataSection, limit: int | None) -> DataSection:
    return data if limit is None else data.model_copy(update={"limit": limit})


def chat_of(
    chat: bool | None, system: str | None, data: DataSection | None
) -> tuple[str, str | None]:
    """`data.chat` and `data.system` after the options, for prompts from any source."""
    if chat is False:
        if system is not None:
            raise UsageError("--no-chat and --system: a system message needs the chat template")
        return "off", None
    if system is None and data is not None:
        system = data.system
    if chat or system is not None:
        return "on", system
    return (data.chat if data is not None else "auto"), None


def _is_piped() -> bool:
    """True if standard input is a pipe or a file, not closed, a terminal or /dev/null."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
