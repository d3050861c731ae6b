"""`specdec generate` and chat templates: their switches, names, files and dates, and bad rows."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec_cli.app import main
from specdec_cli.commands import reading
from tests.cli.generate_helpers import CHAT_TEMPLATE, Run, chat_model

pytestmark = pytest.mark.usefixtures("small_demo")

FEW = ("-k", "0", "--max-new-tokens", "2", "--json")
ASK = {"role": "user", "content": "Sum a list."}
PARTS = [{"type": "text", "text": "Sum"}, {"type": "text", "text": "a list."}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}{% endif %}"
    + CHAT_TEMPLATE.replace("{{ bos_token }}", "")
    + "{% if enable_thinking is defined %}thinking {{ enable_thinking }}{% endif %}"
)
DATED = "\n  {%- if true %}{{ strftime_now('%d %b %Y, %H:%M') }}\n{% endif %}" + CHAT_TEMPLATE
OF_PARTS = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
OF_TEXTS = "{% for m in messages if m.content is string %}{{ m.content }}{% endfor %}"
ALTERNATE = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{{ m['content'] }}\n{% endfor %}"
)


def rendered(model: Path, messages: list[dict[str, Any]], **given: Any) -> str:
    """The text of the chat template, by transformers alone."""
    text: str = AutoTokenizer.from_pretrained(model).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False, **given
    )
    return text


def prompts(result: Any) -> list[str]:
    assert result.code == 0, result.err
    return [output["prompt"] for output in result.outputs]


def test_rows_give_their_template_tools_and_switches(run: Run, tmp_path: Path, lines: Any) -> None:
    model = chat_model(tmp_path / "m", TEMPLATE)
    rows: list[dict[str, Any]] = [
        {"tools": TOOLS},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {},
    ]
    path = lines(*({"messages": [ASK], **row} for row in rows))
    for options, usual in (
        ((), {}),
        (("--template", "enable_thinking=true"), {"enable_thinking": True}),
    ):
        found = prompts(run("--target", model, "--prompt-file", path, *options, *FEW))
        assert found == [
            rendered(model, [ASK], **usual, tools=TOOLS),
            rendered(model, [ASK], enable_thinking=False),
            rendered(model, [ASK], **usual),
        ]
    assert "[add]" in found[0] and "thinking False" in found[1]


def test_switches_of_a_recipe(run: Run, tmp_path: Path) -> None:
    model = chat_model(tmp_path / "m", TEMPLATE)
    recipe = tmp_path / "r.yaml"
    data = "{path: p.txt, chat: on, template: {enable_thinking: false, other: [1]}}"
    recipe.write_text(f"target: {{model: {model}}}\ndata: {data}\n")
    (tmp_path / "p.txt").write_text("Sum a list.\n")
    want = rendered(model, [ASK], enable_thinking=False)
    first = run(recipe, *FEW, "-o", tmp_path / "run")
    assert prompts(first) == [want]
    assert first.document["recipe"]["data"]["template"] == {"enable_thinking": False, "other": [1]}
    assert prompts(run(tmp_path / "run" / "recipe.yaml", "--json")) == [want]
    changed = run(recipe, "--set", "data.template.enable_thinking=maybe", *FEW)
    assert prompts(changed) == [rendered(model, [ASK], enable_thinking="maybe")]
    # A prompt that no file holds is kept with its switches.
    loose = ("--target", model, "--prompt", "Sum a list.", "--template", "enable_thinking=false")
    assert prompts(run(*loose, "-o", tmp_path / "loose", *FEW)) == [want]
    assert prompts(run(tmp_path / "loose" / "recipe.yaml", "--json")) == [want]


@pytest.mark.parametrize(
    ("template", "rows", "options", "told"),
    [
        (CHAT_TEMPLATE, [{"tools": TOOLS}, {}], (), {"tools": 1}),
        (CHAT_TEMPLATE, [{}, {}], ("--template", "enable_thinking=false"), {"enable_thinking": 2}),
        (CHAT_TEMPLATE, [{"chat_template_kwargs": {"a": 1}}], (), {"a": 1}),
        (CHAT_TEMPLATE, [{}], (), None),
        (TEMPLATE, [{"tools": TOOLS}], ("--template", "enable_thinking=false"), None),
        (TEMPLATE, [{"documents": [{"text": "x"}]}], (), {"documents": 1}),
    ],
)
def test_what_a_template_never_reads_is_told(
    template: str,
    rows: list[dict[str, Any]],
    options: tuple[str, ...],
    told: dict[str, int] | None,
    run: Run,
    tmp_path: Path,
    lines: Any,
) -> None:
    model = chat_model(tmp_path / "m", template)
    path = lines(*({"messages": [ASK], **row} for row in rows))
    result = run("--target", model, "--prompt-file", path, *options, *FEW)
    said = {w["code"]: w for w in result.document["warnings"]}.get("unread_by_template")
    assert (said and said["evidence"]) == told
    for name, count in (told or {}).items():
        assert f"{name} ({count} of {len(rows)} prompts)" in said["message"]


@pytest.mark.parametrize("text", ["{% for m in messages %}{{ m", "{{ nothing.at.all }}"])
def test_a_given_template_is_not_the_models(text: str, run: Run, tmp_path: Path) -> None:
    model = chat_model(tmp_path / "m")
    (tmp_path / "own.jinja").write_text(text)
    given = ("--chat-template", tmp_path / "own.jinja", "--prompt", "x")
    error = run("--target", model, *given, *FEW).document["error"]
    assert error["code"] == 2 and "the given chat template" in error["message"]
    assert str(model) not in error["message"]


def test_another_template(run: Run, tmp_path: Path) -> None:
    named = [{"name": "rag", "template": "rag: {{ messages[0].content }}"}]
    model = chat_model(tmp_path / "m", [*named, {"name": "default", "template": CHAT_TEMPLATE}])
    to = ("--target", model, "--prompt", "Sum a list.")
    assert prompts(run(*to, "--chat-template", "rag", *FEW)) == ["rag: Sum a list."]
    assert prompts(run(*to, "--chat", *FEW)) == [rendered(model, [ASK])]
    file = tmp_path / "own.jinja"
    file.write_text("own: {{ messages[0].content }}")
    own = run(*to, "--chat-template", file, "-o", tmp_path / "run", *FEW)
    assert prompts(own) == ["own: Sum a list."]
    file.unlink()
    assert prompts(run(tmp_path / "run" / "recipe.yaml", "--json")) == ["own: Sum a list."]
    # A base model has none of its own.
    file.write_text("own: {{ messages[0].content }}")
    base = ("--target", "demo:target", "--prompt", "Sum a list.", "--chat-template", file)
    assert prompts(run(*base, *FEW)) == ["own: Sum a list."]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--chat-template", "tool_use"), 'no chat template "tool_use"'),
        (("--template", "tokenize=true"), "tokenize is set by specdec"),
        (("--template", "messages=[]"), "messages is set by specdec"),
        (("--template", "thinking"), "--template: expected KEY=VALUE"),
        (("--template", "a=1", "--no-chat"), "--no-chat and --template exclude each other"),
        (("--chat-template", "x", "--no-chat"), "--no-chat and --chat-template exclude"),
        (("--set", "data.date=yesterday", "--chat"), "data.date: should be a date"),
    ],
)
def test_what_is_no_template(options: tuple[str, ...], told: str, run: Run, tmp_path: Path) -> None:
    model = chat_model(tmp_path / "m")
    (tmp_path / "p.txt").write_text("x\n")
    data = ("--dataset", tmp_path / "p.txt")
    result = run("--target", model, *data, *options, "--max-new-tokens", "2")
    assert result.code == 2 and told in result.err and "Traceback" not in result.err


def test_texts_in_parts(run: Run, tmp_path: Path, lines: Any) -> None:
    """A template of texts gets one text, also if it leaves out what is no text; one that takes
    parts gets them as they are, also if it leaves messages out."""
    messages = [{"role": "system", "content": PARTS[:1]}, {"role": "user", "content": PARTS}]
    path = lines({"messages": messages})
    for name, template, want in (
        ("text", CHAT_TEMPLATE, "Sum\na list."),
        ("strict", "{{ messages[1].content.strip() }}", "Sum\na list."),
        ("parts", OF_PARTS, "<Sum><Sum><a list.>"),
        ("lossy", OF_TEXTS, "SumSum\na"),
        ("first", OF_PARTS.replace("messages", "messages[1:]"), "<Sum><a list.>"),
    ):
        model = chat_model(tmp_path / name, template)
        (found,) = prompts(run("--target", model, "--prompt-file", path, *FEW))
        assert want in found and "'type'" not in found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the clock of the command."""

    def set_clock(moment: str) -> None:
        class Clock(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> datetime:
                return datetime.fromisoformat(moment)

        monkeypatch.setattr(reading, "datetime", Clock)

    return set_clock


def test_a_run_keeps_the_date_of_its_prompts(run: Run, tmp_path: Path, clock: Any) -> None:
    model = chat_model(tmp_path / "m", DATED)
    (tmp_path / "p.txt").write_text("a b\nc d\n")
    given = ("--target", model, "--chat", "--prompt-file", tmp_path / "p.txt", *FEW)
    to = ("-o", tmp_path / "run")
    clock("2026-01-31T23:59:00")
    first = run(*given, *to)
    assert all("31 Jan 2026, 23:59" in prompt for prompt in prompts(first))
    assert first.document["recipe"]["data"]["date"] == "2026-01-31T23:59:00"
    samples = tmp_path / "run" / "samples.jsonl"
    samples.write_text(samples.read_text().splitlines(True)[0])
    for file in ("summary.json", "points.jsonl"):
        (tmp_path / "run" / file).unlink()
    clock("2026-02-01T08:00:00")
    resumed = run(*given, *to, "--resume")
    assert [o["prompt_token_ids"] for o in resumed.outputs] == [
        o["prompt_token_ids"] for o in first.outputs
    ]
    recipe = tmp_path / "recipe.yaml"  # one of the user's, without a date
    recipe.write_text(f"target: {{model: {model}}}\n")
    again = run(recipe, *given[2:], *to, "--resume")
    assert prompts(again) == prompts(first)
    other = run(*given, "--set", "data.date=2020-01-01", *to, "--resume")
    assert other.code == 2 and "have the date 2026-01-31T23:59:00" in other.err
    fixed = run(*given, "--set", "data.date=2020-01-02")
    assert all("02 Jan 2020, 00:00" in prompt for prompt in prompts(fixed))
    # Without a template that writes it no recipe has a date.
    plain = run("--target", "demo:target", *given[3:], "-o", tmp_path / "plain")
    assert plain.document["recipe"]["data"]["date"] is None


def test_the_date_is_kept_if_any_prompt_has_it(run: Run, tmp_path: Path, clock: Any) -> None:
    template = "{% if messages[0].content == 'c d' %}{{ strftime_now('%d %b') }}{% endif %}"
    model = chat_model(tmp_path / "m", template + CHAT_TEMPLATE)
    (tmp_path / "p.txt").write_text("a b\nc d\n")
    given = ("--target", model, "--chat", "--prompt-file", tmp_path / "p.txt", *FEW)
    clock("2026-01-31T23:59:00")
    first = run(*given, "-o", tmp_path / "run")
    assert first.document["recipe"]["data"]["date"] == "2026-01-31T23:59:00"
    clock("2026-02-01T08:00:00")
    assert prompts(run(*given, "-o", tmp_path / "run", "--resume")) == prompts(first)


def test_the_date_is_the_clocks_own_format(run: Run, tmp_path: Path, clock: Any) -> None:
    """The macro writes what `strftime` does, and the text and the lines around it do not move."""
    formats = "%Y-%m-%d|%A %-d %B|%B %d, %Y|%I:%M %p|%H%M%S.%f|%j|%k%% %s%%%Y%%Y %_d%n%%"
    template = "\n\n  {% if true %}x{% endif %}\n{{ strftime_now(format='" + formats + "') }}"
    model = chat_model(tmp_path / "m", template)
    now = datetime.fromisoformat("2026-03-07T09:05:02")
    clock(now.isoformat())
    (found,) = prompts(run("--target", model, "--chat", "--prompt", "x", *FEW))
    plain = rendered(model, [ASK], chat_template=template[: template.index("{{")])
    assert found == plain + now.strftime(formats)
    file = tmp_path / "own.jinja"
    file.write_text("{{ strftime_now('%Y') }}\n{% endfr %}\n")
    result = run("--target", model, "--chat-template", file, "--prompt", "x", *FEW)
    assert "template is damaged: line 2: " in result.document["error"]["message"]


@pytest.mark.usefixtures("no_pictures")
def test_shards_of_two_days_are_merged(
    tmp_path: Path, clock: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = chat_model(tmp_path / "m", DATED)
    (tmp_path / "p.txt").write_text("a b\nc d\n")
    given = ["--target", str(model), "--method", "ngram", "--k", "0,1", "--chat", "-q", "--json"]
    given += ["--prompt-file", str(tmp_path / "p.txt"), "--max-new-tokens", "2", "--device", "cpu"]
    given += ["--set", "run.repeats=1", "--set", "run.warmup=0"]
    folders = []
    for shard, day in enumerate(("2026-01-31", "2026-02-01")):
        clock(f"{day}T10:00:00")
        folders.append(str(tmp_path / str(shard)))
        assert main(["sweep-k", *given, "--shard", f"{shard}/2", "-o", folders[-1]]) == 0
    capsys.readouterr()
    assert main(["merge", *folders, "-o", str(tmp_path / "whole"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    said = [w["message"] for w in document["warnings"] if w["code"] == "several_dates"]
    assert len(said) == 1 and "2026-01-31T10:00:00, 2026-02-01T10:00:00" in said[0]
    assert all(point["status"] == "ok" for point in document["points"])


def test_bad_prompts_may_be_skipped(
    run: Run, tmp_path: Path, lines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows that the template or the vocabulary refuses count as bad rows too."""
    model = chat_model(tmp_path / "m", ALTERNATE)
    twice = {"messages": [ASK, ASK]}
    path = lines(
        {"messages": [ASK]}, twice, {"prompt_token_ids": [5, 10**6]}, twice, {"prompt": "y"}
    )
    refused = run("--target", model, "--prompt-file", path, *FEW)
    assert refused.code == 2
    told = refused.document["error"]["message"].splitlines()
    assert [line.split(":")[1] for line in told] == ["2", "3", "4"]
    assert "roles must alternate" in told[0] and "token id 1000000" in told[1]
    caplog.clear()
    result = run("--target", model, "--prompt-file", path, "--skip-bad", *FEW)
    assert result.code == 0 and [o["index"] for o in result.outputs] == [0, 1]
    assert [o["prompt"] for o in result.outputs] == ["Sum a list.\n", "y"]
    (said,) = [m for m in caplog.messages if m.startswith("skipped")]
    assert said.startswith("skipped 3 bad prompts, the first of them:") and ":2: " in said
    many = run("--target", model, "--prompt-file", lines(*[twice] * 7), "--skip-bad", *FEW)
    assert many.code == 2 and "and 2 more bad prompts" in many.document["error"]["message"]


def test_prompts_on_which_the_template_fails_are_bad(run: Run, tmp_path: Path, lines: Any) -> None:
    """Templates often join texts, and call names of tools, that a row may lack."""
    joined = "{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}"
    tools = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    model = chat_model(tmp_path / "m", tools + joined)
    call = {"role": "assistant", "content": None, "tool_calls": TOOLS}
    ask = {"messages": [ASK]}
    path = lines(ask, {"messages": [ASK, call, ASK]}, {**ask, "tools": ["search"]}, ask)
    refused = run("--target", model, "--prompt-file", path, *FEW)
    told = refused.document["error"]["message"].splitlines()
    assert refused.code == 2 and [line.split(":")[1] for line in told] == ["2", "3"]
    assert all("m fails: " in line for line in told)
    result = run("--target", model, "--prompt-file", path, "--skip-bad", *FEW)
    assert prompts(result) == ["<Sum a list.>"] * 2
    given = ("--chat", "--prompt", "x", "--template", "tools=[1]")
    error = run("--target", model, *given, *FEW).document["error"]
    assert error["code"] == 2 and error["message"].startswith("--prompt: the chat template of ")


@pytest.mark.parametrize("has_template", [True, False])
def test_a_first_token_that_comes_twice(has_template: bool, run: Run, tmp_path: Path) -> None:
    model = chat_model(tmp_path / "m", CHAT_TEMPLATE)
    if not has_template:
        for file in model.glob("chat_template*"):
            file.unlink()
        config = json.loads((model / "tokenizer_config.json").read_text())
        config.pop("chat_template", None)
        (model / "tokenizer_config.json").write_text(json.dumps(config))
    first = "<|endoftext|>"
    given = ("--prompt", f"{first}<|user|>\nx", "--prompt", f"{first}{first}x", *FEW)
    result = run("--target", model, *given)
    assert all(o["prompt_token_ids"][:2] == [0, 0] for o in result.outputs)
    codes = {w["code"]: w["evidence"] for w in result.document["warnings"]}
    assert codes["first_token_twice"] == {"prompts": 2, "num_prompts": 2}
    assert "no_chat_template" not in codes
    mixed = run("--target", model, *given, "--prompt", "plain text")
    codes = {w["code"]: w["evidence"] for w in mixed.document["warnings"]}
    assert codes["first_token_twice"]["prompts"] == 2
    assert ("no_chat_template" in codes) == has_template
    if has_template:
        assert codes["no_chat_template"] == {"without": 1, "num_prompts": 3}


def test_rendered_prompts_are_not_sent_to_a_template(run: Run, tmp_path: Path) -> None:
    """As those of models that write no first token, such as Qwen's, begin with `<|im_start|>`."""
    model = chat_model(tmp_path / "m", CHAT_TEMPLATE)
    settings = json.loads((model / "tokenizer.json").read_text())
    (model / "tokenizer.json").write_text(json.dumps({**settings, "post_processor": None}))
    for text, is_told in (("<|endoftext|>user x", False), ("see <|endoftext|>", True)):
        result = run("--target", model, "--prompt", text, *FEW)
        codes = [w["code"] for w in result.document["warnings"]]
        assert ("no_chat_template" in codes, "first_token_twice" in codes) == (is_told, False)


def test_unused_keys_are_told(run: Run, tmp_path: Path, lines: Any) -> None:
    path = lines({"prompt": "x", "image": "a.png"}, {"prompt": "y"})
    result = run("--target", "demo:target", "--prompt-file", path, *FEW)
    told = [w["message"] for w in result.document["warnings"] if w["code"] == "unused_keys"]
    assert told == [
        "these keys of the data have no effect: image (1 of 2 rows); docs/data.md lists the keys "
        "in use"
    ]
