"""Rows of data sets as people publish them: the prompt of each, and its keys without an effect."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.errors import UsageError
from specdec_cli.prompts import Prompt, as_conversations, jsonl_of, read_prompts, unused_keys
from specdec_cli.prompts.load import load_prompts
from specdec_cli.prompts.records import (
    CATEGORY_KEY,
    MEDIA_KEYS,
    MORE_KEYS,
    PROMPT_KEYS,
    SYSTEM_KEYS,
)
from specdec_cli.recipe import DataSection

ASK, ANSWER, AGAIN = (
    {"role": role, "content": text}
    for role, text in (("user", "Sum."), ("assistant", "sum(x)"), ("user", "And a dict?"))
)
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
RESULT = {"role": "tool", "content": "5"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
TOOL = {"type": "function", "function": {"name": "f"}}


def read(folder: Path, *rows: object, **keys: Any) -> list[Prompt]:
    path = folder / "p.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return load_prompts(DataSection.model_validate({"path": str(path), **keys})).prompts


# A row, and its prompt: the text, or the messages.
ROWS: dict[str, tuple[dict[str, Any], object]] = {
    "trl": ({"prompt": [SYSTEM, ASK], "completion": [ANSWER]}, [SYSTEM, ASK]),
    "trl-preference": ({"prompt": [ASK], "chosen": [ANSWER], "rejected": [ANSWER]}, [ASK]),
    "text-as-messages": ({"text": [ASK, ANSWER, AGAIN]}, [ASK, ANSWER, AGAIN]),
    "mt-bench": ({"prompt": ["one", "two"], "category": "writing"}, "one"),
    "ultrachat": ({"messages": [ASK, ANSWER, AGAIN, ANSWER]}, [ASK, ANSWER, AGAIN]),
    "two-answers": ({"messages": [SYSTEM, ASK, ANSWER, ANSWER]}, [SYSTEM, ASK]),
    "answer-after-a-tool": ({"messages": [ASK, CALL, RESULT, ANSWER]}, [ASK, CALL, RESULT]),
    "broken-answer": ({"messages": [ASK, {"role": "assistant", "content": None}]}, [ASK]),
    "call": ({"messages": [ASK, CALL, RESULT]}, [ASK, CALL, RESULT]),
    "call-without-content": (
        {"messages": [ASK, {k: v for k, v in CALL.items() if k != "content"}, RESULT]},
        [ASK, {k: v for k, v in CALL.items() if k != "content"}, RESULT],
    ),
    "parts": ({"messages": [PARTS]}, [PARTS]),
    "specforge": ({"id": "1", "conversations": [SYSTEM, ASK, ANSWER]}, [SYSTEM, ASK]),
    "specforge-call": (
        {"conversations": [ANSWER, RESULT, {**ASK, "name": "Ann"}]},
        [{**ASK, "name": "Ann"}],
    ),
    "sharegpt-as-messages": ({"messages": [{"from": "human", "value": "Sum."}]}, [ASK]),
    "batch": (
        {"custom_id": "7", "method": "POST", "url": "/v1", "body": {"messages": [ASK, ANSWER]}},
        [ASK],
    ),
    "batch-of-texts": ({"custom_id": "7", "body": {"prompt": "one"}}, "one"),
    "own-prompt-before-body": ({"prompt": "one", "body": {"prompt": "two"}}, "one"),
    "alpaca": ({"instruction": "Sum.", "input": "1 2", "output": "3"}, "Sum.\n\n1 2"),
    "alpaca-with-its-answer": (
        {"instruction": "Sum.", "input": "1 2", "output": "3", "text": "Sum. 1 2: 3"},
        "Sum.\n\n1 2",
    ),
    "question-of-a-text": ({"text": "Ann left.", "question": "Who left?"}, "Who left?"),
    "alpaca-without": ({"instruction": "Sum.", "input": "", "output": "3"}, "Sum."),
    "dolly": ({"instruction": "Sum.", "context": "1 2", "response": "3"}, "Sum.\n\n1 2"),
    "input-of-others": ({"text": "Sum.", "input": " ", "context": None, "choices": {}}, "Sum."),
}


@pytest.mark.parametrize("case", ROWS)
def test_the_prompt_of_a_row(case: str, tmp_path: Path) -> None:
    row, want = ROWS[case]
    (found,) = as_conversations(read(tmp_path, row), "auto")
    assert (list(found.messages) if found.messages else found.text) == want
    several = "alpaca-with-its-answer", "question-of-a-text"
    assert found.unused == (("text",) if case in several else ())
    # A run folder keeps it so that it is read again.
    assert as_conversations(read(tmp_path, json.loads(jsonl_of([found]))), "auto") == [found]


def test_the_later_turns_of_a_list() -> None:
    (found,) = read_prompts([], None, io.StringIO('{"prompt": ["one", "two", "three"]}'))
    assert (found.text, found.later) == ("one", ("two", "three"))


def test_conversations_with_roles_count_turns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    talk = [ANSWER, SYSTEM, ASK, CALL, RESULT, ANSWER, AGAIN, ANSWER]
    rows = {"conversations": talk}, {"conversations": talk[:5]}, {"conversations": []}
    (found,) = read(tmp_path, *rows, turn=2)
    assert list(found.messages or ()) == talk[1:7]
    assert "left out 2 conversations with fewer than 2 turns of the user" in caplog.text
    caplog.clear()
    assert len(read(tmp_path, *rows)) == 2
    assert "left out 1 conversation with no turn of the user" in caplog.text
    caplog.clear()
    assert len(read(tmp_path, *rows[:2])) == 2 and not caplog.text


@pytest.mark.parametrize(
    ("category", "want"),
    [(1, "1"), (2.5, "2.5"), (True, "True"), (["a", "b"], "a, b"), (["a", 3, None], "a, 3")],
)
def test_categories_of_any_kind(category: object, want: str, tmp_path: Path) -> None:
    (found,) = read(tmp_path, {"prompt": "x", "category": category})
    assert found.category == want


OPENED = {"role": "system", "content": "Be exact."}


@pytest.mark.parametrize("key", ["system", "system_prompt"])
def test_a_rows_system_message_comes_first(key: str, tmp_path: Path) -> None:
    rows = [{key: "Be brief.", **row} for row in ({"question": "Sum."}, {"messages": [ASK]})]
    rows += [{key: "Be brief.", "messages": [OPENED, ASK]}, {key: "", "question": "Sum."}]
    found = as_conversations(read(tmp_path, *rows), "on", "Be kind.")
    kind = {"role": "system", "content": "Be kind."}
    assert [list(p.messages or ()) for p in found] == [
        [SYSTEM, ASK],
        [SYSTEM, ASK],
        [OPENED, ASK],
        [kind, ASK],
    ]
    text, messages, *_ = as_conversations(read(tmp_path, *rows), "auto")
    assert text.text == "Be brief.\n\nSum." and list(messages.messages or ()) == [SYSTEM, ASK]
    (plain,) = as_conversations(read(tmp_path, rows[0]), "off")
    assert plain.text == "Be brief.\n\nSum."


def test_settings_that_rows_overrule_are_counted(tmp_path: Path) -> None:
    switches = {"chat_template_kwargs": {"enable_thinking": True, "date": 1}}
    rows: list[dict[str, Any]] = [
        {"messages": [OPENED, ASK], "system": "Be brief."},
        {"messages": [OPENED, ASK], "system_prompt": OPENED["content"], **switches},
        {"prompt": "Sum.", "system": "Be brief.", "system_prompt": "Be kind."},
        {"prompt": "Sum.", "system": 5, "system_prompt": "Be kind."},
        {"prompt": "Sum."},
    ]
    template = {"enable_thinking": False, "date": 1}
    found = as_conversations(read(tmp_path, *rows), "on", "Be kind.", template)
    assert [p.messages and p.messages[0]["content"] for p in found] == [
        *("Be exact.", "Be exact.", "Be brief.", "Be kind.", "Be kind.")
    ]
    (said,) = unused_keys(found)
    want = {"system": 2, "system_prompt": 1, "data.system": 3, "data.template.enable_thinking": 1}
    assert dict(said.evidence) == want
    assert "data.system (3 of 5 rows)" in said.message


def test_what_a_row_gives_its_template(tmp_path: Path) -> None:
    given = {"tools": [TOOL], "chat_template_kwargs": {"enable_thinking": False}}
    as_text = {key: json.dumps(value) for key, value in given.items()}  # as tables hold it
    rows = [{"messages": [ASK], **given}, {"messages": [ASK], **as_text}, {"messages": [ASK]}]
    found = as_conversations(read(tmp_path, *rows), "auto", None, {"enable_thinking": True, "a": 1})
    both = {"tools": [TOOL], "enable_thinking": False, "a": 1}
    assert [p.template for p in found] == [both, both, {"enable_thinking": True, "a": 1}]
    again = as_conversations(read(tmp_path, *map(json.loads, jsonl_of(found).splitlines())), "auto")
    assert again == found


def test_keys_without_an_effect_are_counted(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": "x", "image": "a.png", "tools": [TOOL]},
        {"prompt": "x", "images": [], "temperature": 0, "tools": None},
        {"messages": [ASK], "images": ["a.png"], "tools": [TOOL]},
        {"prompt_token_ids": [1, 2], "system": "Be brief."},
        {"prompt": "x", "system": 5},
        {"body": {"messages": [ASK], "temperature": 0.7, "max_tokens": 9}},
    ]
    (said,) = unused_keys(as_conversations(read(tmp_path, *rows), "auto"))
    assert said.code == "unused_keys"
    want = {"image": 1, "tools": 1, "temperature": 2, "images": 1, "system": 2, "max_tokens": 1}
    assert dict(said.evidence) == want
    assert "temperature (2 of 6 rows)" in said.message
    assert unused_keys(as_conversations(read(tmp_path, {"prompt": "x"}), "auto")) == []
    with pytest.raises(UsageError, match="all 2 rows have image,"):
        unused_keys(as_conversations(read(tmp_path, rows[0], rows[0]), "auto"))


@pytest.mark.parametrize(
    ("row", "told", "column"),
    [
        ({"question": "When?", "context": "In 1066.", "answers": ["1066"]}, ("context",), None),
        ({"question": "Which?", "choices": ["a", "b"], "answer": 1}, ("choices",), None),
        ({"question": "Is it?", "passage": "It is.", "answer": True}, ("passage",), None),
        ({"instruction": "Go on.", "input": "1", "history": [["a", "b"]]}, ("history",), None),
        ({"instruction": "Go on.", "input": "1", "context": "2"}, ("context",), None),
        ({"instruction": "Go on.", "input": ["1"]}, ("input",), None),
        ({"question": "Sum.", "input": "1 2"}, ("input",), None),
        ({"question": "Sum.", "input": "1 2"}, (), "input"),
        ({"question": [ASK], "function": [TOOL]}, ("function",), None),
        ({"messages": [ASK], "enable_thinking": False}, ("enable_thinking",), None),
        ({"prompt": "x", "suffix": "end", "n": 4}, ("n", "suffix"), None),
        ({"messages": [ASK], "extra_body": {"top_k": 5}, "model": "m"}, ("extra_body",), None),
        ({"question": "Who?", "article": "Ann left.", "id": "7"}, ("article",), None),
        ({"prompt": "Who?", "messages": [ASK, ANSWER], "prompt_id": "7"}, ("messages",), None),
        ({"prompt": "Who?", "messages": [ASK, ANSWER]}, (), "messages"),
        ({"instruction": "Sum.", "text": "Sum: 3", "turns": []}, ("text",), None),
        ({"prompt": "Who?", "image_url": "http://x/a.png"}, ("image_url",), None),
        (
            {"prompt": "Sum.", "output_len": 0, "output_tokens": 9},
            ("output_len", "output_tokens"),
            None,
        ),
    ],
)
def test_parts_of_a_question_that_are_left_out_are_told(
    row: dict[str, Any], told: tuple[str, ...], column: str | None, tmp_path: Path
) -> None:
    (found,) = read(tmp_path, row, column=column)
    assert found.unused == told


def test_the_key_column_lists_the_columns_in_their_order() -> None:
    told = (DataSection.model_fields["column"].description or "").partition("exists: ")[2]
    assert [word for word in re.findall("[a-z_]+", told) if word in PROMPT_KEYS] == [*PROMPT_KEYS]


def test_the_page_of_data_lists_the_keys_without_an_effect() -> None:
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text("utf-8")
    table = page.partition("(`unused_keys`)")[2].partition("(`unread_by_template`)")[0]
    plural = {f"{kind}s" for kind in ("image", "video", "audio")}
    listed = set(re.findall("`([a-z_]+)`", table)) | plural
    assert {*MORE_KEYS, *MEDIA_KEYS} - {CATEGORY_KEY, *SYSTEM_KEYS} - listed == set()


@pytest.mark.parametrize(
    "row", [{"conversation": [ASK], "model": "m"}, {"query": "Sum."}, {"body": {"input": "Sum."}}]
)
def test_a_row_without_a_known_key_says_which_it_has(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        read(tmp_path, row)
    inner = row.get("body", row)
    assert refused.value.message.endswith(f"it has {', '.join(inner)}")
    assert "data.column" in (refused.value.hint or "")
    if "body" not in row:
        (found,) = read(tmp_path, row, column=next(iter(row)))
        assert found.messages == (ASK,) or found.text == "Sum."


def test_columns_of_images_are_told_without_reading_them(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict(
        {
            "question": ["a", "b"],
            "image": ["x", "y"],
            "system_prompt": ["Be brief.", None],
            "options": [[], ["yes", "no"]],
        }
    )
    table.to_parquet(tmp_path / "t.parquet")
    found = load_prompts(DataSection(path=str(tmp_path / "t.parquet"))).prompts
    assert [(p.unused, p.system) for p in found] == [
        (("image",), "Be brief."),
        (("image", "options"), None),
    ]


@pytest.mark.parametrize(
    ("piped", "want"),
    [
        ('[{"prompt": "a"}, {"text": "b"}]', ["a", "b"]),
        ('\n[\n {"prompt": "a"}\n]\n', ["a"]),
        ('["a", "b"]', ["a", "b"]),
        ("[INST] a [/INST]\n[INST] b [/INST]", ["[INST] a [/INST]", "[INST] b [/INST]"]),
        ('["a"] is a list\n', ['["a"] is a list']),
        ("[[1]]\n", ["[[1]]"]),
    ],
)
def test_a_list_through_a_pipe(piped: str, want: list[str]) -> None:
    assert [p.text for p in read_prompts([], None, io.StringIO(piped))] == want


def test_a_damaged_list_through_a_pipe() -> None:
    with pytest.raises(UsageError, match="standard input:2: not JSON"):
        read_prompts([], None, io.StringIO('[{"prompt": "a"},\n{"prompt": ]'))
