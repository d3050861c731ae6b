"""Prompts from options, files and pipes; malformed files are in `test_prompt_errors`."""

import gzip
import io
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from specdec_cli.errors import UsageError
from specdec_cli.prompts import Prompt, as_conversations, read_prompts


def from_file(path: Path, content: bytes) -> list[Prompt]:
    path.write_bytes(content)
    return read_prompts([], str(path), None)


def texts(prompts: list[Prompt]) -> list[str | None]:
    assert [prompt.index for prompt in prompts] == list(range(len(prompts)))
    return [prompt.text for prompt in prompts]


def test_text_file(tmp_path: Path) -> None:
    content = b"\xef\xbb\xbffirst \r\n\r\n   \n  second\xe2\x80\xa8half\nlast"
    assert texts(from_file(tmp_path / "p.txt", content)) == ["first ", "  second\u2028half", "last"]


def test_jsonl_file(tmp_path: Path) -> None:
    content = (
        b'\xef\xbb\xbf{"prompt": "a", "category": "c"}\r\n\n'
        b'{"text": "no", "question": "b"}\n{"prompt": null, "question": "c"}\n'
        b'{"instruction": "d"}\n{"turns": ["e", "later"]}\n{"prompt_token_ids": [0, 5]}\n'
        b'{"prompt_token_ids": [1], "prompt": "f"}'
    )
    prompts = from_file(tmp_path / "p.JSONL", content)
    assert texts(prompts) == ["a", "b", "c", "d", "e", None, "f"]
    assert prompts[0].category == "c" and prompts[1].category is None
    assert prompts[5].token_ids == (0, 5) and prompts[6].token_ids is None


def test_options_come_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("file\n")
    stdin = io.StringIO("never read")
    assert texts(read_prompts(["one", "two\n"], str(path), stdin)) == ["one", "two\n", "file"]
    assert texts(read_prompts(["one"], None, stdin)) == ["one"]
    assert stdin.read() == "never read"


def test_the_limit_counts_options_too(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("file\nmore\n")
    given = ["one", "two"]
    assert texts(read_prompts(given, str(path), None, limit=3)) == ["one", "two", "file"]
    assert texts(read_prompts(given, str(path), None, limit=2)) == given
    assert texts(read_prompts(given, None, None, limit=1)) == ["one"]
    with pytest.raises(UsageError, match="empty prompt"):
        read_prompts(["one", ""], None, None, limit=1)


@pytest.mark.parametrize(
    ("piped", "expected"),
    [
        ("one\ntwo\n", ["one", "two"]),
        ('{"prompt": "a"}\n{"text": "b"}\n', ["a", "b"]),
        ('\n  {"prompt": "a"}\n', ["a"]),
        ("[1]\n", ["[1]"]),
        ("", []),
    ],
)
def test_standard_input(piped: str, expected: list[str]) -> None:
    assert texts(read_prompts([], None, io.StringIO(piped))) == expected
    assert texts(read_prompts([], None, io.BytesIO(piped.encode()))) == expected
    assert texts(read_prompts([], None, io.TextIOWrapper(io.BytesIO(piped.encode())))) == expected


def test_no_prompts_anywhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert read_prompts([], None, None) == []
    assert read_prompts([], None, Terminal("waits for ever")) == []
    assert read_prompts([], None, sys.stdin) == []  # pytest's raises OSError when read
    with pytest.raises(UsageError, match="standard input: no prompts"):
        read_prompts([], "-", io.StringIO(""))


def test_every_prompt_knows_its_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('\n{"prompt": "a"}\n\n{"messages": [{"role": "user", "content": "b"}]}\n')
    found = read_prompts(["x"], str(path), None)
    assert [prompt.where for prompt in found] == ["--prompt", f"{path}:2", f"{path}:4"]
    (piped,) = read_prompts([], None, io.StringIO("\nb\n"))
    assert piped.where == "standard input:2"


def test_compressed_standard_input() -> None:
    with pytest.raises(UsageError, match="standard input: is compressed with gzip"):
        read_prompts([], None, io.BytesIO(gzip.compress(b"hello")))


# Conversations

USER = {"role": "user", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
TEXT = Prompt(0, "a", category="c")
ASKED = Prompt(1, None, messages=(USER,))
IDS = Prompt(2, None, token_ids=(1,))


def messages_of(chat: str, system: str | None, *prompts: Prompt) -> list[object]:
    return [prompt.messages for prompt in as_conversations(prompts, chat, system)]


def test_conversations() -> None:
    assert as_conversations([TEXT, ASKED, IDS], "auto") == [TEXT, ASKED, IDS]
    assert as_conversations([TEXT, IDS], "off") == [TEXT, IDS]
    (wrapped,) = as_conversations([TEXT], "on")
    assert wrapped == Prompt(0, None, category="c", messages=(USER,))
    assert messages_of("on", "s", TEXT, ASKED) == [(SYSTEM, USER)] * 2
    assert messages_of("auto", "s", TEXT) == [(SYSTEM, USER)]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_conversation_keeps_its_own_system_message(role: str) -> None:
    own = {"role": role, "content": "mine"}
    prompt = Prompt(0, None, messages=(own, USER))
    assert messages_of("on", "s", prompt) == [(own, USER)]


def test_conversations_that_cannot_be() -> None:
    for prompt, chat, words in [
        (ASKED, "off", "has messages, but the chat template is off"),
        (IDS, "on", "token ids cannot go through a chat template"),
    ]:
        with pytest.raises(UsageError, match=f"p.jsonl:3: {words}"):
            as_conversations([replace(prompt, where="p.jsonl:3")], chat)
    with pytest.raises(UsageError, match="token ids cannot"):
        as_conversations([IDS], "auto", "s")


def test_conversations_that_cannot_be_are_named_together_or_skipped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompts = [replace(IDS, where=f"p.jsonl:{line}") for line in range(7)]
    with pytest.raises(UsageError) as caught:
        as_conversations([TEXT, *prompts], "on")
    told = caught.value.message.splitlines()
    assert [line[:9] for line in told[:5]] == [f"p.jsonl:{line}" for line in range(5)]
    assert told[5:] == ["and 2 more bad prompts"]
    (kept,) = as_conversations([*prompts, TEXT], "on", skip_bad=True)
    assert kept.messages == (USER,) and "skipped 7 bad prompts" in caplog.text
    with pytest.raises(UsageError):  # nothing is left
        as_conversations(prompts, "on", skip_bad=True)
