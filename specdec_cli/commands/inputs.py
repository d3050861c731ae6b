"""Where a command's prompts come from, and how they go to a model.

Shared by the commands that read prompts. Imports nothing heavy.
"""

import os
import stat
import sys
from typing import Annotated

import typer

import specdec_cli
from specdec_cli import demo
from specdec_cli.errors import UsageError
from specdec_cli.prompts import Prompt, as_conversations, read_prompts

Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Put prompts through the target's chat template; without either, only messages.",
        show_default=False,
    ),
]
System = Annotated[
    str | None,
    typer.Option(
        "--system", metavar="TEXT", help="Open every conversation with this; implies --chat."
    ),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        "--dataset", metavar="PATH[:SPLIT[:COLUMN]]", help="Prompts, in place of the recipe's data."
    ),
]
Limit = Annotated[
    int | None,
    typer.Option("--limit", metavar="N", help="Use only the first N prompts."),
]


def from_command_line(
    resolved: "specdec_cli.recipe.Recipe",
    given: list[str],
    file: str | None,
    chat: bool | None,
    system: str | None,
) -> "tuple[list[Prompt], specdec_cli.recipe.Recipe]":
    """Prompts from the options, else from a pipe, else from the recipe's data.

    Also returns the recipe with the data section that says where they came from, so that the
    resolved recipe never names prompts that were not run; None for those that no recipe can name.
    """
    found, data = _prompts(given, file, resolved.data)
    return _rendered(resolved, found, data, chat, system)


def from_data(
    resolved: "specdec_cli.recipe.Recipe",
    dataset: str | None,
    limit: int | None,
    chat: bool | None,
    system: str | None,
) -> "tuple[list[Prompt], specdec_cli.recipe.Recipe]":
    """Prompts of `--dataset`, else of the recipe's data, and the recipe that names them."""
    data = resolved.data
    if dataset is not None:
        data = data_of(dataset)
    if data is None:
        raise UsageError("no prompts", "pass --dataset, or give the recipe a data section")
    if limit is not None:
        if limit < 1:
            raise UsageError(f"--limit: should be at least 1, not {limit}")
        data = data.model_copy(update={"limit": limit})
    return _rendered(resolved, prompts_of(data), data, chat, system)


def data_of(dataset: str) -> "specdec_cli.recipe.DataSection":
    """The data section that `--dataset` stands for."""
    from specdec_cli.recipe import DataSection

    if not dataset.strip():
        raise UsageError("--dataset: expected a path")
    path = dataset if dataset.startswith(demo.PREFIX) else os.path.abspath(dataset)
    return DataSection(path=path)


def prompts_of(data: "specdec_cli.recipe.DataSection") -> list[Prompt]:
    """The prompts that a data section names."""
    path = str(demo.demo_path(data.path)) if data.path.startswith(demo.PREFIX) else data.path
    return read_prompts([], path, None)[: data.limit]


def _rendered(
    resolved: "specdec_cli.recipe.Recipe",
    found: list[Prompt],
    data: "specdec_cli.recipe.DataSection | None",
    chat: bool | None,
    system: str | None,
) -> "tuple[list[Prompt], specdec_cli.recipe.Recipe]":
    use_chat, opening = _chat_of(chat, system, resolved.data)
    prompts = as_conversations(found, use_chat, opening)
    if data is not None:
        data = data.model_copy(update={"chat": use_chat, "system": opening})
    return prompts, resolved.model_copy(update={"data": data})


def _chat_of(
    chat: bool | None, system: str | None, data: "specdec_cli.recipe.DataSection | None"
) -> tuple[str, str | None]:
    """`data.chat` and `data.system`, of whatever prompts, as the options change them."""
    if chat is False:
        if system is not None:
            raise UsageError("--no-chat and --system: a system message needs the chat template")
        return "off", None
    if system is None and data is not None:
        system = data.system
    if chat or system is not None:
        return "on", system
    return (data.chat if data is not None else "auto"), None


def _prompts(
    given: list[str], file: str | None, data: "specdec_cli.recipe.DataSection | None"
) -> "tuple[list[Prompt], specdec_cli.recipe.DataSection | None]":
    from specdec_cli.recipe import DataSection

    if given or file is not None:
        found = read_prompts(given, file, sys.stdin if file == "-" else None)
        if given or file is None or file == "-":
            return found, None
        try:
            return found, DataSection(path=os.path.abspath(file))
        except ValueError:  # a file name that is no text
            return found, None
    if _is_piped() and (piped := read_prompts([], None, sys.stdin)):
        return piped, None
    if data is None:
        raise UsageError("no prompts", "pass --prompt or --prompt-file, or pipe them in")
    return prompts_of(data), data


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file; a closed one, a terminal or /dev/null is not."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)
