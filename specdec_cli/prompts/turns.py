"""Reads multi-turn conversations in the formats of Spec-Bench, MT-bench and ShareGPT.

This module neither renders nor generates text.
"""

from collections.abc import Mapping
from dataclasses import replace

from specdec_cli.prompts.types import BadRow, Message, Prompt
from specdec_cli.text import shown

LATER_KEY = "later_turns"
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    **{role: role for role in ("system", "developer", "tool")},
}
# The eight categories of MT-bench. Spec-Bench reports them together, as one of its six subtasks.
_MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


class NoSuchTurn(Exception):
    """A row's conversation has fewer turns than requested."""


def subtask(category: str | None) -> str | None:
    """Return `mt_bench`, a subtask of Spec-Bench, for the categories of MT-bench. Other categories
    are returned unchanged."""
    return "mt_bench" if category in _MT_BENCH else category


def shared_conversation(value: object, turn: int) -> list[Message]:
    """Return the messages of a conversation up to the user's `turn`-th message, counted from 1.

    The conversation's items have `from` and `value`, as in ShareGPT, or `role` and `content`. The
    assistant's answers before that message are taken from the file. Messages before the user's
    first one are left out, except a system message. Raises `BadRow` for malformed items, and
    `NoSuchTurn` if the user has fewer messages.
    """
    if not isinstance(value, list):
        raise BadRow("conversations should be a list of messages with the keys `from` and `value`")
    found: list[Message] = []
    turns = 0
    for place, item in enumerate(value):
        where = f"conversations[{place}]"
        named = item.get("from", item.get("role")) if isinstance(item, Mapping) else None
        if not isinstance(named, str):
            raise BadRow(f"{where} should have the keys `from` and `value`, is {shown(item)}")
        role = _SPEAKERS.get(named.lower())
        if role is None:
            raise BadRow(f"{where}.from should be human, gpt or system, not {shown(named)}")
        turns += role == "user"
        if turns or role in ("system", "developer", "user"):
            own = {"content": item.get("value")} if "from" in item else item
            found.append({**own, "role": role})
        if turns == turn:
            return found
    raise NoSuchTurn


def next_turn(prompt: Prompt, answer: str) -> Prompt | None:
    """Make the prompt of the next turn: the messages so far, `answer`, and the user's next message.
    Returns None if there is no further turn."""
    if not prompt.later or prompt.messages is None:
        return None
    asked, *rest = prompt.later
    said = {"role": "assistant", "content": answer.strip()}, {"role": "user", "content": asked}
    return replace(prompt, text=None, messages=(*prompt.messages, *said), later=tuple(rest))
