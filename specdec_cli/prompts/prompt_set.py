"""The prompts of a command line, as experiments take them."""

from collections.abc import Sequence
from dataclasses import dataclass

from specdec_cli.errors import Notice
from specdec_cli.prompts.types import Prompt
from specdec_cli.recipe import DataSection


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The prompts of a run.

    data: the section of a recipe that names them; None for prompts that no recipe can name. chat:
    the setting that they were read with. notices: warnings about them. own: the text of the
    prompts that a run folder is to keep, since no other file holds them. skip_bad: leave out those
    that cannot be rendered or tokenised.
    """

    prompts: list[Prompt]
    data: DataSection | None = None
    chat: str = "auto"
    notices: Sequence[Notice] = ()
    own: str | None = None
    skip_bad: bool = False
