"""Foreign text drives no terminal, wherever it is shown."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec_cli.app import main
from specdec_cli.commands.status import set_up_logging
from specdec_cli.models.tokenizer import PretrainedTokenizer
from specdec_cli.recipe import load_recipe
from specdec_cli.text import inert
from tests.cli.generate_helpers import (
    ANSI,
    CHAT_TEMPLATE,
    Result,
    Run,
    chat_model,
    on_terminal,
    prompt_options,
)

pytestmark = pytest.mark.usefixtures("small_demo")

HOSTILE = {
    "colour": "[red]\x1b[31m",  # first, because values are cut short
    "markup": "bold[/red][/][link=http://x]y[/link]",
    "clear": "\x1b[2J\x1b[H",
    "title": "\x1b]0;title\x07",
    "link": "\x1b]8;;http://x\x1b\\text\x1b]8;;\x1b\\",
    "clipboard": "\x1b]52;c;eA==\x07",
    "bell": "a\x07b",
    "c1-csi": "\x9b31mred",
    "c1-osc": "\x9d52;c;eA==\x9c",
    "backspaces": "good\b\b\b\bevil",
    "carriage-return": "good\revil",
    "delete": "a\x7fb",
    "bidi": "\u202eevil\u2066x\u2069\u200f",
    "emoji": ":smile: :warning:",
    "html": "<script>alert(1)</script><b>&amp;",
}
ALL = "|".join(HOSTILE.values())
HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
SHORT = ("--max-new-tokens", "2", "--ignore-eos", "-k", "0")
GOOD = "target: {model: t}\n"


@pytest.fixture
def hostile_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose every token stands for the hostile text."""
    monkeypatch.setattr(PretrainedTokenizer, "decode", lambda _, ids: ALL * len(ids))


# Errors: each place builds a command line whose error mentions the hostile text.

Arguments = list[str | Path]
Place = Callable[[Path], Arguments]


def recipe_of(text: str) -> Place:
    def arguments(folder: Path) -> Arguments:
        (folder / "r.yaml").write_text(text, encoding="utf-8")
        return [folder / "r.yaml", "--prompt", "x"]

    return arguments


def prompts_of(record: object) -> Place:
    def arguments(folder: Path) -> Arguments:
        (folder / "p.jsonl").write_text(json.dumps(record))
        return ["--prompt-file", folder / "p.jsonl"]

    return arguments


def template_that_raises(folder: Path) -> Arguments:
    model = chat_model(folder / "model", "{{ raise_exception(messages[0].content) }}")
    return ["--target", model, "--chat", "--prompt", ALL]


def short_name(folder: Path) -> Path:
    """A path that is short enough for every operating system."""
    return folder / ALL[:150].replace("/", "")


def damaged_model(folder: Path) -> Arguments:
    short_name(folder).mkdir()
    (short_name(folder) / "config.json").write_text("{")
    return ["--target", short_name(folder), "--prompt", "x"]


def folder_of_a_run(folder: Path) -> Arguments:
    short_name(folder).mkdir()
    (short_name(folder) / "samples.jsonl").write_text("{}")
    return ["-o", short_name(folder), "--prompt", "x"]


def recipe_in_a_folder(folder: Path) -> Arguments:
    short_name(folder).mkdir()
    (short_name(folder) / "recipe.yaml").touch()
    return [short_name(folder), "--prompt", "x"]


YAML = json.dumps(ALL)
ERRORS: dict[str, Place] = {
    "no such prompt file": lambda folder: ["--prompt-file", folder / ALL],
    "prompt file": lambda folder: ["--prompt-file", f"{short_name(folder)}.txt"],
    "extension": lambda folder: ["--prompt-file", "/dev/zero" + ALL],
    "model folder": lambda _: ["--target", f"./{ALL}", "--prompt", "x"],
    "damaged model": damaged_model,
    "hub id": lambda _: ["--target", ALL.replace("/", "").replace("\\", ""), "--prompt", "x"],
    "demo model": lambda _: ["--target", f"demo:{ALL}", "--prompt", "x"],
    "recipe": lambda _: [f"./{ALL}", "--prompt", "x"],
    "recipe folder": recipe_in_a_folder,
    "option": lambda _: [f"--{ALL}"],
    "argument": lambda _: ["demo", ALL],
    "device": lambda _: ["--device", ALL, "--prompt", "x"],
    "set key": lambda _: ["--set", f"{ALL.replace('=', '')}=1", "--prompt", "x"],
    "set without value": lambda _: ["--set", ALL.replace("=", ""), "--prompt", "x"],
    "set value": lambda _: ["--set", f"target.dtype={YAML}", "--prompt", "x"],
    "output": lambda _: ["-o", f"/dev/null/{ALL}", "--prompt", "x"],
    "earlier output": folder_of_a_run,
    "recipe key": recipe_of(f"{GOOD}{YAML}: 1\n"),
    "key below": recipe_of(f"{GOOD}run: {{{YAML}: 1}}\n"),
    "duplicate key": recipe_of(f"{GOOD}{YAML}: 1\n{YAML}: 1\n"),
    "recipe value": recipe_of(f"target: {{model: t, dtype: {YAML}}}\n"),
    "recipe model": recipe_of(f"target: {{model: {YAML}}}\n"),
    "recipe data": recipe_of(f"{GOOD}data: {{path: p, chat: {YAML}}}\n"),
    "recipe tag": recipe_of(f"{GOOD}run: !<[red]%1B%5B31m%C2%9B> 1\n"),
    "recipe document": recipe_of(YAML),
    "role": prompts_of({"messages": [{"role": ALL, "content": "a"}]}),
    "message": prompts_of({"messages": [ALL]}),
    "messages": prompts_of({"messages": ALL}),
    "template": template_that_raises,
}


@pytest.mark.parametrize("place", ERRORS)
def test_errors(place: str, run: Run, tmp_path: Path) -> None:
    arguments = ERRORS[place](tmp_path)
    result = run(*arguments, *SHORT)
    assert result.code in (2, 5) and result.out == ""
    assert not HARMFUL.search(result.err)
    assert "[red]" in result.err and re.search(r"\\(x|u00)1b|%1B", result.err)
    as_json = run(*arguments, *SHORT, "--json")
    assert as_json.code == result.code and not HARMFUL.search(as_json.out + as_json.err)
    assert list(as_json.document) == ["error"]
    assert "[red]" in as_json.document["error"]["message"]


def test_error_says_it_as_it_was(run: Run) -> None:
    """Nothing is lost: the JSON document has the text, and the line has its escapes."""
    arguments = ("--target", f"demo:{ALL}", "--prompt", "x")
    message = run(*arguments, "--json").document["error"]["message"]
    assert message == f"no bundled model demo:{ALL}"
    lines = [inert(f"error: {line}") for line in message.splitlines()]
    assert run(*arguments).err.splitlines()[: len(lines)] == lines


# Results


@pytest.mark.usefixtures("hostile_model")
def test_text_on_a_pipe(run: Run) -> None:
    result = run(*prompt_options(ALL, "b"), *SHORT)
    assert result.code == 0 and not HARMFUL.search(result.out + result.err)
    blocks = [f"==> prompt {i} <==\n{inert(ALL * 2)}\n" for i in range(2)]
    assert result.out == "".join(blocks)
    assert run("--prompt", ALL, *SHORT).out == f"{inert(ALL * 2)}\n"


@pytest.mark.usefixtures("hostile_model")
def test_documents_are_exact_and_inert(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"prompt": ALL, "category": ALL}))
    folder = tmp_path / "run"
    result = run("--prompt-file", path, *SHORT, "--json", "-o", folder)
    assert result.code == 0 and not HARMFUL.search(result.out + result.err)
    (output,) = result.outputs
    assert (output["prompt"], output["text"], output["category"]) == (ALL, ALL * 2, ALL)
    for file in folder.iterdir():
        assert not HARMFUL.search(file.read_text(encoding="utf-8")), file.name
    assert json.loads((folder / "summary.json").read_text()) == result.document
    assert json.loads((folder / "samples.jsonl").read_text())["category"] == ALL


def test_prompts_that_cannot_run(run: Run) -> None:
    limit = ("--set", "cache.max_model_len=16")
    result = run(*prompt_options(ALL, "x"), *limit, *SHORT)
    assert result.code == 3 and not HARMFUL.search(result.out + result.err)


def visible(result: Result) -> str:
    """The text on a terminal; fails on a control sequence that is not rich's."""
    for sequence in ANSI.findall(result.err):
        assert re.fullmatch(r"\x1b\[(\?25[hl]|[\d;]*m|\d*[AK]|2K)", sequence), sequence
    text = ANSI.sub("", result.err).replace("\r", "")
    assert not HARMFUL.search(text)
    return text


@pytest.mark.usefixtures("hostile_model")
def test_live_text() -> None:
    seen = visible(on_terminal("generate", *prompt_options(ALL, "b"), *SHORT, columns=80))
    assert f"── prompt 0 ──\n{inert(ALL)}{inert(ALL * 2)}\n" in seen


@pytest.mark.usefixtures("hostile_model")
def test_bar_and_table() -> None:
    options = (*prompt_options(ALL, "b"), *SHORT, "--batch-size", "2")
    seen = visible(on_terminal("generate", *options, columns=80))
    assert f"==> prompt 0 <==\n{inert(ALL * 2)}\n" in seen


def test_conversation_on_a_terminal(tmp_path: Path) -> None:
    model = chat_model(tmp_path / "m", CHAT_TEMPLATE + "\x1b[31m[red]")
    options = ("--target", model, "--system", ALL, "--prompt", ALL, *SHORT)
    seen = visible(on_terminal("generate", *options, columns=80))
    asked = f"<|system|>\n{ALL}\n<|user|>\n{ALL}\n<|assistant|>\n\x1b[31m[red]"
    assert inert(asked) in seen


def test_error_on_a_terminal() -> None:
    result = on_terminal("generate", "--target", f"demo:{ALL}", "--prompt", "x", columns=40)
    assert result.code == 5 and "[red]\\x1b[31m|bold[/red][/]" in visible(result)


# Recipes


def test_recipe_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"{short_name(tmp_path).name}.yaml"
    stop = json.dumps([ALL, "é"])
    path.write_text(f"# \u202e [red] :smile:\n{GOOD}sampling: {{stop: {stop}}}\n", encoding="utf-8")
    for arguments in (
        ["show", str(path)],
        ["show", str(path), "--resolved"],
        ["show", str(path), "--json"],
        ["validate", str(path)],
        ["validate", str(path), "--json"],
    ):
        assert main(["recipe", *arguments]) == 0
        captured = capsys.readouterr()
        assert not HARMFUL.search(captured.out) and captured.err == ""
    assert main(["recipe", "show", str(path), "--resolved"]) == 0
    again = tmp_path / "again.yaml"
    again.write_text(capsys.readouterr().out, encoding="utf-8")
    assert load_recipe(str(again)).sampling.stop == (ALL, "é")


# Log lines


def test_log_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    set_up_logging(verbose=False)
    logging.getLogger("specdec").warning("model %s", ALL)
    assert capsys.readouterr().err == f"warning: model {inert(ALL)}\n"


def test_a_warning_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It appears once in each command, and other log lines are not held back."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    log = logging.getLogger("specdec")
    set_up_logging(verbose=False)
    for told in ("first", "other", "first"):
        log.warning("the %s", told)
    log.error("it broke")
    log.error("it broke")
    told = "warning: the first\nwarning: the other\n" + 2 * "error: it broke\n"
    assert capsys.readouterr().err == told
    set_up_logging(verbose=False)
    log.warning("the first")
    assert capsys.readouterr().err == "warning: the first\n"
