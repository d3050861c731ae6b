"""Commands whose help is readable at 80 columns, and that refuse a source of prompts given twice.

Imports nothing heavy, since `specdec --help` imports this module.
"""

from collections import Counter
from typing import Any

from typer.core import TyperCommand, TyperGroup

from specdec_cli.errors import UsageError


class Command(TyperCommand):
    """A command whose help shows options by panel, each name whole in every terminal."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write a list of options for each panel."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if (record := parameter.get_help_record(ctx)) is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panel = getattr(parameter, "rich_help_panel", None) or kind
                panels.setdefault(panel, []).append(record)
        for panel, records in panels.items():
            with formatter.section(panel):
                formatter.write_dl(records)


class Commands(TyperGroup):
    """A group whose help shows the whole first paragraph of each command."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the list of commands."""
        shown = [self.commands[name] for name in self.list_commands(ctx)]
        firsts = [(c, (c.help or "").partition("\n\n")[0]) for c in shown if not c.hidden]
        with formatter.section("Commands"):
            formatter.write_dl([(c.name, " ".join(told.split())) for c, told in firsts])


class OneSource(Command):
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
