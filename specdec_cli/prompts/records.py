"""Turns one row of a file or dataset into a prompt: chooses the column and checks its value.

Files, tokenizers and chat templates are handled elsewhere.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches

from specdec_cli.prompts.turns import LATER_KEY, shared_conversation
from specdec_cli.prompts.types import BadRow, Message, Prompt
from specdec_cli.text import is_unicode, one_line, shown

# The first of these keys that a row has is used. `text` comes after `instruction`, because
# Alpaca's `text` also contains the answer.
TEXT_KEYS = ("prompt", "question", "instruction", "text", "turns")
MESSAGES_KEY = "messages"
IDS_KEY = "prompt_token_ids"
CATEGORY_KEY = "category"
CONVERSATION_KEY = "conversations"
BODY_KEY = "body"  # holds the request in lines of an OpenAI batch
PROMPT_KEYS = (*TEXT_KEYS, MESSAGES_KEY, IDS_KEY, CONVERSATION_KEY)
SWITCHES_KEY = "chat_template_kwargs"
TEMPLATE_KEYS = ("tools", "documents")  # arguments that transformers passes to chat templates
SYSTEM_KEYS = ("system", "system_prompt")
JOINED_KEYS = ("input", "context")  # keys next to `instruction` in rows of Alpaca and Dolly
MEDIA_KEYS = (
    *(f"{kind}{s}" for kind in ("image", "video", "audio") for s in ("", "s")),
    *("image_url", "image_path", "image_file"),
)
# Settings in rows that were written as requests to a server, such as OpenAI's batches. They have no
# effect here, and a warning says so.
_REQUEST_KEYS = (
    *("temperature", "top_p", "top_k", "stop", "seed", "max_tokens", "max_completion_tokens"),
    *("max_new_tokens", "output_len", "output_tokens", "response_format", "functions"),
    *("enable_thinking", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "typical_p"),
    *("logit_bias", "bad_words", "stop_token_ids", "ignore_eos", "min_tokens", "n", "best_of"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("json_schema", "regex", "tool_choice", "reasoning_effort", "thinking", "suffix"),
    *("add_special_tokens", "sampling_params", "parameters", "extra_body"),
)
# Keys that hold other parts of the question in some datasets, such as BoolQ, MMLU, MedQA,
# LLaMA-Factory, BFCL, QuALITY, HotpotQA, FeTaQA, SNLI and BIG-Bench Hard. They have no effect here
# either.
_PART_KEYS = (
    *("passage", "choices", "options", "history", "function", "article", "document", "passages"),
    *("paragraph", "story", "table", "premise", "hypothesis", "few_shot", "examples"),
)
_TOLD_KEYS = (*_REQUEST_KEYS, *JOINED_KEYS, *_PART_KEYS)
MORE_KEYS = (CATEGORY_KEY, SWITCHES_KEY, *TEMPLATE_KEYS, *SYSTEM_KEYS, *_TOLD_KEYS)
ROLES = ("system", "developer", "user", "assistant", "tool")
DATE_KEY = "strftime_now"  # key in `Prompt.template`: the current time for chat templates
_ANSWER = "assistant"
NOT_UNICODE = "not valid Unicode text: half of a surrogate pair"

_MAX_COLUMNS = 12


def jsonl_of(prompts: Iterable[Prompt]) -> str:
    """Return the text of a .jsonl file of prompts, in the form that `prompt_of` reads."""
    lines = []
    for prompt in prompts:
        found: dict[str, object]
        if prompt.messages is not None:
            found = {MESSAGES_KEY: list(prompt.messages)}
        elif prompt.token_ids is not None:
            found = {IDS_KEY: prompt.token_ids}
        else:
            found = {TEXT_KEYS[0]: prompt.text}
        given = dict(prompt.template)
        given.pop(DATE_KEY, None)
        found |= {key: given.pop(key) for key in TEMPLATE_KEYS if key in given}
        more = {SWITCHES_KEY: given, CATEGORY_KEY: prompt.category, LATER_KEY: list(prompt.later)}
        lines.append(json.dumps(found | {key: one for key, one in more.items() if one}) + "\n")
    return "".join(lines)


def prompt_of(row: object, column: str | None, turn: int = 1) -> Prompt:
    """Read the prompt in a row. The value's type decides whether it is text, messages or token ids.
    The caller has to set `index` and `where` of the result.

    row: text, or a record by column name. A line of an OpenAI batch has the record in its `body`.
    column: the column that holds the prompt; None takes the first of `PROMPT_KEYS` that the record
        has. If it holds a list of texts, the first text is the prompt, and the others are the
        user's later turns.
    turn: for a ShareGPT conversation, the number of the user's message, from 1, with which the
        prompt ends. It is 1 for other values.

    Raises `BadRow` if the row has no usable prompt, and `NoSuchTurn` if the conversation is too
    short.
    """
    if isinstance(row, str) and column is None:
        return Prompt(0, checked(row))
    if not isinstance(row, Mapping):
        raise BadRow('should be a JSON object, such as {"prompt": "..."}')
    category, key = category_of(row), column if column is not None else _key_of(row)
    if key is None and isinstance(inner := row.get(BODY_KEY), Mapping):
        row, key = inner, _key_of(inner)
    if key is None and (nulls := [name for name in PROMPT_KEYS if name in row]):
        raise BadRow(
            f"has no prompt: {' and '.join(nulls)} {'is' if len(nulls) == 1 else 'are'} null"
        )
    if key is None:
        known = f"none of the keys {', '.join(PROMPT_KEYS)}"
        raise BadRow(f"has no prompt: {known}; {columns_in_words(tuple(row))}")
    if key not in row:
        raise BadRow(f"has no column {shown(column)}: {columns_in_words(tuple(row))}")
    found = _of_value(row[key], key, turn)
    text, systems = found.text, {name: row[name] for name in SYSTEM_KEYS if row.get(name)}
    system = next((value for value in systems.values() if isinstance(value, str)), None)
    joined = ""
    if key == "instruction" and text is not None:
        joined = next((name for name in JOINED_KEYS if _is_given(row.get(name), str)), "")
    if joined:
        text = f"{text}\n\n{checked(str(row[joined]), 'beside the instruction')}"
    odd = [name for name, value in systems.items() if value != system]
    others = PROMPT_KEYS if column is None else ()
    told = (name for name in (*MEDIA_KEYS, *_TOLD_KEYS, *others) if name not in (key, joined))
    ignored = [name for name in told if _is_given(row.get(name))]
    return replace(
        found,
        text=text,
        category=category,
        later=found.later or _turns(row.get(LATER_KEY) or [], LATER_KEY),
        system=None if system is None else checked(system, "system message"),
        template=_template_of(row),
        unused=(*odd, *ignored),
    )


def _key_of(row: Mapping[str, object]) -> str | None:
    return next((key for key in PROMPT_KEYS if row.get(key) is not None), None)


def _is_given(value: object, kind: type = object) -> bool:
    """Return True if a value has this type and is not empty."""
    blank = isinstance(value, str) and not value.strip()
    return isinstance(value, kind) and not blank and value not in (None, [], {})


def _of_value(value: object, key: str, turn: int) -> Prompt:
    """Read the prompt from the value of a column."""
    name = one_line(key)
    if key == "turns" and isinstance(value, str) and value.lstrip().startswith("["):
        value = _parsed(value, name)
    first = value[0] if isinstance(value, list) and value else None
    if key == CONVERSATION_KEY or (isinstance(first, Mapping) and "from" in first):
        return Prompt(0, None, messages=_messages(shared_conversation(value, turn), name))
    if turn > 1:
        raise BadRow(f"{name} is no ShareGPT conversation, so data.turn cannot be {turn}")
    if key == MESSAGES_KEY or isinstance(first, Mapping):
        return Prompt(0, None, messages=_messages(value, name))
    if key == IDS_KEY or (type(first) is int and key != "turns"):
        return Prompt(0, None, token_ids=_token_ids(value, name))
    if isinstance(value, list) and isinstance(first, str):
        asked, *later = _turns(value, name)
        return Prompt(0, asked, later=tuple(later))
    if not isinstance(value, str):
        raise BadRow(f"{name} should be text, turns, messages or token ids, not {shown(value)}")
    return Prompt(0, checked(value, name))


def _turns(value: object, key: str) -> tuple[str, ...]:
    """Check a list of the user's turns, and return it. Raises `BadRow` if one is not a text."""
    if not isinstance(value, list):
        raise BadRow(f"{key} should be a list, not {shown(value)}")
    for place, one in enumerate(value):
        if not isinstance(one, str):
            raise BadRow(f"{key}[{place}] should be text, not {shown(one)}")
        checked(one, f"{key}[{place}]")
    return tuple(value)


def _template_of(row: Mapping[str, object]) -> dict[str, object]:
    """Read a row's values for the chat template, other than the messages. Rows of tables hold them
    as text, which is parsed as JSON."""
    found: dict[str, object] = {}
    for key in (SWITCHES_KEY, *TEMPLATE_KEYS):
        value, kind = row.get(key), dict if key == SWITCHES_KEY else list
        if isinstance(value, str) and value:
            value = _parsed(value, key)
        if value and not isinstance(value, kind):
            what = "an object" if kind is dict else "a list"
            raise BadRow(f"{key} should be {what}, not {shown(value)}")
        if value:
            found |= value if isinstance(value, dict) else {key: value}
    return found


def _parsed(text: str, key: str) -> object:
    """Parse the JSON in a cell of a table."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise BadRow(f"{key} is not JSON") from None


def columns_in_words(columns: tuple[str, ...]) -> str:
    """List the columns, for the end of a message."""
    if not columns:
        return "it has none"
    listed = ", ".join(map(one_line, columns[:_MAX_COLUMNS]))
    return f"it has {listed}{', ...' if len(columns) > _MAX_COLUMNS else ''}"


def checked(text: str, where: str = "") -> str:
    """Return the text of a prompt. Raises `BadRow` if it is blank or not valid Unicode."""
    if not text.strip():
        what = "blank prompt: only white space" if text else "empty prompt"
        raise BadRow(f"{what}{f' ({where})' if where else ''}")
    if not is_unicode(text):
        raise BadRow(NOT_UNICODE)
    return text


def category_of(row: object) -> str | None:
    """Return the category of a row; None if the row has none or an empty one. Raises `BadRow` if
    the category is not text, or if the row could not be read."""
    if isinstance(row, BadRow):
        raise row
    value = row.get(CATEGORY_KEY) if isinstance(row, Mapping) else None
    several = value if isinstance(value, list) else [value]
    if any(not isinstance(one, str | int | float | None) for one in several):
        raise BadRow("category should be text")
    text = ", ".join(str(one) for one in several if one is not None)
    if not is_unicode(text):
        raise BadRow(f"category is {NOT_UNICODE}")
    return text or None


def _messages(value: object, key: str) -> tuple[Message, ...]:
    """Check a list of messages, and return it without the assistant's messages at its end, because
    in datasets these are the answer. Raises `BadRow` if the list is not usable."""
    if not isinstance(value, list):
        raise BadRow(f"{key} should be a list, not {shown(value)}")
    if not value:
        raise BadRow(f"{key} is empty")
    asked = len(value)
    while asked and isinstance(last := value[asked - 1], Mapping) and last.get("role") == _ANSWER:
        asked -= 1
    roles = (one.get("role") if isinstance(one, Mapping) else None for one in value[:asked])
    if asked < len(value) and all(role == "system" for role in roles):
        raise BadRow(f"the {key} contain nothing for the assistant to answer")
    return tuple(_message(item, f"{key}[{i}]") for i, item in enumerate(value[:asked]))


def _message(value: object, where: str) -> Message:
    if not isinstance(value, dict):
        raise BadRow(f"{where} should be an object with role and content, not {shown(value)}")
    role, content = value.get("role"), value.get("content")
    is_call = role == _ANSWER and bool(value.get("tool_calls"))
    for key in ("role", "content"):
        if value.get(key) is None and not (is_call and key == "content"):
            raise BadRow(f"{where} has no {key}")
    if not isinstance(role, str):
        raise BadRow(f"{where}.role should be text, not {shown(role)}")
    if isinstance(content, list):
        content = "".join(_part(one, f"{where}.content[{i}]") for i, one in enumerate(content))
    elif not isinstance(content, str | None):
        raise BadRow(f"{where}.content should be text, not {shown(content)}")
    if role not in ROLES:
        close = get_close_matches(role.lower(), ROLES, n=1)
        guess = f" (did you mean {close[0]}?)" if close else ""
        known = f"{', '.join(ROLES[:-1])} or {ROLES[-1]}"
        raise BadRow(f"{where}.role should be {known}, not {shown(role)}{guess}")
    if content is not None and not is_unicode(content):
        raise BadRow(f"{where}.content is {NOT_UNICODE}")
    if role == "user" and not (content or "").strip():
        raise BadRow(f"{where}.content is empty")
    return value


def _part(value: object, where: str) -> str:
    """Return the text of one part of a message's content. Raises `BadRow` for images and other
    media."""
    text = value.get("text") if isinstance(value, Mapping) else None
    if not isinstance(text, str):
        kind = value.get("type") if isinstance(value, Mapping) else value
        raise BadRow(f"{where} should have text, but is {shown(kind)}")
    return text


def _token_ids(value: object, key: str) -> tuple[int, ...]:
    # Compare `type`, because `isinstance` counts True and False as integers.
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        raise BadRow(f"{key} should be a list of non-negative whole numbers")
    if not value:
        raise BadRow("empty prompt")
    return tuple(value)
