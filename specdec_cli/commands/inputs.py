"""Options that select a command's prompts and their chat format. Imports nothing heavy."""

import os
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Annotated, Any

from typer.core import TyperCommand

import specdec_cli
from specdec_cli.commands import options
from specdec_cli.errors import UsageError

_CHAT = "Render prompts with the target's chat template. Default: only lines with messages."
Chat = Annotated[bool | None, options.option("--chat/--no-chat", None, _CHAT, show_default=False)]
_SYSTEM = "System message of every conversation; implies --chat."
System = Annotated[str | None, options.option("--system", "TEXT", _SYSTEM)]
_DATASET = "Prompts that replace the recipe's data."
Dataset = Annotated[str | None, options.option("--dataset", "PATH[:SPLIT[:COLUMN]]", _DATASET)]


class OneSource(TyperCommand):
    """A command that refuses a second file of prompts, which would replace the first silently."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as typer does; raises `UsageError` for a second file."""
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        counts = Counter(parameter.name for parameter in given)
        for name in ("prompt_file", "dataset"):
            if counts[name] > 1:
                raise UsageError(
                    f"--{name.replace('_', '-')} was given {counts[name]} times",
                    "put the prompts in one file",
                )
        return super().parse_args(ctx, args)


def dataset_options(dataset: str | None) -> dict[str, object]:
    """The parts of `--dataset`, by their names in `options.OPTION_KEYS`."""
    if dataset is None:
        return {}
    from specdec_cli.prompts import parse_dataset

    path, split, column = parse_dataset(dataset)
    return {"dataset": path, "dataset_split": split, "dataset_column": column}


def from_data(
    resolved: "specdec_cli.recipe.Recipe",
    dataset: str | None,
    sets: Sequence[str] | None,
    limit: int | None,
    chat: bool | None,
    system: str | None,
    *,
    skip_bad: bool,
) -> "tuple[list[specdec_cli.prompts.Prompt], specdec_cli.recipe.Recipe]":
    """Prompts from `--dataset`, else from the recipe's data, and the recipe that names them.

    `resolved` already contains the values of `dataset_options` and of `sets`.
    """
    from specdec_cli.prompts import as_conversations, load_prompts

    data = resolved.data
    use_chat, opening = chat_of(chat, system, data)
    if data is None:
        raise UsageError("no prompts", "pass --dataset, or give the recipe a data section")
    if dataset is not None:
        data = _of_dataset(data, dataset, sets)
    if limit is not None:
        data = data.model_copy(update={"limit": limit})
    prompts = as_conversations(load_prompts(data, skip_bad=skip_bad), use_chat, opening)
    data = data.model_copy(update={"chat": use_chat, "system": opening})
    return prompts, resolved.model_copy(update={"data": data})


def _of_dataset(
    data: "specdec_cli.recipe.DataSection", dataset: str, sets: Sequence[str] | None
) -> "specdec_cli.recipe.DataSection":
    """`data` as changed by `--dataset` and `--set`; a local file gets its full path."""
    said = [name for name, value in dataset_options(dataset).items() if value is not None]
    keys = {options.OPTION_KEYS[name][1] for name in said}
    data = of_another_file(data, keys | options.parse_sets(sets or ()).keys())
    if os.path.exists(data.path):
        data = data.model_copy(update={"path": os.path.abspath(data.path)})
    return data


def of_another_file(
    data: "specdec_cli.recipe.DataSection", given: Collection[str]
) -> "specdec_cli.recipe.DataSection":
    """`data` without the recipe's settings for its own prompts: only options describe this file.

    given: the dotted keys, or sections, that options set.
    """
    about_rows = ("split", "subset", "column", "limit")
    stale = [key for key in about_rows if "data" not in given and f"data.{key}" not in given]
    return data.model_copy(update=dict.fromkeys(stale))


def chat_of(
    chat: bool | None, system: str | None, data: "specdec_cli.recipe.DataSection | None"
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
