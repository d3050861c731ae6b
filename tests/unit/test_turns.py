"""Spec-Bench's subtasks and later turns, and ShareGPT's conversations, read as data."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.errors import UsageError
from specdec_cli.prompts import Prompt, jsonl_of, load_prompts, next_turn
from specdec_cli.recipe import DataSection

MT_BENCH = "writing roleplay reasoning math coding extraction stem humanities".split()
OTHERS = "translation summarization qa math_reasoning rag".split()
TALK = [
    ("system", "Be brief."),
    ("gpt", "Hello."),
    ("human", "Sum a list."),
    ("gpt", "sum(x)"),
    ("human", "And a dict?"),
    ("gpt", "sum(x.values())"),
]


def prompts(path: Path, rows: list[Any], **keys: object) -> list[Prompt]:
    path.write_text(json.dumps(rows))
    return load_prompts(DataSection.model_validate({"path": str(path), **keys})).prompts


def shared(*said: tuple[str, str]) -> dict[str, object]:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in said]}


def test_the_subtasks_of_spec_bench(tmp_path: Path) -> None:
    rows = [
        {"question_id": i, "category": name, "turns": [f"{name}?", "Why?"][: 1 + (i < 8)]}
        for i, name in enumerate((*MT_BENCH, *OTHERS))
    ]
    own = prompts(tmp_path / "q.json", rows)
    assert [p.category for p in own] == [*MT_BENCH, *OTHERS]
    assert [p.later for p in own] == [("Why?",)] * 8 + [()] * 5
    joined = prompts(tmp_path / "q.json", rows, categories="spec_bench")
    assert [p.category for p in joined] == ["mt_bench"] * 8 + OTHERS
    even = prompts(tmp_path / "q.json", rows, categories="spec_bench", sample="stratified", limit=6)
    assert {p.category for p in even} == {"mt_bench", *OTHERS}


def test_the_next_turn_follows_the_answer(tmp_path: Path) -> None:
    asked = {"role": "user", "content": "One?"}
    first = Prompt(0, None, category="qa", messages=(asked,), later=("Two?", "Three?"))
    tools = [{"type": "function"}]
    first = replace(first, template={"tools": tools, "enable_thinking": False})
    found = next_turn(first, " 1\n")
    assert found is not None
    (second,) = prompts(tmp_path / "t.json", [json.loads(jsonl_of([found]))])
    assert second.template == first.template
    said = [(m["role"], m["content"]) for m in second.messages or ()]
    assert said == [("user", "One?"), ("assistant", "1"), ("user", "Two?")]
    assert (second.category, second.later) == ("qa", ("Three?",))
    last = next_turn(second, "2")
    assert last is not None
    (third,) = prompts(tmp_path / "t.json", [json.loads(jsonl_of([last]))])
    assert len(third.messages or ()) == 5 and next_turn(third, "3") is None


def test_shared_conversations(tmp_path: Path) -> None:
    def said(turn: int, *rows: object) -> list[list[tuple[object, object]]]:
        found = prompts(tmp_path / "s.json", list(rows), turn=turn)
        return [[(m["role"], m["content"]) for m in p.messages or ()] for p in found]

    opening = [("system", "Be brief."), ("user", "Sum a list.")]
    assert said(1, shared(*TALK)) == [opening]
    later = [*opening, ("assistant", "sum(x)"), ("user", "And a dict?")]
    assert said(2, shared(*TALK), shared(*TALK[:3])) == [later]
    with pytest.raises(UsageError, match="no conversation has 3 turns"):
        said(3, shared(*TALK))
    named = prompts(tmp_path / "s.json", [shared(*TALK)], column="conversations")
    assert [m["content"] for m in named[0].messages or ()] == ["Be brief.", "Sum a list."]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"conversations": "x"}, "conversations should be a list of messages"),
        ({"conversations": ["x"]}, r"conversations\[0\] should have the keys `from`"),
        (shared(("robot", "x")), "should be human, gpt or system"),
        (shared(("human", " ")), "content is empty"),
        ({"conversations": [{"from": "human", "value": 5}]}, "content should be text"),
        (shared(("gpt", "x")), "no conversation has 1 turns"),
        ({"conversations": []}, "no conversation has 1 turns"),
    ],
)
def test_what_is_no_conversation(row: object, told: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=told):
        prompts(tmp_path / "s.json", [row])


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "One?"}]},
        {"turns": ["One?", "Two?"]},
        {"dialog": [{"role": "user", "content": "One?"}]},
        {"prompt": "One?"},
        {"prompt_token_ids": [5]},
    ],
    ids=lambda row: next(iter(row)),
)
def test_other_rows_have_no_turn_to_choose(row: dict[str, Any], tmp_path: Path) -> None:
    (column,) = row
    assert len(prompts(tmp_path / "s.json", [row], column=column)) == 1
    with pytest.raises(UsageError, match=f":1: {column} is no ShareGPT .* data.turn cannot be 2"):
        prompts(tmp_path / "s.json", [row], column=column, turn=2)


@pytest.mark.parametrize("key", ["turns", "prompt", "later_turns"])
@pytest.mark.parametrize(
    ("turn", "told"), [("", "empty prompt"), (" ", "blank prompt"), (5, "should be text, not 5")]
)
def test_a_later_turn_without_text_is_a_bad_row(
    key: str, turn: object, told: str, tmp_path: Path
) -> None:
    row: dict[str, object] = {key: ["One?", "Two?", turn]}
    if key == "later_turns":
        row["prompt"] = "Zero?"
    with pytest.raises(UsageError, match=rf":1: .*{key}\[2\]") as caught:
        prompts(tmp_path / "s.json", [row])
    assert told in caught.value.message
