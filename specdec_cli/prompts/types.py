"""A prompt, and why something is none. Knows nothing of where prompts come from."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

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


class BadRow(Exception):
    """Why one line, row or item is no prompt."""


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one file, pipe or dataset, read as they are asked for.

    rows: each row's place (`prompts.jsonl:3`) and what it holds: text, a record by column name, or
    the `BadRow` that kept it from being read. columns: those that there are, where all rows have
    the same. hint: what to do about bad rows.
    """

    name: str
    rows: Iterable[tuple[str, object]]
    columns: tuple[str, ...] | None = None
    hint: str | None = None
