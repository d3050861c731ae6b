"""Data types for prompts, and for the rows from which they are read."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specdec_cli.errors import Notice
from specdec_cli.recipe import DataSection

# A chat message: its `role`, its `content`, and any other keys that a chat template may read.
Message = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, with exactly one of `text`, `token_ids` and `messages`.

    After rendering, `text` is the chat template's output for `messages`.

    index: the prompt's number among all prompts of a run.
    category: the prompt's category in the data; None if it has none.
    where: the file and the line, for error messages.
    later: the user's messages that follow the answer to this prompt.
    system: the row's own system message, until `as_conversations` moves it into the text or the
        messages; None if there is none.
    template: values for the chat template other than the messages, by name.
    unused: keys of the row that specdec ignores, although they could change the answer.
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

    rows: pairs of a row's location, such as `prompts.jsonl:3`, and its content: text, a record by
        column name, or a `BadRow` if it could not be read.
    columns: the names of a table's columns; None if the source is not a table.
    hint: advice to show about bad rows; None for no advice.
    is_file: whether the rows are of one file, or of a pipe.
    has_bodies: whether a table has lines of an OpenAI batch, with the prompt in their `body`.
    """

    name: str
    rows: Iterable[tuple[str, object]]
    columns: tuple[str, ...] | None = None
    hint: str | None = None
    is_file: bool = True
    has_bodies: bool = False


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a run.

    data: the recipe's `data` section, which says where to read the prompts again. None if they
        cannot be read again, for example if they came from `--prompt` and no run folder stores
        them.
    chat: the value of `data.chat` with which the prompts were read.
    notices: warnings about the prompts.
    own: the prompts as the text of a .jsonl file, for the run folder to store. None if `data` names
        the file or dataset that they came from, or if there is no run folder.
    skip_bad: whether to leave out prompts that cannot be rendered or tokenised.
    """

    prompts: list[Prompt]
    data: DataSection | None = None
    chat: str = "auto"
    notices: Sequence[Notice] = ()
    own: str | None = None
    skip_bad: bool = False
