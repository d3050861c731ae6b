"""Errors that a user can cause, with their exit codes, and warnings.

`app.main` shows an error as a line on stderr, and with `--json` as a JSON document. JSON results
list warnings under `warnings`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Self


class ExitCode(IntEnum):
    """The exit codes of all commands. Scripts rely on them."""

    OK = 0
    RUN_FAILED = 1
    USAGE = 2  # bad usage, recipe or prompts
    PARTIAL = 3  # some points or prompts failed; the rest is saved
    LOSSLESSNESS = 4  # losslessness check failed
    ENVIRONMENT = 5  # no such model, no device, out of memory, disk full
    SIGINT = 130
    SIGPIPE = 141  # the reader of stdout closed the pipe
    SIGTERM = 143


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning that accompanies results.

    code: a short name that scripts can test for, such as few_prompts.
    message: one line of text.
    evidence: the figures behind the warning.
    """

    code: str
    message: str
    evidence: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Self:
        """Read a warning from its record in a document."""
        evidence = found.get("evidence")
        return cls(
            str(found.get("code", "recorded")),
            str(found.get("message", "")),
            evidence if isinstance(evidence, Mapping) else {},
        )


LOG = "log"  # the code of logged warnings
LOGGED: list[Notice] = []  # the warnings that this command logged


class SpecdecError(Exception):
    """An error that is shown as one line. `message` says what is wrong and where; `hint` says what
    to do.

    is_common: whether all ranks of a run raise the same error. If so, the message that the user
        sees names no rank.
    """

    code: ExitCode = ExitCode.RUN_FAILED
    is_common: bool = False

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(SpecdecError):
    """Bad options, recipe or prompts: exit code 2."""

    code = ExitCode.USAGE


class TooManyProposals(UsageError):
    """k is more than a draft can propose.

    most: the largest k that it can propose.
    limit: the sentence that says so.
    is_default: whether k is the default, which neither the command line nor the recipe sets.
    """

    def __init__(self, k: int, most: int, limit: str, *, is_default: bool) -> None:
        by_default = " by default" if is_default else ""
        told = f"speculation.num_speculative_tokens (-k) is {k}{by_default}: {limit}"
        super().__init__(told, f"pass -k {most} or less")
        self.most, self.limit = most, limit


class OtherSettings(UsageError):
    """The run in the output folder has different settings.

    about: a function that takes the keys that the user typed and returns the same error with a
        message that names differences in those keys first.
    """

    def __init__(
        self, message: str, hint: str, about: Callable[[Collection[str]], UsageError]
    ) -> None:
        super().__init__(message, hint)
        self.about = about


class SetupError(SpecdecError):
    """The machine or a model cannot support the run: exit code 5."""

    code = ExitCode.ENVIRONMENT


class NoRoomError(SetupError):
    """The smallest possible cache does not fit into memory. All ranks know each other's memory, so
    all of them raise this."""

    is_common = True


class TooFewGPUsError(SetupError):
    """A host has fewer GPUs than ranks, and each rank needs its own."""

    is_common = True


class RunError(SpecdecError):
    """The run itself failed: exit code 1."""

    code = ExitCode.RUN_FAILED


class NotFiniteError(RunError):
    """The logits of a model are not finite. All ranks read the same decisions, so all of them raise
    this."""

    is_common = True


def is_out_of_files(error: BaseException | None) -> bool:
    """Return True if the limit on open files caused an error, or an error that led to it.

    Libraries replace the system's error by their own, so this searches the messages.
    """
    while error is not None:
        if "Too many open files" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_out_of_memory(error: Exception) -> bool:
    """Return True if the host or a device ran out of memory.

    This includes errors raised while an out-of-memory error was handled: for example, ending a CUDA
    graph capture fails after an allocation in it has failed.
    """
    if isinstance(error, MemoryError):
        return True
    earlier = error.__context__
    if isinstance(earlier, Exception) and is_out_of_memory(earlier):
        return True
    # Compare names, because importing torch here would be slow. CUDA's error is an
    # `OutOfMemoryError`; the CPU allocator raises a RuntimeError with this message.
    is_torch = any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__)
    return is_torch or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
