"""Turns prompts into conversations, by `data.chat` and `data.system`. Renders nothing."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from specdec_cli.errors import Notice, UsageError
from specdec_cli.prompts.records import NOT_UNICODE, SYSTEM_KEYS
from specdec_cli.prompts.types import Prompt
from specdec_cli.text import is_unicode

_NOTHING: Mapping[str, object] = {}


def as_conversations(
    prompts: Sequence[Prompt],
    chat: str,
    system: str | None = None,
    template: Mapping[str, object] = _NOTHING,
) -> list[Prompt]:
    """The prompts as they go to a model under `data.chat`, `data.system` and `data.template`.

    chat: `auto` leaves prompts as they are, `on` makes a conversation of each text, `off` refuses
    messages. system: opens every conversation that has no system message, and turns `auto` into
    `on`. A row's own system message opens its text, where that is no conversation. template: what
    every conversation's template gets; a row's own values count before. Raises `UsageError` for a
    prompt that does not fit the setting.
    """
    if system is not None and chat == "auto":
        chat = "on"
    if system is not None and not is_unicode(system):
        raise UsageError(f"the system message is {NOT_UNICODE}")
    return [_as_conversation(prompt, chat, system, template) for prompt in prompts]


def unused_keys(prompts: Sequence[Prompt]) -> list[Notice]:
    """A warning that names the rows' keys that have no effect, and counts the rows of each."""
    counts = Counter(key for prompt in prompts for key in dict.fromkeys(prompt.unused))
    if not counts:
        return []
    listed = ", ".join(f"{key} ({count} of {len(prompts)} rows)" for key, count in counts.items())
    return [Notice("unused_keys", f"these keys of the data have no effect: {listed}", dict(counts))]


def _as_conversation(
    prompt: Prompt, chat: str, system: str | None, template: Mapping[str, object]
) -> Prompt:
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
    system = system if own is None else own
    if system is not None and not any(m["role"] in ("system", "developer") for m in messages):
        messages = ({"role": "system", "content": system}, *messages)
    given = {**template, **prompt.template}
    return replace(prompt, text=None, messages=messages, system=None, template=given)
