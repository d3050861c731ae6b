"""Data types: a prompt, the prompts of a run, rows and bad rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specdec_cli.errors import Notice
from specdec_cli.recipe import DataSection

# `role`, `content`, and any other key that a chat template may read.
Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, with exactly one of `text`, `token_ids` and `messages`.

    After rendering, `text` is the chat template's output for `messages`. `index` counts over all
    prompts of a run; `where` is the file and line, for later error messages. later: the user's
    turns after the answer to this prompt. system: the row's own system message, until
    `as_conversations` puts it first. template: values for the chat template besides the messages,
    by its names. unused: keys of the row that would change the answer but have no effect.
    """

    index: int
    text: str | None
    token_ids: tuple[int, ...] | None = None
    category: str | None = None
    messages: tuple[Message, ...] | None = None
    where: str = field(default="", compare=False)
    later: tuple[str, ...] = field(default=(), compare=False)
    system: str | None = None
    template: Mapping[str, object] = field(default_factory=dict)
    unused: tuple[str, ...] = field(default=(), compare=False)


class BadRow(Exception):
    """An error that says why one line, row or item is not a prompt."""


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one file, pipe or dataset, read lazily.

    rows: each row's place (`prompts.jsonl:3`) and its content: text, a record by column name, or
    the `BadRow` error from reading it. columns: the columns of a table; None without a table. hint:
    advice about bad rows.
    """

    name: str
    rows: Iterable[tuple[str, object]]
    columns: tuple[str, ...] | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a run.

    data: the section of a recipe that names the prompts; None for prompts that no recipe can name.
    chat: the setting with which the prompts were read. notices: warnings about the prompts. own:
    the text of the prompts, which the run folder stores if they are in no other file. skip_bad:
    whether to leave out prompts that cannot be rendered or tokenised.
    """

    prompts: list[Prompt]
    data: DataSection | None = None
    chat: str = "auto"
    notices: Sequence[Notice] = ()
    own: str | None = None
    skip_bad: bool = False
