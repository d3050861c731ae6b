"""The errors a user can cause, each with the contract's exit code.

Knows nothing of what went wrong or how it is shown: `app.main` turns one of these into a line on
stderr, or into the JSON error document under `--json`.
"""

from enum import IntEnum


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


class SpecdecError(Exception):
    """One clear line: what is wrong and where (`message`), and what to do about it (`hint`).

    is_common: whether every rank of a run says the same, so that none is to be named as the cause.
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


class SetupError(SpecdecError):
    """The machine or a model lacks something: exit code 5."""

    code = ExitCode.ENVIRONMENT


class NoRoomError(SetupError):
    """Not even the smallest cache fits. All ranks know of each other's memory, and agree."""

    is_common = True


class TooFewGPUsError(SetupError):
    """A host has fewer GPUs than ranks, of which each wants its own."""

    is_common = True


class RunError(SpecdecError):
    """The run itself failed: exit code 1."""

    code = ExitCode.RUN_FAILED


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory, of the host or of a device, ran out.

    Also where that was the beginning: leaving a CUDA graph's capture fails after it with an error
    of its own.
    """
    if isinstance(error, MemoryError):
        return True
    earlier = error.__context__
    if isinstance(earlier, Exception) and is_out_of_memory(earlier):
        return True
    # Torch is not imported here; its own class carries this name, its CPU allocator has none.
    is_torch = any(base.__name__ == "OutOfMemoryError" for base in type(error).__mro__)
    return is_torch or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
