"""Examples in docs: blocks of Python and recipes run as they stand, command lines at small size."""

import glob
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
import typer
import yaml

from specdec_cli.app import app, main
from specdec_cli.recipe import load_recipe

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
        lines = itertools.chain(*map(turns_of, block.replace("\\\n", " ").splitlines()))
        for line in lines:
            found += re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*specdec (.+)$", line.strip())
    return found


def turns_of(line: str) -> list[str]:
    """The lines that a shell runs for this one, which may be a loop over words."""
    loop = re.fullmatch(r"for (\w+) in (.+?); do (.+); done", line.strip())
    if loop is None:
        return [line]
    name, values, body = loop.groups()
    return [body.replace(f"${name}", value) for value in values.split()]


def words_of(line: str) -> list[str]:
    """The words of a command up to a pipe or a comment."""
    if line.count("'") % 2:  # a prompt of several lines
        line += "'"
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = itertools.takewhile(lambda word: not re.fullmatch(r"[|>&;<]+", word), lexer)
    return [word for word in words if word not in ("...", "…")]


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
    words = words_of(line)
    command = typer.main.get_command(app)
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    if words and words[0].startswith(("-h", "--help", "--version", "--install")):
        return
    assert not hasattr(command, "commands"), f"{page}: no command {words[:1]}"
    context = command.make_context("specdec", [], resilient_parsing=True)
    command.make_parser(context).parse_args(args=list(words))


# What stands for the models and files that examples name.
MODELS = {"Qwen/Qwen3-8B": "demo:target", "Qwen/Qwen3-0.6B": "demo:draft"}
MODELS |= {"RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": "demo:eagle3"}
PAIR = "{target: {model: demo:target}, draft: {model: demo:draft}, data: {path: prompts.jsonl}}"
ROWS = [{"prompt": "def f(x):", "category": "a"}, {"prompt": "import os", "category": "b"}]
FILES = {
    **{name: [PAIR] for name in ("recipe.yaml", "my-recipe.yaml", "RECIPE")},
    **{name: [json.dumps(row) for row in ROWS] for name in ("prompts.jsonl", "second.jsonl")},
}
# Models that are not here, servers, several processes, and the plug-ins of docs/methods.md.
ELSEWHERE = re.compile(
    r"llama|Qwen/|smollm2|\.gguf|--serve|-tp |--plugin|--chat|--help|meta-|bench-"
)
SMALL = {
    "generate": ["--max-new-tokens", "2", "--device", "cpu"],
    "sweep-k": ["--limit", "2", "--max-new-tokens", "3", "--repeats", "1", "--device", "cpu"],
    "profile-blocks": ["--device", "cpu", "--estimate"],
}
RUNNABLE = {p: [one for q, one in LINES if q == p and not ELSEWHERE.search(one)] for p, _ in LINES}


@pytest.mark.parametrize("page", [page for page, lines in RUNNABLE.items() if lines])
def test_command_lines_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page's commands one after the other, as a reader would, each at small size."""
    monkeypatch.chdir(tmp_path)
    for command in ("sweep_k", "merge"):
        monkeypatch.setattr(f"specdec_cli.commands.{command}.write_pictures", lambda folder: None)
    for name, lines in FILES.items():
        Path(name).write_text("".join(f"{one}\n" for one in lines))
    for line in RUNNABLE[page]:
        words = [MODELS.get(word, word) for word in words_of(line)]
        found = [sorted(glob.glob(word)) if "*" in word else [word] for word in words]
        words = [*itertools.chain(*found), *SMALL.get(words[0], ())]
        if words[0] == "sweep-k" and "--synthetic" not in line:
            words += ["--k", "1"]
        if "--request-rate" in words:
            words += ["--request-rate", "16,inf"]
        assert main(words) == 0, (line, capsys.readouterr().err)


def test_most_command_lines_run() -> None:
    assert sum(map(len, RUNNABLE.values())) >= 20


RECIPES = [
    pytest.param(block, id=f"{page.name}-{i}")
    for page in PAGES
    for i, block in enumerate(blocks(page, "yaml"))
]


@pytest.mark.parametrize("block", RECIPES)
def test_recipes_are_valid(block: str, tmp_path: Path) -> None:
    """Recipes, and parts of them, which the demo pair completes."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({"target": {"model": "demo:target"}} | yaml.safe_load(block)))
    loaded = load_recipe(str(recipe)).model_dump()
    for section, values in yaml.safe_load(block).items():
        assert loaded[section].keys() >= values.keys()
