"""Options that select a command's prompts and their chat format. Imports nothing heavy."""

from collections import Counter
from typing import Annotated, Any

from typer.core import TyperCommand

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
