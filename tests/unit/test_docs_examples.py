"""Examples in docs: blocks of Python run as they stand, and command lines have known options."""

import itertools
import re
import shlex
from pathlib import Path

import pytest
import typer

from specdec_cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = {"methods.md"}  # whose files have a test of their own


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language; those without one for ""."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in found if name == language]


def commands(page: Path) -> list[str]:
    """The `specdec` commands of a page's blocks; lines that end with a backslash go on."""
    found = []
    for block in (*blocks(page, ""), *blocks(page, "sh"), *blocks(page, "bash")):
        for line in block.replace("\\\n", " ").splitlines():
            found += re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*specdec (.+)$", line.strip())
    return found


WITH_PYTHON = [page for page in PAGES if page.name not in OTHERS and blocks(page, "python")]
LINES = [(page.name, line) for page in PAGES for line in commands(page)]


def test_there_are_examples() -> None:
    assert WITH_PYTHON and len(LINES) > 40


@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_runs(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A page's blocks run one after the other, as a reader would."""
    names: dict[str, object] = {}
    for number, block in enumerate(blocks(page, "python")):
        exec(compile(block, f"{page.name}, block {number}", "exec"), names)
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "line"), LINES, ids=[f"{p}-{i}" for i, (p, _) in enumerate(LINES)]
)
def test_command_lines_have_options_that_exist(page: str, line: str) -> None:
    if line.count("'") % 2:  # a prompt of several lines
        line += "'"
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = list(itertools.takewhile(lambda word: not re.fullmatch(r"[|>&;<]+", word), lexer))
    command = typer.main.get_command(app)
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    if words and words[0].startswith(("-h", "--help", "--version", "--install")):
        return
    assert not hasattr(command, "commands"), f"{page}: no command {words[:1]}"
    words = [word for word in words if word not in ("...", "…")]
    context = command.make_context("specdec", [], resilient_parsing=True)
    command.make_parser(context).parse_args(args=list(words))
