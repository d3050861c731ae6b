"""Turns one row of a file or dataset into a prompt: chooses the column and checks its value.

Knows nothing of files, tokenizers or chat templates.
"""

import json
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from specdec_cli.prompts.turns import LATER_KEY, later_turns, shared_conversation
from specdec_cli.prompts.types import BadRow, Message, Prompt
from specdec_cli.text import is_unicode, one_line, shown

TEXT_KEYS = ("prompt", "text", "question", "instruction", "turns")  # the first present counts
MESSAGES_KEY = "messages"
IDS_KEY = "prompt_token_ids"
CATEGORY_KEY = "category"
CONVERSATION_KEY = "conversations"
PROMPT_KEYS = (*TEXT_KEYS, MESSAGES_KEY, IDS_KEY, CONVERSATION_KEY)
ROLES = ("system", "developer", "user", "assistant", "tool")
NOT_UNICODE = "not valid Unicode text: half of a surrogate pair"

_MAX_COLUMNS = 12


def jsonl_of(prompts: Iterable[Prompt]) -> str:
    """The text of a .jsonl file with these prompts, in the form that `prompt_of` reads."""
    lines = []
    for prompt in prompts:
        found: dict[str, object]
        if prompt.messages is not None:
            found = {MESSAGES_KEY: list(prompt.messages)}
        elif prompt.token_ids is not None:
            found = {IDS_KEY: prompt.token_ids}
        else:
            found = {TEXT_KEYS[0]: prompt.text}
        if prompt.category is not None:
            found[CATEGORY_KEY] = prompt.category
        if prompt.later:
            found[LATER_KEY] = list(prompt.later)
        lines.append(json.dumps(found) + "\n")
    return "".join(lines)


def prompt_of(row: object, column: str | None, turn: int = 1) -> Prompt:
    """The prompt that a row holds; the caller sets its index and place.

    row: text, or a record by column name. column: the column of the prompt; None takes the first of
    `PROMPT_KEYS` that the record has. The first of several turns is the prompt, and of a ShareGPT
    conversation the `turn`-th. Raises `BadRow`, and `NoSuchTurn` for one that is shorter.
    """
    if isinstance(row, str) and column is None:
        return Prompt(0, checked(row))
    if not isinstance(row, Mapping):
        raise BadRow('should be a JSON object, such as {"prompt": "..."}')
    category = category_of(row)
    if column is not None:
        return _named(row, column, category, turn)
    key = next((key for key in PROMPT_KEYS if row.get(key) is not None), None)
    if key is None:
        raise BadRow(f"has no prompt: none of the keys {', '.join(PROMPT_KEYS)}")
    value, later = row[key], later_turns(row, row[key] if key == "turns" else None)
    if key == MESSAGES_KEY:
        return Prompt(0, None, messages=_messages(value, key), category=category, later=later)
    if key == CONVERSATION_KEY:
        said = shared_conversation(value, turn)
        return Prompt(0, None, messages=_messages(said, key), category=category)
    if key == IDS_KEY:
        return Prompt(0, None, token_ids=_token_ids(value, key), category=category)
    if key == "turns":
        value = value[0] if isinstance(value, list) and value else None
        key = "turns[0]"
    if not isinstance(value, str):
        raise BadRow(f"{key} should be text")
    return Prompt(0, checked(value, key), category=category, later=later)


def _named(row: Mapping[str, object], column: str, category: str | None, turn: int) -> Prompt:
    """The prompt in a column that the user named; the value determines its kind."""
    if column not in row:
        raise BadRow(f"has no column {shown(column)}: {columns_in_words(tuple(row))}")
    value, key = row[column], one_line(column)
    if isinstance(value, list) and value:
        if isinstance(value[0], Mapping):
            if "from" in value[0]:
                value = shared_conversation(value, turn)
            return Prompt(0, None, messages=_messages(value, key), category=category)
        if type(value[0]) is int:
            return Prompt(0, None, token_ids=_token_ids(value, key), category=category)
        value, key = value[0], f"{key}[0]"
    if not isinstance(value, str):
        raise BadRow(f"{key} should be text, turns, messages or token ids, not {shown(value)}")
    return Prompt(0, checked(value, key), category=category)


def columns_in_words(columns: tuple[str, ...]) -> str:
    """A list of the columns for the end of a message."""
    if not columns:
        return "there is none"
    listed = ", ".join(map(one_line, columns[:_MAX_COLUMNS]))
    return f"there is {listed}{', ...' if len(columns) > _MAX_COLUMNS else ''}"


def checked(text: str, where: str = "") -> str:
    """The text of a prompt; raises `BadRow` if it is blank or not valid Unicode."""
    if not text.strip():
        what = "blank prompt: only white space" if text else "empty prompt"
        raise BadRow(f"{what}{f' ({where})' if where else ''}")
    if not is_unicode(text):
        raise BadRow(NOT_UNICODE)
    return text


def category_of(row: object) -> str | None:
    """The category of a row; raises `BadRow`, also for a row that cannot be read."""
    if isinstance(row, BadRow):
        raise row
    value = row.get(CATEGORY_KEY) if isinstance(row, Mapping) else None
    if type(value) is int:  # a class label
        return str(value)
    if value is not None and not isinstance(value, str):
        raise BadRow("category should be text")
    if value is not None and not is_unicode(value):
        raise BadRow(f"category is {NOT_UNICODE}")
    return value


def _messages(value: object, key: str) -> tuple[Message, ...]:
    if not isinstance(value, list):
        raise BadRow(f"{key} should be a list, not {shown(value)}")
    if not value:
        raise BadRow(f"{key} is empty")
    messages = tuple(_message(item, f"{key}[{i}]") for i, item in enumerate(value))
    if messages[-1]["role"] == "assistant":
        raise BadRow(f"the last of the {key} is the assistant's: nothing to answer")
    return messages


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise BadRow(f"{where} should be an object with role and content, not {shown(value)}")
    for key in ("role", "content"):
        if value.get(key) is None:
            raise BadRow(f"{where} has no {key}")
        if not isinstance(value[key], str):
            raise BadRow(f"{where}.{key} should be text, not {shown(value[key])}")
    role = value["role"]
    if role not in ROLES:
        close = get_close_matches(role.lower(), ROLES, n=1)
        guess = f" (did you mean {close[0]}?)" if close else ""
        known = f"{', '.join(ROLES[:-1])} or {ROLES[-1]}"
        raise BadRow(f"{where}.role should be {known}, not {shown(role)}{guess}")
    if not is_unicode(value["content"]):
        raise BadRow(f"{where}.content is {NOT_UNICODE}")
    if role == "user" and not value["content"].strip():
        raise BadRow(f"{where}.content is empty")
    return value


def _token_ids(value: object, key: str) -> tuple[int, ...]:
    # `type` and not isinstance: Python counts true and false as integers.
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        raise BadRow(f"{key} should be a list of non-negative whole numbers")
    if not value:
        raise BadRow("empty prompt")
    return tuple(value)
