"""The prompts that a command line names, and the data section that describes them.

Imports pydantic, so commands import it inside functions.
"""

import os
import stat
import sys
from collections.abc import Collection
from dataclasses import dataclass, field

from specdec_cli.commands import options
from specdec_cli.commands.options import Asked
from specdec_cli.demo import PREFIX
from specdec_cli.errors import Notice, UsageError
from specdec_cli.prompts import (
    LoadedPrompts,
    Prompt,
    as_conversations,
    jsonl_of,
    load_noted,
    parse_dataset,
    read_prompts,
)
from specdec_cli.recipe import PROMPTS, DataSection, Recipe
from specdec_cli.text import is_unicode

_SAMPLES = ("random", "stratified")


@dataclass(frozen=True, slots=True)
class Found:
    """The prompts of a command line.

    data: the section of a recipe that names them; None for prompts that no recipe can name. chat:
    the setting that they were read with. own: the text of `PROMPTS`, if `data` names that file of
    a run folder, which is still to be written.
    """

    prompts: list[Prompt]
    data: DataSection | None
    chat: str
    notices: list[Notice] = field(default_factory=list)
    own: str | None = None


def recipe_options(source: options.Prompts) -> dict[str, object]:
    """The options of `source` that set keys of a recipe, by their names in `OPTION_KEYS`.

    Raises `UsageError` for options that exclude each other.
    """
    if source.sample is not None and source.sample not in _SAMPLES:
        raise UsageError(f"--sample: expected {' or '.join(_SAMPLES)}, got {source.sample!r}")
    if source.dataset is None:
        return {"prompt_file": _nameable(source)}
    if source.prompt or source.prompt_file is not None:
        other = "--prompt" if source.prompt else "--prompt-file"
        raise UsageError(f"--dataset and {other} exclude each other", "leave one of them out")
    path, split, column = parse_dataset(source.dataset)
    return {"dataset": path, "dataset_split": split, "dataset_column": column}


def _nameable(source: options.Prompts) -> str | None:
    """The prompt file, if it is the only source of prompts and a recipe can name it."""
    file = source.prompt_file
    if source.prompt or file is None or file == "-":
        return None
    return file if file.strip() and is_unicode(file) and "\0" not in file else None


def find_prompts(
    source: options.Prompts,
    resolved: Recipe,
    asked: Asked,
    *,
    reads_pipe: bool = False,
) -> Found:
    """Prompts from the options, else from a pipe (reads_pipe), else from the recipe's data.

    `resolved` already contains the values of `recipe_options`. Prompts that no recipe can name go
    into the run folder, if there is one.
    """
    chat, system = _chat_of(source, resolved.data)
    data, notices = resolved.data, list[Notice]()
    prompts = None
    if not any(value is not None for value in recipe_options(source).values()):
        prompts = _loose(source, resolved, reads_pipe=reads_pipe)
    if prompts is None:
        if data is None:
            told = "pass --prompt, --prompt-file or --dataset, or give the recipe a data section"
            raise UsageError("no prompts", f"{told}; generate also reads a pipe")
        data, loaded = _from_data(source, resolved, data, asked)
        prompts, notices = loaded.prompts, loaded.notices
        data = data.model_copy(update={"chat": chat, "system": system})
        return Found(as_conversations(prompts, chat, system), data, chat, notices)
    prompts = as_conversations(prompts, chat, system)
    if asked.output is None:
        return Found(prompts, None, chat)
    path = os.path.abspath(asked.output / PROMPTS)
    return Found(
        prompts,
        DataSection.model_validate({"path": path, "chat": chat}),
        chat,
        [],
        jsonl_of(prompts),
    )


def _loose(source: options.Prompts, resolved: Recipe, *, reads_pipe: bool) -> list[Prompt] | None:
    """Prompts that no recipe can name: from the command line, and from standard input."""
    given, file = source.prompt or [], source.prompt_file
    is_given = bool(given) or file is not None
    if not is_given and not (reads_pipe and _is_piped()):
        return None
    stdin = sys.stdin if file == "-" or not is_given else None
    found = read_prompts(
        given,
        file,
        stdin,
        limit=source.limit,
        sample=source.sample,
        seed=resolved.run.seed,
        skip_bad=source.skip_bad,
    )
    return found if is_given or found else None


def _from_data(
    source: options.Prompts, resolved: Recipe, data: DataSection, asked: Asked
) -> tuple[DataSection, LoadedPrompts]:
    """The data section after the options, and its prompts. A local file gets its full path."""
    sets = options.parse_sets(asked.sets or ())
    own = {name for name, value in recipe_options(source).items() if value is not None}
    if own:
        data = _of_another_file(data, {options.OPTION_KEYS[name][1] for name in own} | sets.keys())
    changes = {"limit": source.limit, "sample": source.sample}
    data = data.model_copy(update={k: v for k, v in changes.items() if v is not None})
    loaded = load_noted(
        data,
        skip_bad=source.skip_bad,
        is_file="prompt_file" in own,
        seed=resolved.run.seed,
    )
    if own and os.path.exists(data.path):
        data = data.model_copy(update={"path": os.path.abspath(data.path)})
    # The bundled recipes take a few of the bundled prompts, so that they run in seconds.
    is_chosen = source.limit is not None or {"data", "data.limit"} & sets.keys()
    if data.path.startswith(PREFIX) and not is_chosen:
        loaded = LoadedPrompts(loaded.prompts)
    return data, loaded


def _of_another_file(data: DataSection, given: Collection[str]) -> DataSection:
    """`data` without the recipe's settings for its own prompts: only options describe this file.

    given: the dotted keys, or sections, that options set.
    """
    about_rows = ("split", "subset", "column", "limit", "sample", "turn", "categories")
    stale = [key for key in about_rows if "data" not in given and f"data.{key}" not in given]
    return data.model_copy(update={k: DataSection.model_fields[k].default for k in stale})


def _chat_of(source: options.Prompts, data: DataSection | None) -> tuple[str, str | None]:
    """`data.chat` and `data.system` after the options, for prompts from any source."""
    chat, system = source.chat, source.system
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
