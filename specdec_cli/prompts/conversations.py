"""Turns prompts into conversations, by `data.chat` and `data.system`. Renders nothing."""

from collections.abc import Sequence
from dataclasses import replace

from specdec_cli.errors import UsageError
from specdec_cli.prompts.records import NOT_UNICODE
from specdec_cli.prompts.types import Prompt
from specdec_cli.text import is_unicode


def as_conversations(
    prompts: Sequence[Prompt], chat: str, system: str | None = None
) -> list[Prompt]:
    """The prompts as they go to a model under `data.chat` and `data.system`.

    chat: `auto` leaves prompts as they are, `on` makes a conversation of each text, `off` refuses
    messages. system: opens every conversation that has no system message, and turns `auto` into
    `on`. Raises `UsageError` for a prompt that does not fit the setting.
    """
    if system is not None and chat == "auto":
        chat = "on"
    if system is not None and not is_unicode(system):
        raise UsageError(f"the system message is {NOT_UNICODE}")
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
