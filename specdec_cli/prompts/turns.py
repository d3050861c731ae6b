"""Conversations of several turns in the data of others: Spec-Bench, MT-bench, ShareGPT.

Renders nothing and generates nothing.
"""

from collections.abc import Mapping

from specdec_cli.prompts.types import BadRow, Message, Prompt
from specdec_cli.text import shown

LATER_KEY = "later_turns"
_SPEAKERS = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant", "model"), "assistant"),
    "system": "system",
}
# The eight categories of MT-bench, which Spec-Bench's authors report as one of six subtasks.
_MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


class NoSuchTurn(Exception):
    """The conversation of a row has fewer turns than are asked for."""


def subtask(category: str | None) -> str | None:
    """The subtask of Spec-Bench that a category belongs to; other categories are their own."""
    return "mt_bench" if category in _MT_BENCH else category


def shared_conversation(value: object, turn: int) -> list[Message]:
    """The messages of a ShareGPT conversation up to the user's `turn`-th, from 1 on.

    Answers before it are those of the file. What stands before the first turn of the user, except a
    system message, is left out. Raises `BadRow`, and `NoSuchTurn`.
    """
    if not isinstance(value, list) or not value:
        raise BadRow("conversations should be a list of messages with from and value")
    found: list[Message] = []
    turns = 0
    for place, item in enumerate(value):
        where = f"conversations[{place}]"
        if not isinstance(item, Mapping) or not isinstance(item.get("from"), str):
            raise BadRow(f"{where} should be an object with from and value, not {shown(item)}")
        role = _SPEAKERS.get(str(item["from"]).lower())
        if role is None:
            raise BadRow(f"{where}.from should be human, gpt or system, not {shown(item['from'])}")
        turns += role == "user"
        if role != "assistant" or turns:
            found.append({"role": role, "content": item.get("value")})
        if turns == turn:
            return found
    raise NoSuchTurn


def later_turns(row: Mapping[str, object], turns: object) -> tuple[str, ...]:
    """The user's turns after the first of `turns`, or those that `next_turn` left in the row."""
    rest = turns[1:] if isinstance(turns, list) else row.get(LATER_KEY)
    if not isinstance(rest, list) or not all(isinstance(one, str) for one in rest):
        return ()
    return tuple(rest)


def next_turn(prompt: Prompt, answer: str) -> dict[str, object] | None:
    """The row of a file for the prompt's next turn, after the answer to this one; None without."""
    if not prompt.later or prompt.messages is None:
        return None
    asked, *rest = prompt.later
    said = [
        *prompt.messages,
        {"role": "assistant", "content": answer.strip()},
        {"role": "user", "content": asked},
    ]
    row: dict[str, object] = {"messages": said}
    if prompt.category is not None:
        row["category"] = prompt.category
    return row | ({LATER_KEY: rest} if rest else {})
