"""Prompts from options, files and pipes, the malformed ones above all."""

import gzip
import io
import os
import sys
from pathlib import Path

import pytest

from specdec_cli.errors import UsageError
from specdec_cli.prompts import MAX_LINE_BYTES, Prompt, read_prompts


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
        b'{"text": "b", "question": "no"}\n{"prompt": null, "question": "c"}\n'
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


BAD_TEXT: dict[str, tuple[bytes, str]] = {
    "empty": (b"", ":1: no prompts in it"),
    "only-blank": (b"\n  \n\r\n", ":1: no prompts in it"),
    "only-bom": (b"\xef\xbb\xbf", ":1: no prompts in it"),
    "nul": (b"good\nb\0d\n", ":2: holds a NUL byte"),
    "utf16": ("good\n".encode("utf-16"), ":1: holds a NUL byte"),
    "latin-1": (b"good\ncaf\xe9\n", ":2: not UTF-8 text (byte 4 of the line)"),
    "long-line": (b"good\n" + b"x" * (10 * 2**20) + b"\ngood", ":2: longer than 8 MiB"),
    "long-last-line": (b"x" * (MAX_LINE_BYTES + 1), ":1: longer than 8 MiB"),
    "gzip": (gzip.compress(b"hello"), ": is compressed with gzip"),
}
BAD_JSONL: dict[str, tuple[bytes, str]] = {
    "empty": (b"", ":1: no prompts in it"),
    "not-json": (b'{"prompt": "a"}\nhello\n', ":2: not JSON"),
    "cut-short": (b'{"prompt": "a', ":1: not JSON: Unterminated string"),
    "two-objects": (b'{"prompt": "a"} {"prompt": "b"}', ":1: not JSON: Extra data"),
    "a-list": (b'["a"]', ":1: should be a JSON object"),
    "a-string": (b'"a"', ":1: should be a JSON object"),
    "no-key": (b'{"promt": "a"}', ":1: has no prompt: none of the keys prompt, text"),
    "only-messages": (b'{"messages": []}', ":1: has no prompt"),
    "number": (b'{"prompt": 5}', ":1: prompt should be text"),
    "list-prompt": (b'{"text": ["a"]}', ":1: text should be text"),
    "empty-prompt": (b'{"prompt": ""}', ":1: empty prompt (prompt)"),
    "empty-turns": (b'{"turns": []}', ":1: turns[0] should be text"),
    "turns-number": (b'{"turns": [1]}', ":1: turns[0] should be text"),
    "turns-text": (b'{"turns": "a"}', ":1: turns[0] should be text"),
    "ids-text": (b'{"prompt_token_ids": "1 2"}', ":1: prompt_token_ids should be a list"),
    "ids-negative": (b'{"prompt_token_ids": [1, -2]}', ":1: prompt_token_ids should be a list"),
    "ids-bool": (b'{"prompt_token_ids": [true]}', ":1: prompt_token_ids should be a list"),
    "ids-float": (b'{"prompt_token_ids": [1.0]}', ":1: prompt_token_ids should be a list"),
    "ids-empty": (b'{"prompt_token_ids": []}', ":1: empty prompt"),
    "category": (b'{"prompt": "a", "category": [1]}', ":1: category should be text"),
    "surrogate": (b'{"prompt": "\\ud800"}', ":1: not valid Unicode"),
    "deep": (b'{"prompt": ' + b"[" * 100_000, ":1: not usable JSON: nested too deeply"),
    "digits": (b'{"prompt": ' + b"9" * 5000 + b"}", ":1: not usable JSON: a number is too long"),
    "nul": (b'{"prompt": "a"}\n\0', ":2: holds a NUL byte"),
    "invalid-utf8": (b'{"prompt": "\xff"}', ":1: not UTF-8"),
    "long-line": (b'{"prompt": "' + b"x" * MAX_LINE_BYTES + b'"}', ":1: longer than 8 MiB"),
}


@pytest.mark.parametrize("case", BAD_TEXT)
def test_bad_text_files(case: str, tmp_path: Path) -> None:
    content, words = BAD_TEXT[case]
    with pytest.raises(UsageError) as caught:
        from_file(tmp_path / "p.txt", content)
    assert caught.value.message.startswith(f"{tmp_path / 'p.txt'}{words}")


@pytest.mark.parametrize("case", BAD_JSONL)
def test_bad_jsonl_files(case: str, tmp_path: Path) -> None:
    content, words = BAD_JSONL[case]
    with pytest.raises(UsageError) as caught:
        from_file(tmp_path / "p.jsonl", content)
    assert caught.value.message.startswith(f"{tmp_path / 'p.jsonl'}{words}")


def test_bad_lines_are_listed_up_to_five(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        from_file(tmp_path / "p.jsonl", b'{"prompt": "a"}\n' + b"x\n" * 9)
    lines = caught.value.message.splitlines()
    assert [line.split(":")[1] for line in lines[:5]] == ["2", "3", "4", "5", "6"]
    assert lines[5:] == [f"{tmp_path / 'p.jsonl'}: and 4 more bad lines"]


@pytest.mark.timeout(10)
def test_not_a_prompt_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "p.csv").write_text("prompt\nhello\n")
    (tmp_path / "noextension").write_text("hello\n")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "p.txt.gz").write_bytes(gzip.compress(b"hello"))
    for name, words in {
        "pipe.txt": "not a regular file",
        "p.csv": "unknown extension '.csv'",
        "noextension": "unknown extension '(none)'",
        "folder.txt": "is a directory",
        "p.txt.gz": "is compressed with gzip",
        "missing.txt": "no such prompt file",
        "a" * 300 + ".txt": "cannot be read",
        "a\0b.txt": "cannot be read",
    }.items():
        with pytest.raises(UsageError) as caught:
            read_prompts([], str(tmp_path / name), None)
        assert words in caught.value.message


def test_bad_prompt_options() -> None:
    for text, words in {"": "--prompt: empty prompt", "\udcff": "--prompt: not valid"}.items():
        with pytest.raises(UsageError, match=words):
            read_prompts(["good", text], None, None)
