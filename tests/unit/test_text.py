"""Foreign text on a terminal."""

import json

import pytest

from specdec_cli.text import (
    digest,
    first_line,
    inert,
    inert_json,
    is_unicode,
    one_line,
    reason_of,
    shown,
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain é 日本 \t\n", "plain é 日本 \t\n"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("a\rb\x00\x7f\x9b", "a\\rb\\x00\\x7f\\x9b"),
        ("\u202eevil\ud800", "\\u202eevil\\ud800"),
        ("[red][/][link=x]<b>:smile:", "[red][/][link=x]<b>:smile:"),
        ("\x1b]8;;http://x\x1b\\a", "\\x1b]8;;http://x\\x1b\\a"),
        ("\x1b]52;c;eA==\x07", "\\x1b]52;c;eA==\\x07"),
        ("good\b\b\b\bevil", "good\\x08\\x08\\x08\\x08evil"),
        ("\x84\x85\x8d\x90\x9d", "\\x84\\x85\\x8d\\x90\\x9d"),
        ("\u061c\u200e\u2028\u2067\u2069\ufeff", "\\u061c\\u200e\\u2028\\u2067\\u2069\\ufeff"),
        ("\u200d👩\u200d💻", "\u200d👩\u200d💻"),  # a joiner is part of the writing
    ],
)
def test_inert(text: str, shown: str) -> None:
    assert inert(text) == shown


def test_inert_json_reads_back_equal() -> None:
    values = {"a\x9b": ["\u202e\ud83d\ude00é", "\x1b[31m\x7f\ufeff", "\\u202e"]}
    document = inert_json(json.dumps(values, ensure_ascii=False))
    assert json.loads(document) == json.loads(json.dumps(values))
    assert inert(document) == document and "é" in document


def test_one_line() -> None:
    assert one_line("a\nb\tc\u200b\x1b é") == "a\\nb\\tc\\u200b\\x1b é"
    assert one_line("x" * 81) == "x" * 80 + "…"


def test_shown_is_short() -> None:
    assert shown([1, "a", None]) == '[1, "a", null]'
    assert shown("x" * 99) == '"' + "x" * 38 + "…"


def test_is_unicode() -> None:
    assert is_unicode("é😀") and not is_unicode("a\ud800")


def test_a_reason_is_the_message_and_for_a_bare_key_the_type_too() -> None:
    assert reason_of(ValueError("\n one:\n two \nthree")) == "one: two"
    assert reason_of(KeyError("foo")) == "KeyError: 'foo'"
    assert reason_of(ValueError()) == "ValueError"
    assert len(reason_of(KeyError("x" * 300))) == len(reason_of(ValueError("x" * 300))) == 200


def test_first_line() -> None:
    assert first_line(ValueError("\n  one \ntwo")) == "one "
    assert first_line(ValueError("one\rtwo")) == "one"
    assert first_line(ValueError()) == first_line(ValueError(" \n")) == ""


def test_digests_are_those_in_run_folders() -> None:
    assert digest([[1, 2], [3]]) == "192f318fa6690229"
    assert digest(["a", None]) == "df14bf1df5b1b943"
    assert digest({"b": (1, 2), "a": {"y": 1, "x": None}}) == "8083169afea55476"
