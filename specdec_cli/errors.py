"""The errors that a user can cause, each with the contract's exit code, and warnings.

Does not know how errors are shown: `app.main` turns an error into a line on stderr, or into the
JSON error document under `--json`; warnings stand in the documents' `warnings`.
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
    """A warning beside results.

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
        """The warning that a document holds as `found`."""
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
    """A folder was begun with other settings. about: makes the error anew, about those of some keys
    first, which the user has typed."""

    def __init__(
        self, message: str, hint: str, about: Callable[[Collection[str]], UsageError]
    ) -> None:
        super().__init__(message, hint)
        self.about = about


class SetupError(SpecdecError):
    """The machine or a model lacks something: exit code 5."""

    code = ExitCode.ENVIRONMENT


class NoRoomError(SetupError):
    """The smallest cache does not fit. All ranks know each other's memory, and agree on this."""

    is_common = True


class TooFewGPUsError(SetupError):
    """A host has fewer GPUs than ranks, and each rank needs its own."""

    is_common = True


class RunError(SpecdecError):
    """The run itself failed: exit code 1."""

    code = ExitCode.RUN_FAILED


def is_out_of_memory(error: Exception) -> bool:
    """True if memory of the host or of a device ran out.

    Also true if the lack of memory caused another error: leaving a CUDA graph's capture then fails
    too.
    """
    if isinstance(error, MemoryError):
        return True
    earlier = error.__context__
    if isinstance(earlier, Exception) and is_out_of_memory(earlier):
        return True
    # Torch is not imported here. Its CUDA error has this class name; the error of its CPU allocator
    # has another.
    is_torch = any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__)
    return is_torch or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
