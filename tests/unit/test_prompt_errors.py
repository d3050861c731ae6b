"""Malformed prompt files, through `main`: exit 2, file and line named, never a traceback."""

# ruff: noqa: E501 (a table of one case a line)

import gzip
import io
import json
import os
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_cli.app import main
from specdec_cli.prompts import MAX_LINE_BYTES, read_prompts

A = '{"prompt": "a"}\n'
USER = '{"role": "user", "content": "a"}'
SAID = '{"role": "assistant", "content": "b"}'


def zipped() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("p.txt", "hello")
    return buffer.getvalue()


def messages(*items: str) -> str:
    return f'{A}{{"messages": [{", ".join(items)}]}}\n'


# The file's content, the line that the message must name (0 for none), and words it must have.
TEXT: dict[str, tuple[str | bytes, int, str]] = {
    "empty": ("", 1, "no prompts in it"),
    "only-blank": ("\n  \n\t\r\n", 1, "no prompts in it"),
    "only-bom": (b"\xef\xbb\xbf", 1, "no prompts in it"),
    "only-spaces-of-unicode": ("\u3000\u2003\n\xa0\n", 1, "no prompts in it"),
    "nul": (b"good\nb\0d\n", 2, "holds a NUL byte"),
    "utf16": ("good\n".encode("utf-16"), 1, "holds a NUL byte: a binary file, or UTF-16?"),
    "utf16-without-mark": ("good\n".encode("utf-16-le"), 1, "holds a NUL byte"),
    "utf16-chinese": ("你好".encode("utf-16"), 1, "not UTF-8 text (byte 1 of the line)"),
    "utf32": ("good\n".encode("utf-32"), 1, "holds a NUL byte"),
    "latin-1": (b"good\ncaf\xe9\n", 2, "not UTF-8 text (byte 4 of the line)"),
    "surrogate-bytes": (b"good\n\xed\xa0\x80\n", 2, "not UTF-8 text (byte 1 of the line)"),
    "overlong": (b"good\n\xc0\xaf\n", 2, "not UTF-8 text"),
    "cut-character": ("good\ncaf\u00e9".encode()[:-1], 2, "not UTF-8 text (byte 4 of the line)"),
    "long-line": (b"good\n" + b"x" * (10 * 2**20) + b"\ngood", 2, "longer than 8 MiB"),
    "long-last-line": (b"x" * (MAX_LINE_BYTES + 1), 1, "longer than 8 MiB"),
    "gzip": (gzip.compress(b"hello"), 0, "is compressed with gzip"),
    "zip": (zipped(), 1, "NUL byte"),
    "png": (b"\x89PNG\r\n\x1a\n\0\0", 1, "not UTF-8 text (byte 1 of the line)"),
}  # fmt: skip
JSONL: dict[str, tuple[str | bytes, int, str]] = {
    "empty": ("", 1, "no prompts in it"),
    "not-json": (A + "hello\n", 2, "not JSON: Expecting value at column 1"),
    "cut-short": ('{"prompt": "a', 1, "not JSON: Unterminated string"),
    "cut-after-colon": ('{"prompt":', 1, "not JSON: Expecting value"),
    "two-objects": ('{"prompt": "a"} {"prompt": "b"}', 1, "not JSON: Extra data"),
    "comma-after-object": ('{"prompt": "a"},\n', 1, "not JSON: Extra data"),
    "comma-in-object": ('{"prompt": "a",}\n', 1, "not JSON: "),
    "single-quotes": ("{'prompt': 'a'}\n", 1, "not JSON: Expecting property name enclosed in double quotes"),
    "python-none": ('{"prompt": None}\n', 1, "not JSON: Expecting value at column 12"),
    "a-comment": ("# mine\n" + A, 1, "not JSON"),
    "raw-newline": ('{"prompt": "a\nb"}\n', 1, "not JSON: Unterminated string"),
    "raw-tab": ('{"prompt": "a\tb"}\n', 1, "not JSON: Invalid control character at column 14"),
    "bad-escape": ('{"prompt": "C:\\users"}\n', 1, "not JSON: Invalid \\uXXXX escape"),
    "bom-of-the-second-file": (A + "\ufeff" + A, 2, "not JSON"),
    "old-mac-lines": ('{"prompt": "a"}\r{"prompt": "b"}\r', 1, "not JSON: Extra data"),
    "pretty-printed": ('{\n  "prompt": "a"\n}\n', 1, "not JSON: "),
    "an-array-of-objects": ('[{"prompt": "a"}, {"prompt": "b"}]\n', 1, "should be a JSON object"),
    "an-array-over-lines": ('[\n{"prompt": "a"},\n{"prompt": "b"}\n]\n', 1, "not JSON"),
    "a-list": ('["a"]', 1, "should be a JSON object"),
    "a-string": ('"a"', 1, "should be a JSON object"),
    "null": (A + "null\n", 2, "should be a JSON object"),
    "mixed": (A + "5\n", 2, "should be a JSON object"),
    "csv": ("prompt,category\na,b\n", 1, "not JSON"),
    "yaml": ("prompt: a\n", 1, "not JSON"),
    "empty-object": (A + "{}\n", 2, "has no prompt: none of the keys prompt, question"),
    "no-key": ('{"promt": "a"}', 1, "has no prompt: none of the keys prompt, question, instruction"),
    "other-case": ('{"Prompt": "a"}', 1, "has no prompt"),
    "null-prompt": ('{"prompt": null}', 1, "has no prompt: prompt is null"),
    "null-prompts": ('{"question": null, "text": null}', 1, "has no prompt: question and text are null"),
    "duplicate-key": (A + '{"prompt": "a", "prompt": "b"}\n', 2, 'duplicate key "prompt"'),
    "duplicate-of-another": ('{"prompt": "a", "meta": {"x": 1, "x": 2}}', 1, 'duplicate key "x"'),
    "number": (A + '{"prompt": 5}', 2, "prompt should be text"),
    "bool": ('{"prompt": true}', 1, "prompt should be text"),
    "nan": ('{"prompt": NaN}', 1, "prompt should be text"),
    "list-prompt": ('{"text": [{"a": 1}]}', 1, "text[0] has no role"),
    "object-prompt": ('{"instruction": {"a": 1}}', 1, "instruction should be text"),
    "first-key-counts": ('{"prompt": 5, "text": "a"}', 1, "prompt should be text"),
    "empty-prompt": ('{"prompt": ""}', 1, "empty prompt (prompt)"),
    "blank-prompt": (A + '{"question": " \\n\\t"}', 2, "blank prompt: only white space (question)"),
    "empty-turns": ('{"turns": []}', 1, "turns should be text, turns, messages"),
    "turns-number": ('{"turns": [1]}', 1, "turns should be text, turns, messages"),
    "turns-of-objects": ('{"turns": [{"content": "a"}]}', 1, "turns[0] has no role"),
    "turns-blank": ('{"turns": [" "]}', 1, "blank prompt"),
    "ids-text": ('{"prompt_token_ids": "1 2"}', 1, "prompt_token_ids should be a list of non-negative whole"),
    "ids-number": ('{"prompt_token_ids": 5}', 1, "prompt_token_ids should be a list"),
    "ids-negative": ('{"prompt_token_ids": [1, -2]}', 1, "prompt_token_ids should be a list"),
    "ids-bool": ('{"prompt_token_ids": [true]}', 1, "prompt_token_ids should be a list"),
    "ids-float": ('{"prompt_token_ids": [1.0]}', 1, "prompt_token_ids should be a list"),
    "ids-exponent": ('{"prompt_token_ids": [1e3]}', 1, "prompt_token_ids should be a list"),
    "ids-null": ('{"prompt_token_ids": [1, null]}', 1, "prompt_token_ids should be a list"),
    "ids-nested": ('{"prompt_token_ids": [[1, 2]]}', 1, "prompt_token_ids should be a list"),
    "ids-empty": ('{"prompt_token_ids": []}', 1, "empty prompt"),
    "category": ('{"prompt": "a", "category": {"a": 1}}', 1, "category should be text"),
    "category-nested": ('{"prompt": "a", "category": ["b", [1]]}', 1, "category should be text"),
    "category-surrogate": ('{"prompt": "a", "category": "\\udfff"}', 1, "category is not valid Unicode"),
    "surrogate": ('{"prompt": "\\ud800"}', 1, "not valid Unicode text: half of a surrogate pair"),
    "surrogates-swapped": ('{"prompt": "\\udc00\\ud800"}', 1, "not valid Unicode"),
    "deep": ('{"prompt": ' + "[" * 100_000, 1, "not usable JSON: nested too deeply"),
    "deep-elsewhere": (A + '{"prompt": "a", "x": ' + '{"x":' * 50_000, 2, "nested too deeply"),
    "digits": ('{"prompt": ' + "9" * 5000 + "}", 1, "not usable JSON: a number is too long"),
    "nul": (b'{"prompt": "a"}\n\0', 2, "holds a NUL byte"),
    "invalid-utf8": (b'{"prompt": "\xff"}', 1, "not UTF-8"),
    "gzip": (gzip.compress(A.encode()), 0, "is compressed with gzip"),
    "long-line": (b'{"prompt": "' + b"x" * MAX_LINE_BYTES + b'"}', 1, "longer than 8 MiB"),
    "messages-text": ('{"messages": "hi"}', 1, 'messages should be a list, not "hi"'),
    "messages-object": (f'{{"messages": {USER}}}', 1, "messages should be a list, not {"),
    "messages-empty": (messages(), 2, "messages is empty"),
    "message-text": (messages('"hi"'), 2, 'messages[0] should be an object with role and content, not "hi"'),
    "message-null": (messages(USER, "null"), 2, "messages[1] should be an object"),
    "message-list": (messages(f"[{USER}]"), 2, "messages[0] should be an object"),
    "no-role": (messages('{"content": "a"}'), 2, "messages[0] has no role"),
    "sharegpt": (messages('{"value": "a"}'), 2, "messages[0] has no role"),
    "role-number": (messages(USER, '{"role": 1, "content": "a"}'), 2, "messages[1].role should be text, not 1"),
    "role-unknown": (messages('{"role": "human", "content": "a"}'), 2, 'role should be system, developer, user, assistant or tool, not "human"'),
    "role-near": (messages('{"role": "User", "content": "a"}'), 2, '"User" (did you mean user?)'),
    "role-twice": (messages('{"role": "user", "role": "system", "content": "a"}'), 2, 'duplicate key "role"'),
    "no-content": (messages('{"role": "user"}'), 2, "messages[0] has no content"),
    "content-null": (messages(USER, SAID, '{"role": "user", "content": null}'), 2, "messages[2] has no content"),
    "content-number": (messages('{"role": "user", "content": 5}'), 2, "messages[0].content should be text, not 5"),
    "content-image": (messages('{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}'), 2, 'messages[0].content[1] should have text, but is "image_url"'),
    "content-parts-of-text": (messages('{"role": "user", "content": ["a"]}'), 2, 'messages[0].content[0] should have text, but is "a"'),
    "content-parts-blank": (messages('{"role": "user", "content": [{"type": "text", "text": " "}]}'), 2, "messages[0].content is empty"),
    "call-without-calls": (messages(USER, '{"role": "assistant", "content": null, "tool_calls": []}', USER), 2, "messages[1] has no content"),
    "user-with-calls": (messages('{"role": "user", "tool_calls": [{}]}'), 2, "messages[0] has no content"),
    "tools-object": ('{"prompt": "a", "tools": {"name": "f"}}', 1, "tools should be a list, not {"),
    "tools-broken": ('{"prompt": "a", "tools": "[1"}', 1, "tools is not JSON"),
    "switches-list": ('{"prompt": "a", "chat_template_kwargs": [1]}', 1, "chat_template_kwargs should be an object, not [1]"),
    "system-surrogate": ('{"prompt": "a", "system": "\\ud800"}', 1, "not valid Unicode"),
    "batch-without-prompt": ('{"custom_id": "1", "body": {"model": "m"}}', 1, "has no prompt: none of the keys prompt"),
    "content-empty": (messages('{"role": "user", "content": ""}'), 2, "messages[0].content is empty"),
    "content-blank": (messages(USER, SAID, '{"role": "user", "content": " "}'), 2, "messages[2].content is empty"),
    "content-surrogate": (messages('{"role": "system", "content": "\\ud800"}', USER), 2, "messages[0].content is not valid Unicode"),
    "only-answers": (messages(SAID), 2, "the messages contain nothing for the assistant to answer"),
    "only-answers-after-system": (messages('{"role": "system", "content": "s"}', SAID, SAID), 2, "nothing for the assistant to answer"),
}  # fmt: skip
CASES = [(".txt", case) for case in TEXT] + [(".jsonl", case) for case in JSONL]

Capture = pytest.CaptureFixture[str]


def refused(capsys: Capture, name: str, line: int, words: str) -> None:
    """Check for exit 2 with a line that names place and reason, then the same as JSON."""
    arguments = ["generate", "--target", "/no/such/model", "--prompt-file", name]
    assert main(arguments) == 2
    plain = capsys.readouterr()
    assert plain.out == "" and "Traceback" not in plain.err
    where = f"{name}:{line}: " if line else f"{name}: "
    first = plain.err.splitlines()[0]
    assert first.startswith(f"error: {where}") and words in first, plain.err

    assert main([*arguments, "--json"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["error"]
    assert document["error"]["code"] == 2
    assert document["error"]["message"].startswith(where)


@pytest.mark.parametrize(("extension", "case"), CASES, ids=[e[1:] + "-" + c for e, c in CASES])
def test_malformed(extension: str, case: str, tmp_path: Path, capsys: Capture) -> None:
    content, line, words = (TEXT if extension == ".txt" else JSONL)[case]
    path = tmp_path / f"p{extension}"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    refused(capsys, str(path), line, words)


@pytest.mark.timeout(20)
def test_not_a_prompt_file(tmp_path: Path, capsys: Capture) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "p.csv").write_text("prompt\nhello\n")
    (tmp_path / "p.xlsx").write_bytes(b"PK")
    (tmp_path / "p.yaml").write_text("- a")
    (tmp_path / "p.parquet").write_bytes(b"PAR1")
    (tmp_path / "noextension").write_text("hello\n")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "p.txt.gz").write_bytes(gzip.compress(b"hello"))
    (tmp_path / "loop.txt").symlink_to("loop.txt")
    (tmp_path / "dangling.txt").symlink_to("nowhere")
    (tmp_path / "locked.txt").touch(mode=0)
    cases = {
        "pipe.txt": "not a regular file",
        "p.xlsx": "unknown extension '.xlsx'",
        "p.yaml": "unknown extension '.yaml'",
        "p.parquet": "cannot be read as parquet",
        "noextension": "unknown extension '(none)'",
        "folder.txt": "is a directory, not a prompt file",
        "p.txt.gz": "is compressed with gzip",
        "missing.txt": "no such prompt file",
        "dangling.txt": "no such prompt file",
    }
    for name, words in cases.items():
        refused(capsys, str(tmp_path / name), 0, words)
    refused(capsys, "/dev/zero", 0, "not a regular file")
    unreadable = ["loop.txt", "p.csv/below.txt", "a" * 300 + ".txt", "a\0b.txt"]
    if os.geteuid() != 0:
        unreadable.append("locked.txt")
    for name in unreadable:
        path = str(tmp_path / name)
        assert main(["generate", "--target", "/no/such/model", "--prompt-file", path]) == 2
        assert "cannot be read: " in capsys.readouterr().err


def test_bad_lines_are_listed_up_to_five(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(A + "x\n" * 9)
    assert main(["generate", "--target", "/no/such/model", "--prompt-file", str(path)]) == 2
    *lines, hint = capsys.readouterr().err.splitlines()
    assert [line.split(":")[2] for line in lines[:5]] == ["2", "3", "4", "5", "6"]
    assert lines[5:] == [f"error: {path}: and 4 more bad lines"]
    path.write_text(A + "x\n" * 6)
    assert main(["generate", "--target", "/no/such/model", "--prompt-file", str(path)]) == 2
    assert f"{path}: and 1 more bad line\n" in capsys.readouterr().err
    assert hint.startswith("hint: a .jsonl file has one JSON object per line")
    assert hint.endswith("; --skip-bad leaves such lines out")
    path.write_text("x\n" * 6)  # there would be nothing left
    assert main(["generate", "--target", "/no/such/model", "--prompt-file", str(path)]) == 2
    assert "--skip-bad" not in capsys.readouterr().err


def test_bad_prompt_options(capsys: Capture) -> None:
    cases = {
        "": "--prompt: empty prompt",
        " \n": "--prompt: blank prompt",
        "\udcff": "--prompt: not valid",
    }
    for text, words in cases.items():
        assert main(["generate", "--prompt", "good", "--prompt", text]) == 2
        assert capsys.readouterr().err.startswith(f"error: {words}")


# Generated files: for any content the error is a missing model (5), or names the place in the file
# that is wrong (2).

PIECES = [
    *'{}[]",:\\\n\r\t\0 ', '{"prompt": "', '"}\n', "\ufeff", "\u2028", "\\ud83d", "\\u0000", "\x1b[31m",
    '{"messages": [', USER, SAID, '"role"', "null", "NaN", "-1e999", "9" * 5000, "é", "\x85", "'",
    '{"prompt_token_ids": [1, 2]}\n', A, A[:-1], "[" * 2000,
]  # fmt: skip
GENERATED = settings(
    max_examples=120,  # scripts/proofs/hostile.py tries thousands
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
SCALARS = st.sampled_from(
    [None, True, 0, -1, 1.5, float("nan"), 2**70, "", " ", "hello", "\ud800", "\x1b[31m", "user"]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["user", "user", "system", "assistant", "usr", 5]),
        "content": st.sampled_from(["a", "a", "b\n", "", None, ["a"]]),
    }
)
RECORDS = st.one_of(
    st.fixed_dictionaries({"prompt": st.sampled_from(["a", "\x1b[31m", "\u202e"])}),
    st.fixed_dictionaries({"messages": st.lists(MESSAGE, min_size=1, max_size=3)}),
    st.fixed_dictionaries(
        {"prompt_token_ids": st.lists(st.integers(-1, 9), min_size=1, max_size=4)},
        optional={"category": SCALARS},
    ),
    st.dictionaries(
        st.sampled_from(["prompt", "text", "turns", "messages", "prompt_token_ids", "category"]),
        VALUES,
        max_size=3,
    ),
)


def check(path: Path, content: bytes, capsys: Capture) -> None:
    path.write_bytes(content)
    arguments = ["--target", "/no/such/model", "--prompt-file", str(path), "--json"]
    code = main(["generate", *arguments])
    captured = capsys.readouterr()
    error = json.loads(captured.out)["error"]
    assert captured.out.count("\n") == 1 and "Traceback" not in captured.err
    assert code == error["code"]
    if code == 5:
        assert error["message"].startswith("no such model folder")
        for prompt in read_prompts([], str(path), None):
            given = [prompt.text, prompt.token_ids, prompt.messages]
            assert sum(one is not None for one in given) == 1
            assert prompt.where.startswith(f"{path}:")
        return
    assert code == 2
    *first, last = error["message"].splitlines()
    for line in (*first, last)[:5]:
        number = int(line.removeprefix(f"{path}:").partition(":")[0])
        assert 1 <= number <= max(1, content.count(b"\n") + 1)


@GENERATED
@given(
    pieces=st.lists(st.sampled_from(PIECES), max_size=12),
    extension=st.sampled_from([".txt", ".jsonl"]),
)
def test_pieces(pieces: list[str], extension: str, tmp_path: Path, capsys: Capture) -> None:
    check(tmp_path / f"p{extension}", "".join(pieces).encode(), capsys)


@GENERATED
@given(records=st.lists(RECORDS, min_size=1, max_size=3))
def test_records(records: list[object], tmp_path: Path, capsys: Capture) -> None:
    content = "".join(f"{json.dumps(record)}\n" for record in records)
    check(tmp_path / "p.jsonl", content.encode(), capsys)
