"""Writes docs/options.md, the reference of all commands and options, from the command line's help.

    python scripts/docs/options.py

The page is built from the declared commands and not from printed help, so it does not depend on the
terminal's width, on colours or on the version of typer.
"""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from specdec_cli.app import app

PAGE = Path(__file__).parents[2] / "docs" / "options.md"

_INTRODUCTION = """\
# Commands and options

This page is generated from `specdec --help` by `python scripts/docs/options.py`.

Precedence: option, then `--set KEY=VALUE`, then the recipe, then the default. Each command also has
`-h, --help`. `specdec recipe schema` lists every key of a recipe with its default.
"""
_NO_PANEL = "Options"  # the title in --help of options without a panel
_TYPERS_OWN = ("help", "install_completion", "show_completion")


def page() -> str:
    """The whole page as Markdown."""
    root = typer.main.get_command(app)
    sections = [_section(path, command) for path, command in _commands("specdec", root)]
    return "\n".join([_INTRODUCTION, *sections])


def _commands(path: str, command: Any) -> Iterator[tuple[str, Any]]:
    """Every visible command with its full name, parents first."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        if not inner.hidden:
            yield from _commands(f"{path} {name}", inner)


def _section(path: str, command: Any) -> str:
    shown = [p for p in command.params if p.name not in _TYPERS_OWN and not p.hidden]
    arguments = [p for p in shown if p.param_type_name == "argument"]
    panels: dict[str, list[Any]] = {}
    for parameter in shown:
        if parameter not in arguments:
            panel = getattr(parameter, "rich_help_panel", None) or _NO_PANEL
            panels.setdefault(panel, []).append(parameter)
    last = "COMMAND" if getattr(command, "commands", None) else ""
    usage = " ".join(filter(None, [path, *(p.metavar for p in arguments), "[OPTIONS]", last]))
    parts = [f"## {path}", f"`{usage}`", _one_line_a_paragraph(command.help)]
    if arguments:
        parts.append(_table("argument", [(f"`{p.metavar}`", p.help) for p in arguments]))
    for panel in sorted(panels, key=lambda name: name != _NO_PANEL):
        parts.append(_table(panel, [(_names(p), _meaning(p)) for p in panels[panel]]))
    if command.epilog:
        parts.append(command.epilog)
    return "\n\n".join(filter(None, parts)) + "\n"


def _table(heading: str, rows: list[tuple[str, str]]) -> str:
    lines = [f"| {heading} | meaning |", "|---|---|"]
    return "\n".join([*lines, *(f"| {left} | {_escaped(right)} |" for left, right in rows)])


def _names(option: Any) -> str:
    """An option's spellings and the name of its value."""
    spellings = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    return spellings if option.is_flag else f"{spellings} `{option.metavar}`"


def _meaning(option: Any) -> str:
    default = option.default if isinstance(option.default, str) else None
    return f"{option.help} Default: `{default}`." if default else str(option.help)


def _one_line_a_paragraph(text: str | None) -> str:
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text or ""))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
