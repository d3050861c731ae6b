"""Data types for prompts, and for the rows from which they are read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specdec_cli.errors import Notice
from specdec_cli.recipe import DataSection

# `role`, `content`, and any other key that a chat template may read.
Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, with exactly one of `text`, `token_ids` and `messages`.

    After rendering, `text` is the chat template's output for `messages`. index: the prompt's number
    among all prompts of a run. where: the file and the line, for error messages. later: the user's
    turns after the answer to this prompt. system: the row's own system message;
    `as_conversations` moves it into the text or the messages. template: values for the chat
    template other than the messages, by name. unused: keys of the row that have no effect although
    they would matter to the answer.
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
    """A line, row or item is not a usable prompt. The message says why."""


@dataclass(frozen=True, slots=True)
class Source:
    """The rows of one file, pipe or dataset, read lazily.

    rows: for each row, its place (`prompts.jsonl:3`) and its content: text, a record by column
    name, or a `BadRow` if it could not be read. columns: the columns of a table; None if the source
    is not a table. hint: advice to show about bad rows.
    """

    name: str
    rows: Iterable[tuple[str, object]]
    columns: tuple[str, ...] | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a run.

    data: the recipe's section that names the prompts; None if a recipe cannot name them. chat: the
    chat setting with which the prompts were read. notices: warnings about the prompts. own: the
    prompts as .jsonl text, which the run folder stores if they are in no other file; None
    otherwise. skip_bad: whether to leave out prompts that cannot be rendered or tokenised.
    """

    prompts: list[Prompt]
    data: DataSection | None = None
    chat: str = "auto"
    notices: Sequence[Notice] = ()
    own: str | None = None
    skip_bad: bool = False
