"""Examples in docs: blocks of Python and recipes run as they stand, command lines at small size."""

import glob
import itertools
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from specdec_cli import demo
from specdec_cli.app import app, main
from specdec_cli.backends.server import times
from specdec_cli.recipe import load_recipe
from tests.cli.generate_helpers import CHAT_TEMPLATE, chat_model
from tests.cli.test_plugin import FILES as PLUGINS
from tests.cli.test_plugin import registries as registries
from tests.engine.test_gguf_places import vocabulary
from tests.gguf_files import TYPES, save_gguf, tiny_model
from tests.server.fake_server import FakeServer, running
from tests.support import tiny_config

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
        text = re.sub(r"; do\n(.+)\ndone", r"; do \1; done", block.replace("\\\n", " "))
        lines = itertools.chain(*map(turns_of, text.splitlines()))
        for line in lines:
            found += re.findall(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*specdec (.+)$", line.strip())
    return found


def turns_of(line: str) -> list[str]:
    """The lines that a shell runs for this one, which may be a loop over words."""
    loop = re.fullmatch(r"for (\w+) in (.+?); do (.+); done", line.strip())
    if loop is None:
        return [line]
    name, values, body = loop.groups()
    return [
        body.replace(f"${{{name}%:*}}", value.rpartition(":")[0])
        .replace(f"${{{name}#*:}}", value.partition(":")[2])
        .replace(f"${name}", value)
        for value in values.split()
    ]


def words_of(line: str) -> list[str]:
    """The words of a command up to a pipe or a comment."""
    if line.count("'") % 2:  # a prompt of several lines
        line += "'"
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words = itertools.takewhile(lambda word: not re.fullmatch(r"[|>&;<]+", word), lexer)
    found: list[str] = []
    for word in words:  # dots are a prompt, or stand for further words
        found += [word] if word not in ("...", "…") or found[-1:] == ["--prompt"] else []
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
    words = words_of(line)
    command = typer.main.get_command(app)
    while hasattr(command, "commands") and words and words[0] in command.commands:
        command = command.commands[words.pop(0)]
    if words and words[0].startswith(("-h", "--help", "--version", "--install")):
        return
    assert not hasattr(command, "commands"), f"{page}: no command {words[:1]}"
    context = command.make_context("specdec", [], resilient_parsing=True)
    command.make_parser(context).parse_args(args=list(words))


# What stands for the models, files and servers that examples name.
STAND_INS = {"Qwen/Qwen3-8B": "demo:target", "Qwen/Qwen3-0.6B": "demo:draft"}
STAND_INS |= {"RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": "demo:eagle3"}
STAND_INS |= {"demo:smollm2-eagle3": "chat"}
STAND_INS |= {"recipes/shapes/llama-8b": str(ROOT / "recipes" / "shapes" / "llama-8b")}
PAIR = "{target: {model: demo:target}, draft: {model: demo:draft}, data: {path: prompts.jsonl}}"
ROWS = [{"prompt": "def f(x):", "category": "a"}, {"prompt": "import os", "category": "b"}]
TURNS = [{"turns": ["What is it?", "And why?"], "category": str(i)} for i in range(2)]
SAID = [{"messages": [{"role": "user", "content": "Hello."}]}]
FILES = {
    **{name: [PAIR] for name in ("recipe.yaml", "my-recipe.yaml", "RECIPE")},
    **{name: [json.dumps(row) for row in ROWS] for name in ("prompts.jsonl", "second.jsonl")},
    "random.jsonl": [json.dumps({"prompt_token_ids": [5, 6, 7]})] * 2,
    "question.jsonl": [json.dumps(row) for row in TURNS],
    "conversations.jsonl": [json.dumps(row) for row in SAID],
    **{f"{name}.py": [code] for name, code in PLUGINS.items()},
}
CHATS = re.compile(
    r"--chat|llama-3.1-8b-1b|smollm2-offline|second.jsonl"
)  # of models with a template
# These run over ranks, in launch/test_docs_over_ranks.py. Other comparisons, of shapes too large
# for a CPU, are planned.
OVER_RANKS = re.compile(r"compare-tp demo|^(?!compare-tp|.*--estimate).*-tp ")
SMALL = {
    "generate": ["--max-new-tokens", "2", "--device", "cpu"],
    "sweep-k": ["--limit", "2", "--max-new-tokens", "3", "--repeats", "1", "--device", "cpu"],
    "profile-blocks": ["--device", "cpu", "--estimate"],
    "compare-tp": ["--device", "cpu", "--dry-run"],
}
ALONE = {p: [one for q, one in LINES if q == p and not OVER_RANKS.search(one)] for p, _ in LINES}
LAUNCH = [sys.executable, str(ROOT / "tests" / "server" / "fake_process.py"), "vllm"]


def small(line: str) -> list[str]:
    """A command's words with what makes it small, and with what stands for others."""
    plain = " --baseline-server "
    line = line.replace(f"{plain}http://host", f"{plain}http://plain")
    words = [STAND_INS.get(word, word) for word in words_of(line)]
    found = [sorted(glob.glob(word)) if "*" in word else [word] for word in words]
    words = [*itertools.chain(*found), *SMALL.get(words[0], ())]
    if "--device-memory" in words:  # of a GPU
        words.remove("cpu")
        words.remove("--device")
    if CHATS.search(line) and ".gguf" not in line:
        has_draft = re.search("-k 0|--draft", line)
        words += ["--target", "chat", "--draft", "chat"][: 2 if has_draft else 4]
    if "bench-" in line and "--dataset" in line:  # shapes have no tokenizer
        words[words.index("--dataset") + 1] = "random.jsonl"
    if "sweep-k bench-" in line:
        words += ["--target", "shape", "--draft", "shape"]
    if words[0] == "sweep-k" and not re.search("--synthetic|--server", line):
        words += ["--k", "0,1" if "--serve" in line else "1"]
    if "--request-rate" in line:
        words += ["--request-rate", "16,inf"]
    if "--duration" in line:
        words += ["--duration", "0.1"]
    if "--serve " in line:
        words += ["--set", f"engine.launch={json.dumps(LAUNCH)}"]
    return words


@pytest.fixture
def stand_ins(
    request: pytest.FixtureRequest,
    small_models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Files, models and servers by the names that the pages have for them. The demo pair is the
    smaller one, except beside a head of the larger target."""
    monkeypatch.chdir(tmp_path)
    (given,) = request.node.callspec.params.values()  # a page, or a line
    if not any("eagle3" in line for line in ALONE.get(given, [given])):
        monkeypatch.setattr(demo, "FOLDER", small_models)
    for name, lines in FILES.items():
        Path(name).write_text("".join(f"{one}\n" for one in lines))
    chat_model(tmp_path / "chat")
    tiny_config("llama").save_pretrained(tmp_path / "shape")
    Path("downloads").mkdir()
    values = vocabulary() | {"llama.vocab_size": None, "tokenizer.chat_template": CHAT_TEMPLATE}
    model = tiny_model("llama", vocab_size=len(values["tokenizer.ggml.tokens"]))
    for name in ("SmolLM2-135M-Instruct.Q4_1.gguf", "draft.gguf", "downloads/m.gguf"):
        save_gguf(tmp_path / name, "llama", model, TYPES.Q4_0, more=values)
    for name in ("RETRY_S", "SCRAPE_S", "LOOK_S"):
        monkeypatch.setattr(times, name, 0.01)
    servers = {f"http://host:800{i}": FakeServer(k=k) for i, k in enumerate((3, 2))}
    servers |= {f"http://plain:800{i}": FakeServer(k=0) for i in (1, 2)}
    with running(*servers.values()):
        for name, server in servers.items():
            monkeypatch.setitem(STAND_INS, name, server.url)
        yield


@pytest.mark.parametrize("page", [page for page, lines in ALONE.items() if lines])
@pytest.mark.usefixtures("stand_ins", "registries", "no_pixels")
def test_command_lines_run(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A page's commands one after the other, as a reader would, each at small size."""
    monkeypatch.setattr("specdec_cli.commands.status.write_pictures", lambda folder: None)
    for line in ALONE[page]:
        if "--next-turns second.jsonl" in line:
            Path("second.jsonl").unlink()
        if "RUN_FOLDER" in line:
            assert main([*small("sweep-k RECIPE"), "--k", "0", "-o", "RUN_FOLDER"]) == 0
        code, printed = main(small(line)), capsys.readouterr()
        assert code == 0, (line, printed.err)
        if "recipes/shapes" in line:  # an estimate that is the same on every machine
            rows = {row.rstrip() for row in printed.out.splitlines()[-7:]}
            assert rows <= {*(ROOT / "docs" / page).read_text("utf-8").splitlines()}, rows


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
