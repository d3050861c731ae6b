"""Prompts from options, files and pipes.

Knows nothing of tokenizers, of what a chat template makes of messages, or of dataset hubs: a prompt
is text, the messages of a conversation, or token ids that somebody else made.
"""

import io
import json
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import BinaryIO, TextIO

from specdec_cli.errors import UsageError
from specdec_cli.text import is_unicode, shown

TEXT_KEYS = ("prompt", "text", "question", "instruction", "turns")  # the first present counts
MESSAGES_KEY = "messages"
IDS_KEY = "prompt_token_ids"
ROLES = ("system", "developer", "user", "assistant", "tool")
EXTENSIONS = (".txt", ".jsonl")
MAX_LINE_BYTES = 8 * 1024 * 1024

_MAX_SHOWN = 5
_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"
_NOT_UNICODE = "not valid Unicode text: half of a surrogate pair"
_ONE_OBJECT = 'a .jsonl file has one JSON object a line, such as {"prompt": "..."}'

# `role`, `content`, and what else the file has for a chat template to read.
Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: exactly one of `text`, `token_ids` and `messages` is there.

    Beside messages, `text` is what the model's chat template made of them. `index` counts over all
    prompts of a run; `where` is the file and line, for what is found wrong later.
    """

    index: int
    text: str | None
    token_ids: tuple[int, ...] | None = None
    category: str | None = None
    messages: tuple[Message, ...] | None = None
    where: str = field(default="", compare=False)


def read_prompts(
    prompts: Sequence[str], prompt_file: str | None, stdin: TextIO | BinaryIO | None
) -> list[Prompt]:
    """The prompts given as options, then those of the file.

    `stdin` is read when there are neither, or when the file is `-`; a terminal never is. Nothing
    anywhere gives an empty list. Bad prompts are a `UsageError` naming file, line and reason.
    """
    found = [_from_option(text) for text in prompts]
    if prompt_file is not None and prompt_file != "-":
        found += _read_file(prompt_file)
    elif prompt_file == "-" or not prompts:
        piped = _read_stdin(stdin)
        if prompt_file == "-" and not piped:
            raise UsageError("standard input: no prompts in it")
        found += piped
    return [replace(prompt, index=index) for index, prompt in enumerate(found)]


def as_conversations(
    prompts: Sequence[Prompt], chat: str, system: str | None = None
) -> list[Prompt]:
    """The prompts as they go to a model under `data.chat` and `data.system`.

    `auto` leaves them as they are; `on` makes a conversation of each text; `off` wants no messages.
    `system` opens every conversation that has no such message, and turns `auto` into `on`. Raises
    `UsageError` for a prompt that the setting does not fit.
    """
    if system is not None and chat == "auto":
        chat = "on"
    if system is not None and not is_unicode(system):
        raise UsageError(f"the system message is {_NOT_UNICODE}")
    return [_as_conversation(prompt, chat, system) for prompt in prompts]


def _as_conversation(prompt: Prompt, chat: str, system: str | None) -> Prompt:
    if chat == "off" and prompt.messages is not None:
        raise UsageError(
            f"{prompt.where}: has messages, and the chat template is off",
            "pass --chat, or set data.chat to auto or on",
        )
    if chat == "on" and prompt.token_ids is not None:
        raise UsageError(
            f"{prompt.where}: token ids cannot go through a chat template",
            "give the text or the messages instead, or set data.chat to auto",
        )
    messages = prompt.messages
    if messages is None and chat == "on":
        messages = ({"role": "user", "content": prompt.text},)
    if messages is None:
        return prompt
    if system is not None and not any(m["role"] in ("system", "developer") for m in messages):
        messages = ({"role": "system", "content": system}, *messages)
    return replace(prompt, text=None, messages=messages)


class _BadLine(Exception):
    """Why one line is no prompt."""


def _from_option(text: str) -> Prompt:
    try:
        return Prompt(0, _checked(text), where="--prompt")
    except _BadLine as bad:
        raise UsageError(f"--prompt: {bad}") from None


def _read_stdin(stream: TextIO | BinaryIO | None) -> list[Prompt]:
    """Lines like those of a .txt file, or of a .jsonl file when the first one opens an object."""
    if stream is None or stream.closed or stream.isatty():
        return []
    try:
        raw = getattr(stream, "buffer", stream).read()
    except OSError:  # the terminal of a background job, or a stream that a test took away
        return []
    if isinstance(raw, str):
        raw = raw.encode("utf-8", "surrogateescape")
    if not raw:  # </dev/null, as batch systems have it: nothing was piped
        return []
    if raw.startswith(_GZIP_MAGIC):
        raise UsageError("standard input: is compressed with gzip", "unpack it first: gunzip -c")
    is_jsonl = raw.removeprefix(_BOM).lstrip().startswith(b"{")
    return _read_lines(io.BytesIO(raw), "standard input", is_jsonl=is_jsonl)


def _read_file(name: str) -> list[Prompt]:
    try:
        path = Path(name)
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise UsageError(f"{name}: is a directory, not a prompt file")
        if not stat.S_ISREG(mode):  # opening a pipe could wait for ever
            raise UsageError(
                f"{name}: not a regular file", "pipe prompts into standard input instead"
            )
        with path.open("rb") as file:
            if file.read(2) == _GZIP_MAGIC:
                raise UsageError(f"{name}: is compressed with gzip", "unpack it first: gunzip")
            file.seek(0)
            extension = path.suffix.lower()
            if extension not in EXTENSIONS:
                raise UsageError(
                    f"{name}: unknown extension {extension or '(none)'!r}",
                    "known are .txt (a prompt a line) and .jsonl (an object a line)",
                )
            return _read_lines(file, name, is_jsonl=extension == ".jsonl")
    except FileNotFoundError:
        raise UsageError(f"{name}: no such prompt file") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not a path"
        raise UsageError(f"{name!r}: cannot be read: {why}") from None


def _read_lines(file: BinaryIO, name: str, *, is_jsonl: bool) -> list[Prompt]:
    found: list[Prompt] = []
    bad: list[str] = []
    for number, raw in _numbered_lines(file):
        try:
            line = _decoded(raw)
            if line.strip():
                prompt = _parse_object(line) if is_jsonl else Prompt(0, _checked(line))
                found.append(replace(prompt, where=f"{name}:{number}"))
        except _BadLine as reason:
            bad.append(f"{name}:{number}: {reason}")
    if len(bad) > _MAX_SHOWN:
        bad[_MAX_SHOWN:] = [f"{name}: and {len(bad) - _MAX_SHOWN} more bad lines"]
    if bad:
        raise UsageError("\n".join(bad), _ONE_OBJECT if is_jsonl else None)
    if not found:
        raise UsageError(f"{name}:1: no prompts in it")
    return found


def _numbered_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Lines from 1, without byte order mark; of one too long only enough to see that it is."""
    number = 0
    while raw := file.readline(MAX_LINE_BYTES + 1):
        number += 1
        rest = raw
        while not rest.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
            pass
        yield number, raw.removeprefix(_BOM) if number == 1 else raw


def _decoded(raw: bytes) -> str:
    if len(raw) > MAX_LINE_BYTES:
        raise _BadLine(f"longer than {MAX_LINE_BYTES // 2**20} MiB, not a prompt")
    if b"\0" in raw:
        raise _BadLine("holds a NUL byte: a binary file, or UTF-16?")
    try:
        return raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise _BadLine(f"not UTF-8 text (byte {error.start + 1} of the line)") from None


def _parse_object(line: str) -> Prompt:
    try:
        record = json.loads(line, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise _BadLine(f"not JSON: {what} at column {error.colno}") from None
    except RecursionError:
        raise _BadLine("not usable JSON: nested too deeply") from None
    except ValueError:  # an integer of thousands of digits
        raise _BadLine("not usable JSON: a number is too long") from None
    if not isinstance(record, dict):
        raise _BadLine('should be a JSON object, such as {"prompt": "..."}')
    category = _category(record)
    key = next((key for key in TEXT_KEYS if record.get(key) is not None), None)
    if key is not None:
        value = record[key]
        if key == "turns":
            value = value[0] if isinstance(value, list) and value else None
            key = "turns[0]"
        if not isinstance(value, str):
            raise _BadLine(f"{key} should be text")
        return Prompt(0, _checked(value, key), category=category)
    if record.get(MESSAGES_KEY) is not None:
        return Prompt(0, None, messages=_messages(record[MESSAGES_KEY]), category=category)
    if record.get(IDS_KEY) is not None:
        return Prompt(0, None, token_ids=_token_ids(record[IDS_KEY]), category=category)
    known = ", ".join((*TEXT_KEYS, MESSAGES_KEY, IDS_KEY))
    raise _BadLine(f"has no prompt: none of the keys {known}")


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """A JSON object; of a key given twice Python would keep the last without a word."""
    found: dict[str, object] = {}
    for key, value in pairs:
        if key in found:
            raise _BadLine(f"duplicate key {shown(key)}")
        found[key] = value
    return found


def _category(record: dict[str, object]) -> str | None:
    value = record.get("category")
    if value is not None and not isinstance(value, str):
        raise _BadLine("category should be text")
    if value is not None and not is_unicode(value):
        raise _BadLine(f"category is {_NOT_UNICODE}")
    return value


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise _BadLine(f"{MESSAGES_KEY} should be a list, not {shown(value)}")
    if not value:
        raise _BadLine(f"{MESSAGES_KEY} is empty")
    messages = tuple(_message(item, f"{MESSAGES_KEY}[{i}]") for i, item in enumerate(value))
    if messages[-1]["role"] == "assistant":
        raise _BadLine(f"the last of the {MESSAGES_KEY} is the assistant's: nothing to answer")
    return messages


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise _BadLine(f"{where} should be an object with role and content, not {shown(value)}")
    for key in ("role", "content"):
        if value.get(key) is None:
            raise _BadLine(f"{where} has no {key}")
        if not isinstance(value[key], str):
            raise _BadLine(f"{where}.{key} should be text, not {shown(value[key])}")
    role = value["role"]
    if role not in ROLES:
        close = get_close_matches(role.lower(), ROLES, n=1)
        guess = f" (did you mean {close[0]}?)" if close else ""
        known = f"{', '.join(ROLES[:-1])} or {ROLES[-1]}"
        raise _BadLine(f"{where}.role should be {known}, not {shown(role)}{guess}")
    if not is_unicode(value["content"]):
        raise _BadLine(f"{where}.content is {_NOT_UNICODE}")
    if role == "user" and not value["content"].strip():
        raise _BadLine(f"{where}.content is empty")
    return value


def _token_ids(value: object) -> tuple[int, ...]:
    # `type` and not isinstance: true and false are integers to Python.
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        raise _BadLine(f"{IDS_KEY} should be a list of non-negative whole numbers")
    if not value:
        raise _BadLine("empty prompt")
    return tuple(value)


def _checked(text: str, where: str = "") -> str:
    if not text.strip():
        what = "blank prompt: only white space" if text else "empty prompt"
        raise _BadLine(f"{what}{f' ({where})' if where else ''}")
    if not is_unicode(text):
        raise _BadLine(_NOT_UNICODE)
    return text
