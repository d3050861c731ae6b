"""Where a command's prompts come from, and how they go to a model.

Imports nothing heavy.
"""

import os
from collections import Counter
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import specdec_cli
from specdec_cli.errors import UsageError

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


class OneSource(TyperCommand):
    """A command that refuses a second file of prompts, which would take the first one's place."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As typer's; raises `UsageError` for a second file."""
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        counts = Counter(parameter.name for parameter in given)
        for name in ("prompt_file", "dataset"):
            if counts[name] > 1:
                raise UsageError(
                    f"--{name.replace('_', '-')} was given {counts[name]} times",
                    "put the prompts in one file",
                )
        return super().parse_args(ctx, args)


def from_data(
    resolved: "specdec_cli.recipe.Recipe",
    dataset: str | None,
    limit: int | None,
    chat: bool | None,
    system: str | None,
    *,
    skip_bad: bool,
) -> "tuple[list[specdec_cli.prompts.Prompt], specdec_cli.recipe.Recipe]":
    """Prompts of `--dataset`, else of the recipe's data, and the recipe that names them."""
    from specdec_cli.prompts import as_conversations, load_prompts

    data = resolved.data
    use_chat, opening = chat_of(chat, system, data)
    if dataset is not None:
        data = _data_of(dataset)
    if data is None:
        raise UsageError("no prompts", "pass --dataset, or give the recipe a data section")
    if limit is not None:
        data = data.model_copy(update={"limit": limit})
    prompts = as_conversations(load_prompts(data, skip_bad=skip_bad), use_chat, opening)
    data = data.model_copy(update={"chat": use_chat, "system": opening})
    return prompts, resolved.model_copy(update={"data": data})


def _data_of(dataset: str) -> "specdec_cli.recipe.DataSection":
    """The data section that `--dataset` stands for; a file of this machine by its full path."""
    from specdec_cli.prompts import parse_dataset
    from specdec_cli.recipe import DataSection

    path, split, column = parse_dataset(dataset)
    if os.path.exists(path):
        path = os.path.abspath(path)
    return DataSection(path=path, split=split, column=column)


def chat_of(
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
