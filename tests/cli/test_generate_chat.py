"""`specdec generate` on conversations: messages, `--chat` and `--system`, and chat templates."""

import errno
import functools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoTokenizer

from specdec_cli.commands import generate_run
from specdec_cli.models import tokenizer as tokenizer_module
from specdec_cli.text import inert
from tests.cli.generate_helpers import (
    CHAT_TEMPLATE,
    Result,
    Run,
    chat_model,
    on_terminal,
    prompt_options,
)

pytestmark = pytest.mark.usefixtures("small_demo")

FEW = ("-k", "0", "--max-new-tokens", "2", "--json")
SYSTEM, ASK, ANSWER, AGAIN = (
    {"role": role, "content": content}
    for role, content in (
        ("system", "You write Python."),
        ("user", "Sum a list."),
        ("assistant", "def total(items): ..."),
        ("user", " Shorter.\n"),
    )
)
BRIEF = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat") / "model")


@functools.cache
def tokenizer_of(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


def rendered(model: Path, messages: list[dict[str, str]]) -> tuple[str, list[int]]:
    """Text and ids of the chat template, by transformers alone."""
    tokenizer = tokenizer_of(model)
    text, ids = (
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=tokenize)
        for tokenize in (False, True)
    )
    return text, ids["input_ids"]


def plain(model: Path, text: str) -> tuple[str, list[int]]:
    return text, tokenizer_of(model)(text)["input_ids"]


def asked(result: Result) -> list[tuple[str, list[int]]]:
    assert result.code == 0, result.err
    return [(output["prompt"], output["prompt_token_ids"]) for output in result.outputs]


# What reaches the model


def test_messages_are_rendered_as_transformers_does(run: Run, model: Path, lines: Any) -> None:
    conversations = [[ASK], [SYSTEM, ASK], [ASK, ANSWER, AGAIN], [SYSTEM, ASK, ANSWER, AGAIN]]
    path = lines(*({"messages": messages} for messages in conversations))
    found = asked(run("--target", model, "--prompt-file", path, *FEW))
    assert found == [rendered(model, messages) for messages in conversations]
    for text, ids in found:
        assert text.startswith("<|endoftext|><|") and text.endswith("<|assistant|>\n")
        assert ids.count(0) == 1, "the first token came twice"


def test_text_and_messages_side_by_side(run: Run, model: Path, lines: Any) -> None:
    path = lines({"prompt": "x = 1"}, {"messages": [ASK]}, {"prompt_token_ids": [310, 963]})
    text, messages, ids = asked(run("--target", model, "--prompt-file", path, *FEW))
    assert text == plain(model, "x = 1") and text[1][0] == 0
    assert messages == rendered(model, [ASK])
    assert ids[1] == [310, 963]


def test_text_goes_before_messages(run: Run, model: Path, lines: Any) -> None:
    """Datasets may hold both: the question, and the conversation with its answer."""
    path = lines({"prompt": "x", "messages": [ASK, ANSWER]}, {"turns": ["y"], "messages": [ASK]})
    found = asked(run("--target", model, "--prompt-file", path, *FEW))
    assert found == [plain(model, "x"), plain(model, "y")]


def test_what_else_a_message_has_reaches_the_template(run: Run, tmp_path: Path, lines: Any) -> None:
    model = chat_model(tmp_path / "m", "{{ messages[0].name }}: {{ messages[0].content }}")
    path = lines({"messages": [{**ASK, "name": "Ann", "unused": None}]})
    assert asked(run("--target", model, "--prompt-file", path, *FEW))[0][0] == "Ann: Sum a list."


CHAT: dict[str, tuple[list[str], list[dict[str, str]] | None]] = {
    "nothing": ([], None),
    "chat": (["--chat"], [ASK]),
    "no-chat": (["--no-chat"], None),
    "system": (["--system", "Be brief."], [BRIEF, ASK]),
    "both": (["--chat", "--system", "Be brief."], [BRIEF, ASK]),
    "empty-system": (["--system", ""], [{"role": "system", "content": ""}, ASK]),
    "set": (["--set", "data.chat=on"], [ASK]),
    "set-system": (["--set", "data.system=Be brief."], [BRIEF, ASK]),
    "option-before-set": (["--set", "data.chat=on", "--no-chat"], None),
    "chat-before-set": (["--set", "data.chat=off", "--chat"], [ASK]),
    "system-before-set": (
        ["--set", "data.chat=off", "--system", "Be brief."],
        [BRIEF, ASK],
    ),
    "system-of-the-recipe-stays": (["--set", "data.system=Be brief.", "--chat"], [BRIEF, ASK]),
    "system-of-the-recipe-goes": (["--set", "data.system=Be brief.", "--no-chat"], None),
    "system-over-system": (
        ["--set", "data.system=No.", "--system", "Be brief."],
        [BRIEF, ASK],
    ),
}


@pytest.mark.parametrize("case", CHAT)
def test_options_and_recipe(case: str, run: Run, model: Path, tmp_path: Path) -> None:
    """The recipe's `chat` and `system` also apply to prompts given as options."""
    options, messages = CHAT[case]
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"target: {{model: {model}}}\ndata: {{path: demo:prompts, limit: 1}}\n")
    expected = plain(model, ASK["content"]) if messages is None else rendered(model, messages)
    path = tmp_path / "p.txt"
    path.write_text(ASK["content"])
    result = run(recipe, *options, "--prompt-file", path, *FEW)
    assert asked(result) == [expected]
    drops = case == "system-of-the-recipe-goes"
    assert ("warning: data.system has no effect with --no-chat\n" in result.err) is drops
    # The resolved recipe gives the same prompt again.
    again = tmp_path / "again.yaml"
    again.write_text(yaml.safe_dump(result.document["recipe"]))
    assert asked(run(again, *FEW)) == [expected]


def test_recipe_beats_the_default(run: Run, model: Path, lines: Any, tmp_path: Path) -> None:
    path = lines({"prompt": ASK["content"]}, {"messages": [SYSTEM, ASK]}, {"messages": [ASK]})
    recipe = tmp_path / "r.yaml"
    data = f"{{path: {path}, chat: auto, system: Be brief.}}"
    recipe.write_text(f"target: {{model: {model}}}\ndata: {data}\n")
    expected = [[BRIEF, ASK], [SYSTEM, ASK], [BRIEF, ASK]]
    assert asked(run(recipe, *FEW)) == [rendered(model, messages) for messages in expected]
    given = asked(run(recipe, "--prompt", ASK["content"], *FEW))
    assert given == [rendered(model, [BRIEF, ASK])]


def test_a_kept_conversation_runs_again(run: Run, model: Path, tmp_path: Path) -> None:
    options = ("--chat", "--system", "Be brief.", "-o", tmp_path / "run")
    result = run("--target", model, *options, *prompt_options(str(ASK["content"])), *FEW)
    again = run(tmp_path / "run" / "recipe.yaml", "--json")
    assert asked(result) == asked(again) == [rendered(model, [BRIEF, ASK])]


def test_chat_with_no_data_in_the_recipe(run: Run, model: Path) -> None:
    result = run("--target", model, "--chat", *prompt_options("one", "two"), *FEW)
    assert asked(result) == [
        rendered(model, [{"role": "user", "content": content}]) for content in ("one", "two")
    ]
    assert result.document["recipe"]["data"] is None


@pytest.mark.parametrize(
    ("data", "first"),
    [("{chat: on}", []), ("{system: Be brief.}", [BRIEF]), ("{chat: on, template: {a: 1}}", [])],
)
def test_a_recipe_of_the_chat_template_alone(
    data: str, first: list[Any], run: Run, model: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"target: {{model: {model}}}\nspeculation: {{method: none}}\ndata: {data}\n")
    result = run(recipe, *prompt_options("one"), *FEW)
    assert asked(result) == [rendered(model, [*first, {"role": "user", "content": "one"}])]
    nothing = run(recipe, *FEW)
    assert nothing.code == 2 and "no prompts" in nothing.document["error"]["message"]


def test_messages_through_a_pair(run: Run, model: Path) -> None:
    """The draft proposes from the same ids; the text is the target's."""
    texts = []
    for k in ("0", "3"):
        options = ("--chat", "--prompt", "Sum a list.", "-k", k, "--max-new-tokens", "12", "--json")
        result = run("--target", model, "--draft", "demo:draft", *options)
        texts.append(result.outputs[0]["token_ids"])
    assert texts[0] == texts[1]


def test_a_default_among_several_templates(run: Run, tmp_path: Path) -> None:
    several = [
        {"name": "rag", "template": "no"},
        {"name": "default", "template": CHAT_TEMPLATE},
    ]
    model = chat_model(tmp_path / "m", several)
    found = asked(run("--target", model, "--chat", "--prompt", "x", *FEW))
    assert found == [rendered(model, [{"role": "user", "content": "x"}])]


def test_terminal_shows_what_the_model_was_asked(model: Path) -> None:
    options = ("--target", model, "-k", "0", "--max-new-tokens", "2", "-q")
    result = on_terminal("generate", *options, "--chat", "--prompt", "Sum.", NO_COLOR="1")
    assert "<|endoftext|><|user|>\nSum.\n<|assistant|>\n" in result.out


def test_a_system_message_that_a_template_leaves_out(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    model = chat_model(tmp_path / "m", template)
    result = run("--target", model, "--system", "Be brief.", "--prompt", "x", *FEW)
    assert asked(result)[0][0] == "x"
    told = "--prompt: the chat template leaves the system message out"
    assert caplog.messages == [told]
    assert told in [warning["message"] for warning in result.document["warnings"]]


# What cannot be done


def refused(
    run: Run, code: int, message: str, *arguments: str | Path, hint: str | None = None
) -> None:
    """Check for one error line on stderr, as text and as one JSON document."""
    result = run(*arguments, "--max-new-tokens", "2")
    assert (result.code, result.out) == (code, ""), result.err
    error, *rest = result.err.splitlines()
    assert re.search(message, error), error
    assert all(line.startswith("hint: ") for line in rest) and len(rest) <= 1
    assert hint is None or (rest and hint in rest[0])
    as_json = run(*arguments, "--max-new-tokens", "2", "--json")
    assert (as_json.code, as_json.err) == (code, result.err)
    assert list(as_json.document) == ["error"]
    assert inert(f"error: {as_json.document['error']['message']}") == error


@pytest.mark.parametrize("model", ["demo:target", "without a tokenizer"])
def test_no_chat_template(model: str, run: Run, tmp_path: Path, lines: Any) -> None:
    path = lines({"prompt": "x"}, {"messages": [ASK]})
    options = ["--target", model]
    if model != "demo:target":
        (tmp_path / "config.json").write_bytes(
            Path("specdec_cli/demo/target/config.json").read_bytes()
        )
        options = ["--target", str(tmp_path), "--set", "target.load_format=dummy"]
    refused(run, 2, "p.jsonl:2: .* has no chat template", *options, "--prompt-file", path)
    hint = "a model tuned for chat"
    refused(run, 2, "^error: --prompt: .* has no", *options, "--chat", "--prompt", "x", hint=hint)


def test_contradictions(run: Run, model: Path, lines: Any, tmp_path: Path) -> None:
    to = ("--target", model)
    path = lines({"prompt": "x"}, {"messages": [ASK]})
    message = "p.jsonl:2: has messages, but the chat template is off"
    refused(run, 2, message, *to, "--no-chat", "--prompt-file", path, hint="--chat")
    refused(run, 2, "--no-chat and --system", *to, "--no-chat", "--system", "s", "--prompt", "x")
    path = lines({"prompt_token_ids": [1]})
    message = "p.jsonl:1: token ids cannot go through a chat template"
    refused(run, 2, message, *to, "--chat", "--prompt-file", path)
    recipe = tmp_path / "r.yaml"
    recipe.write_text("target: {model: t}\ndata:\n  path: p\n  system: s\n  chat: off\n")
    refused(run, 2, "r.yaml:4: data.system: needs the chat template", recipe, "--prompt", "x")
    refused(run, 2, "system message is not valid", *to, "--system", "\udcff", "--prompt", "x")


NO_SYSTEM = "{{ raise_exception('System role not supported') }}"
TEMPLATES: dict[str, tuple[object, int, str]] = {
    "refuses": ("{{ raise_exception('roles must\\nalternate') }}", 2, "refuses .*: roles must$"),
    "refuses-silently": ("{{ raise_exception('') }}", 2, "refuses these messages: TemplateError"),
    "syntax": ("\n{% for m in messages %}{{ m.content ", 5, "is damaged: line 2: "),
    "no-such-filter": ("{{ messages | frobnicate }}", 5, "is damaged: line 1: No filter"),
    "huge-range": ("{% for i in range(10**12) %}x{% endfor %}", 5, "fails: Range too big"),
    "endless": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        5,
        "does not end: no text after 0.3 seconds",
    ),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", 5, "fails: maximum recursion"),
    "missing": ("{{ messages[7].content.x }}", 5, "fails: list object has no element 7"),
    "undefined": ("{{ nothing() }}", 5, "fails: 'nothing' is undefined"),
    "types": ("{{ messages + 1 }}", 5, "fails: can only concatenate list"),
    "division": ("{{ 1 // 0 }}", 5, "fails: integer division or modulo by zero"),
    "sandbox": ("{{ ''.__class__.__mro__ }}", 5, "fails: access to attribute '__class__'"),
    "mutates": ("{{ messages.append(1) }}", 5, "fails: .*'append' of 'list' object is unsafe"),
    "includes": ("{% include 'x' %}", 5, "fails: no loader for this environment"),
    "nothing": ("{% if false %}x{% endif %}", 2, "template turns the messages into an empty text"),
    "surrogate": ("{{ '\\ud800' }}", 2, "--prompt: the chat template turns .* text that is not"),
    "no-default": ([{"name": "rag", "template": "x"}], 5, "fails: This model has multiple"),
    "escapes": ("{{ raise_exception('\x1b[31m[red]\\x07') }}", 2, r"messages: \\x1b\[31m\[red\]"),
    "empty": ("", 2, "has no chat template"),
    "number": (5, 5, "chat template|tokenizer"),
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_bad_templates(
    case: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template, code, message = TEMPLATES[case]
    monkeypatch.setattr(tokenizer_module, "TEMPLATE_SECONDS", 0.3)
    model = chat_model(tmp_path / "m", template)
    refused(run, code, message, "--target", model, "--chat", "--prompt", "x", "-k", "0")


def test_template_that_takes_no_system_message(run: Run, tmp_path: Path) -> None:
    template = f"{{% if messages[0].role == 'system' %}}{NO_SYSTEM}{{% endif %}}{CHAT_TEMPLATE}"
    to = ("--target", chat_model(tmp_path / "m", template), "--prompt", "x", "-k", "0")
    assert run(*to, "--chat", "--max-new-tokens", "1").code == 0
    message = "^error: --prompt: .* refuses these messages: System role not supported$"
    refused(run, 2, message, *to, "--system", "s", hint="put it into the first user message")


def test_rendered_prompt_may_be_too_long(run: Run, model: Path) -> None:
    options = ("--target", model, "--chat", "--prompt", "x", "--set", "cache.max_model_len=8")
    refused(run, 2, r"the prompt has \d+ tokens, but the model's context holds 8", *options)


def test_a_template_that_nobody_chose_is_told(run: Run, model: Path, lines: Any) -> None:
    """A model tuned for chat writes nonsense without it. `--no-chat` gives no warning."""
    path = lines({"prompt": "x = 1"}, {"messages": [ASK]}, {"prompt_token_ids": [310, 963]})

    def warnings(*arguments: str | Path) -> list[Any]:
        result = run(*arguments, *FEW)
        assert result.code == 0
        return [w for w in result.document["warnings"] if w["code"] == "no_chat_template"]

    (told,) = warnings("--target", model, "--prompt-file", path)
    assert "1 of 3 prompts do not use it: pass --chat" in told["message"]
    assert told["evidence"] == {"without": 1, "num_prompts": 3}
    texts = ("--prompt", "x = 1")
    assert warnings("--target", model, *texts, "--no-chat") == []
    assert warnings("--target", model, *texts, "--chat") == []
    assert warnings(*texts) == []  # the bundled pair has no template
    assert warnings("--target", model, "--prompt-file", lines({"messages": [ASK]})) == []


def test_later_turns_follow_the_targets_answers(run: Run, model: Path, tmp_path: Path) -> None:
    """Spec-Bench's harness does the same: it asks again after the model's own answer."""
    path, later = tmp_path / "question.jsonl", tmp_path / "second.jsonl"
    rows = [{"turns": ["a?", "b?"], "category": "stem"}, {"turns": ["c?"], "category": "qa"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asks = ("--target", model, "--prompt-file", path, "--next-turns", later)
    assert "pass --chat" in run(*asks, *FEW).err
    first = run(*asks, "--chat", *FEW)
    answer = first.outputs[0]["text"].strip()
    (second,) = run("--target", model, "--prompt-file", later, *FEW).outputs
    assert second["category"] == "stem" and f"{answer}\n<|user|>\nb?" in second["prompt"]
    assert "already exists" in run(*asks, "--chat", *FEW).err
    assert "no conversation has a further turn" in run("--prompt", "x", *asks[-2:], *FEW).err


def test_later_turns_go_through_the_template_that_is_named_for_them(
    run: Run, model: Path, lines: Any, tmp_path: Path
) -> None:
    """A row's own template stays with it."""
    for name in ("one", "two"):
        content = "{% for m in messages %}" + name + " {{ m.content }};{% endfor %}"
        (tmp_path / name).write_text(content)
    own = {"chat_template_kwargs": {"chat_template": (tmp_path / "two").read_text()}}
    for more, asked, want in (
        ({}, ("--chat-template", tmp_path / "one"), "two a?;"),
        ({}, ("--chat",), "two a?;"),
        (own, ("--chat",), "two a?;"),
    ):
        later = tmp_path / f"{len(list(tmp_path.iterdir()))}.jsonl"
        path = lines({"turns": ["a?", "b?"], **more})
        asks = ("--target", model, "--prompt-file", path, "--next-turns", later)
        assert run(*asks, *asked, *FEW).code == 0
        named = ("--chat-template", tmp_path / ("one" if more else "two"))
        (second,) = run("--target", model, "--prompt-file", later, *named, *FEW).outputs
        assert second["prompt"].startswith(want) and second["prompt"].endswith("two b?;")


def test_a_folder_for_later_turns_that_does_not_exist_is_missed_at_once(
    run: Run, model: Path, lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = ("--target", model, "--chat", "--prompt-file", lines({"turns": ["a?", "b?"]}))
    new = tmp_path / "new" / "run"
    inside = run(*asks, "-o", new, "--next-turns", new / "later.jsonl", *FEW)
    assert inside.code == 0 and (new / "later.jsonl").is_file(), "the run makes its own folder"
    monkeypatch.setattr("specdec_cli.backends.native.build", None)
    for output in ((), ("-o", tmp_path / "run")):
        later = tmp_path / "none" / "later.jsonl"
        result = run(*asks, "--next-turns", later, *output, *FEW)
        assert result.code == 2 and not (tmp_path / "run").exists()
        assert f"--next-turns: there is no folder {later.parent}" in result.err
    if Path("/proc/self").is_dir():  # not even root can write there
        result = run(*asks, "--next-turns", "/proc/self/later.jsonl", *FEW)
        assert result.code == 5 and "cannot write /proc/self/later.jsonl: " in result.err


def test_later_turns_that_cannot_be_written_lose_no_results(
    run: Run, model: Path, lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later, folder = tmp_path / "later.jsonl", tmp_path / "run"
    asks = ("--target", model, "--chat", "--prompt-file", lines({"turns": ["a?", "b?"]}))
    asks += ("-o", folder, "--next-turns", later, *FEW)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(generate_run, "replace_file", full)
        failed = run(*asks)
    assert failed.code == 5 and f"cannot write {later}: No space left" in failed.err
    assert list(failed.document) == ["error"]
    kept = json.loads((folder / "summary.json").read_text())
    assert kept["outputs"][0]["token_ids"] and (folder / "points.jsonl").is_file()
    monkeypatch.setattr("specdec_cli.backends.native.build", None)  # nothing is left to run
    again = run(*asks, "--resume")
    assert again.code == 0 and again.outputs == kept["outputs"] and later.is_file()
