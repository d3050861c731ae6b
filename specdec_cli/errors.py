"""The errors that a user can cause, each with the contract's exit code, and warnings.

`app.main` shows an error as a line on stderr, or as the JSON error document under `--json`;
warnings are in the documents' `warnings`.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import Any, Self


class ExitCode(IntEnum):
    """Exit codes of every command (the contract that scripts rely on)."""

    OK = 0
    RUN_FAILED = 1
    USAGE = 2  # bad usage, recipe or prompts
    PARTIAL = 3  # some points or prompts failed; the rest is saved
    LOSSLESSNESS = 4  # losslessness check failed
    ENVIRONMENT = 5  # no such model, no device, out of memory, disk full
    SIGINT = 130
    SIGTERM = 143


@dataclass(frozen=True, slots=True)
class Notice:
    """A warning that accompanies results.

    code: a name for scripts, such as few_prompts. message: one line. evidence: the figures behind
    the warning.
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


LOGGED: list[Notice] = []  # the warnings that this command logged


class SpecdecError(Exception):
    """An error as one clear line: `message` says what is wrong and where, `hint` what to do.

    is_common: every rank of a run raises the same error, so no rank is named as the cause.
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


class OtherSettings(UsageError):
    """The folder's run has different settings. about: makes the same error with the given keys
    first, which are those that the user typed."""

    def __init__(
        self, message: str, hint: str, about: Callable[[Collection[str]], UsageError]
    ) -> None:
        super().__init__(message, hint)
        self.about = about


class SetupError(SpecdecError):
    """The machine or a model cannot support the run: exit code 5."""

    code = ExitCode.ENVIRONMENT


class NoRoomError(SetupError):
    """The smallest possible cache does not fit. All ranks know each other's memory, so all raise
    this."""

    is_common = True


class TooFewGPUsError(SetupError):
    """A host has fewer GPUs than ranks, and each rank needs its own."""

    is_common = True


class RunError(SpecdecError):
    """The run itself failed: exit code 1."""

    code = ExitCode.RUN_FAILED


def is_out_of_memory(error: Exception) -> bool:
    """True if memory of the host or of a device ran out.

    Also true for an error that followed from lack of memory, such as the failed end of a CUDA graph
    capture.
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
