"""Command classes for typer, and hints for command lines that the parser refuses. The classes print
help that fits 80 columns; `OneSource` also refuses two prompt files.

Imports nothing heavy, since `specdec --help` imports this module.
"""

import re
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from specdec_cli.errors import UsageError

# Since 0.29, typer contains a copy of click. This is the base class of the copy's parser errors.
ParserError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class Command(TyperCommand):
    """A command whose help lists options by panel and never truncates their names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as typer does. Attach the command to each error, so that hints can name it."""
        try:
            return super().parse_args(ctx, args)
        except ParserError as problem:
            problem.ctx = getattr(problem, "ctx", None) or ctx
            raise

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
    """A command that refuses a second prompt file instead of silently dropping the first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as typer does, but raise `UsageError` for a second file."""
        with suppress(ParserError):  # `super().parse_args` raises them again
            _, _, given = self.make_parser(ctx).parse_args(args=list(args))
            self._refuse_second(given)
        return super().parse_args(ctx, args)

    def _refuse_second(self, given: Sequence[Any]) -> None:
        counts = Counter(parameter.name for parameter in given)
        for name in ("prompt_file", "dataset"):
            if counts[name] > 1:
                raise UsageError(
                    f"--{name.replace('_', '-')} was given {counts[name]} times",
                    "put the prompts in one file",
                )


_MOST_GUESSES = 3

# Maps our options and commands to the names that other tools use for them, without dashes.
_OTHER_NAMES: Final = {
    "--target": "checkpoint model",
    "--dataset FILE::COLUMN": "column",
    "--prompt-file": "data input prompts",
    "--draft": "draft-model speculative-model",
    "--device": "gpu",
    "--max-new-tokens": "max-length max-tokens",
    "--limit": "n num-prompts num-samples",
    "--temperature": "t temp",
    "-o": "out output-dir",
    "--repeats": "runs",
    "--target-tp": "tensor-parallel-size tp",
    "sweep-k": "bench benchmark",
    "validate": "check lint",
    "ls": "list",
    "generate": "run",
}


def explained(error: Any) -> tuple[str, str]:
    """Return the message and the hint for an error of typer's parser."""
    message: str = getattr(error, "format_message", error.__str__)()
    context = getattr(error, "ctx", None)
    hint = f"see `{context.command_path if context else 'specdec'} --help`"
    if context is None:
        return message, hint
    parameters = context.command.params
    names = getattr(context.command, "commands", {})
    wrong: Any = getattr(error.__cause__, "errors", None)  # a method of pydantic's ValidationError
    if wrong is not None:
        from specdec_cli.recipe.problems import describe

        flag = next(one for one in error.param.opts if one.startswith("--"))
        message = f"{flag}: {describe(wrong()[0])}"
    elif hasattr(error, "possibilities"):
        message = error.message
        known = [o for p in parameters for o in (*p.opts, *p.secondary_opts)]
        hint = _guess(error.option_name, known) + hint
    elif unknown := re.search(r"No such command '([^']*)'\.", message):
        message = unknown[0]
        shown = [name for name, one in names.items() if not one.hidden]
        hint = f"{_guess(unknown[1], shown)}commands: {', '.join(shown)}; {hint}"
        from specdec_cli.recipe.resolve import find_bundled

        if find_bundled(unknown[1]):
            hint = f"{unknown[1]} is a recipe: specdec generate {unknown[1]}; {hint}"
    elif "unexpected extra argument" in message and "prompt" in {p.name for p in parameters}:
        hint = f"a prompt goes after --prompt, in quotes; {hint}"
    return message, hint


def _guess(given: str, known: Sequence[str]) -> str:
    """Return the start of a hint for an unknown option or command; "" if no name is similar. It is
    usually a question, such as `did you mean --target? `.

    The name is looked up in this order: names that other tools use, known names that start with it,
    recipe keys, and known names with a similar spelling.
    """
    name = given.replace("_", "-")
    tried = name.lstrip("-")
    other = next((ours for ours, others in _OTHER_NAMES.items() if tried in others.split()), "")
    longer = sorted({one for one in known if one.startswith(name)})
    found = [other] if other.split(" ")[0] in known else longer
    if not found and (key := _key(name, known)):
        return key
    if not 0 < len(found) <= _MOST_GUESSES:
        found = get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {' or '.join(found)}? " if found else ""


def _key(option: str, known: Sequence[str]) -> str:
    """Return a sentence that names the recipe key spelled like the option; "" if there is none, or
    if the command has no --set."""
    if "--set" not in known:
        return ""
    from specdec_cli.recipe.schema import key_fields

    name = option.lstrip("-").replace("-", "_")
    key = next((key for key in key_fields() if key.rpartition(".")[2] == name), None)
    return f"--set {key}=… sets it; " if key is not None else ""
