"""Turns prompts into conversations, according to the recipe's `data.chat` and `data.system`.

Chat templates are rendered elsewhere.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from specdec_cli.errors import Notice, UsageError
from specdec_cli.prompts.records import MEDIA_KEYS, NOT_UNICODE, SYSTEM_KEYS
from specdec_cli.prompts.types import Prompt
from specdec_cli.text import in_lines, is_unicode, of_many

_log = logging.getLogger("specdec")
_NOTHING: Mapping[str, object] = {}


def as_conversations(
    prompts: Sequence[Prompt],
    chat: str,
    system: str | None = None,
    template: Mapping[str, object] = _NOTHING,
    *,
    skip_bad: bool = False,
) -> list[Prompt]:
    """Apply a recipe's `data.chat`, `data.system` and `data.template` to prompts.

    chat: `auto` leaves prompts as they are, `on` makes a conversation of each text, and `off`
        refuses prompts that are messages.
    system: a system message for every conversation without one; it turns `auto` into `on`. None
        adds no message.
    template: values for the chat template of every conversation. A row's own values take
        precedence.
    skip_bad: whether to leave out prompts that do not fit these settings, with a warning.

    If a prompt that is not a conversation has its own system message, the message is put before its
    text. Raises `UsageError` for prompts that do not fit, unless `skip_bad` is True and others fit.
    """
    if system is not None and chat == "auto":
        chat = "on"
    if system is not None and not is_unicode(system):
        raise UsageError(f"the system message is {NOT_UNICODE}")
    found, bad = list[Prompt](), list[UsageError]()
    for prompt in prompts:
        try:
            found.append(_as_conversation(prompt, chat, system, template))
        except UsageError as refused:
            bad.append(refused)
    refuse(bad, skip=skip_bad and bool(found))
    return found


def refuse(bad: Sequence[UsageError], *, skip: bool) -> None:
    """Raise a `UsageError` that names up to five bad prompts. With `skip`, only log a warning with
    their number."""
    told = [one.message for one in bad]
    if bad and not skip:
        raise UsageError(in_lines(told, "prompt"), bad[0].hint)
    if bad:
        _log.warning("skipped %s", of_many(told, "prompt"))


def unused_template(
    prompts: Sequence[Prompt], chat: str, of_chat: Mapping[str, object]
) -> list[Notice]:
    """Return a warning if settings of the chat template are given, but no prompt is a conversation.

    chat: the value of `data.chat`; nothing is said about plain text that the user chose (`off`).
    of_chat: the values of `data.template` and `data.chat_template`, by the names of these keys.
    """
    names = [f"data.{key}" for key, value in of_chat.items() if value]
    is_used = any(prompt.messages is not None for prompt in prompts)
    if not names or is_used or chat == "off":
        return []
    have = "has" if len(names) == 1 else "have"
    told = f"{' and '.join(names)} {have} no effect: no prompt is rendered with a template (--chat)"
    return [Notice("unread_by_template", told, dict.fromkeys(names, len(prompts)))]


def unused_keys(prompts: Sequence[Prompt]) -> list[Notice]:
    """Warn about keys of the rows that have no effect, with the number of rows for each key.
    Returns one notice or none.

    Raises `UsageError` if every row has images, video or audio, since every prompt would be
    incomplete.
    """
    counts = Counter(key for prompt in prompts for key in dict.fromkeys(prompt.unused))
    if not counts:
        return []
    if media := [key for key in MEDIA_KEYS if counts[key] == len(prompts)]:
        raise UsageError(
            f"all {len(prompts)} rows have {' and '.join(media)}, but models only read text",
            "leave the key out of the rows if their text is enough",
        )
    listed = ", ".join(f"{key} ({count} of {len(prompts)} rows)" for key, count in counts.items())
    told = f"these keys of the data have no effect: {listed}; docs/data.md lists the keys in use"
    return [Notice("unused_keys", told, dict(counts))]


def _as_conversation(
    prompt: Prompt, chat: str, system: str | None, template: Mapping[str, object]
) -> Prompt:
    if chat == "off" and prompt.messages is not None:
        raise UsageError(
            f"{prompt.where}: has messages, but the chat template is off",
            "pass --chat, or set data.chat to auto or on",
        )
    if chat == "on" and prompt.token_ids is not None:
        raise UsageError(
            f"{prompt.where}: token ids cannot go through a chat template",
            "give the text or the messages instead, or set data.chat to auto",
        )
    messages, text, own = prompt.messages, prompt.text, prompt.system
    if messages is None and chat == "on":
        messages = ({"role": "user", "content": text},)
    if messages is None:
        unused = [*prompt.unused, *prompt.template]
        if own is not None and text is not None:
            text = f"{own}\n\n{text}"
        elif own is not None:
            unused.append(SYSTEM_KEYS[0])
        return replace(prompt, text=text, system=None, template={}, unused=tuple(unused))
    given = {SYSTEM_KEYS[0]: own, "data.system": system}
    opening = next((m["content"] for m in messages if m["role"] in ("system", "developer")), None)
    if opening is None and (opening := system if own is None else own) is not None:
        messages = ({"role": "system", "content": opening}, *messages)
    switches = {**template, **prompt.template}
    found = replace(prompt, text=None, messages=messages, system=None, template=switches)
    overruled = [key for key, text in given.items() if text is not None and text != opening]
    overruled += [f"data.template.{key}" for key in template if template[key] != switches[key]]
    return replace(found, unused=(*prompt.unused, *overruled))
