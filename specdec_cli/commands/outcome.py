"""The outcome of a command: an exit code and, if the command failed, the message and the hint that
the user sees."""

import contextlib
import errno
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import typer

from specdec_cli.commands import help_page
from specdec_cli.errors import ExitCode, SpecdecError, is_out_of_files, is_out_of_memory
from specdec_cli.launch.reports import RanksError
from specdec_cli.text import first_line, inert, shortened, unexpected


@dataclass(slots=True)
class Outcome:
    """The outcome of a command: an exit code, and the error if it failed."""

    code: int = int(ExitCode.OK)
    message: str | None = None
    hint: str | None = None
    trace: str = ""
    failed: bool = False
    error: BaseException | None = None
    is_said: bool = True  # false if the parent or rank 0 reports this rank's error

    def fail(self, code: int, message: str | None, hint: str | None = None) -> None:
        """Record a failure; without a message nothing is written to stderr."""
        if message is not None:
            message = "\n".join(map(shortened, message.split("\n")))
        self.code, self.message, self.hint, self.failed = int(code), message, hint, True

    def document(self) -> dict[str, object]:
        message = self.message or f"ended with exit code {self.code}"
        return {"code": self.code, "message": message, "hint": self.hint}


def run_and_record(run: Callable[[], object], outcome: Outcome) -> None:
    """Run a function, which may return an exit code, and record how it ended."""
    try:
        os.getcwd()  # fails if the directory is gone; the import of torch would end the process
        code = run()
        outcome.code = code if isinstance(code, int) else int(ExitCode.OK)
        if code == ExitCode.SIGINT:  # typer's exit code for KeyboardInterrupt
            outcome.fail(ExitCode.SIGINT, "interrupted")
    except (KeyboardInterrupt, typer.Abort):
        outcome.fail(ExitCode.SIGINT, "interrupted")
    except SystemExit as end:
        _after_system_exit(end, outcome)
    except Exception as error:
        if not isinstance(error, help_page.ParserError):
            outcome.trace = traceback.format_exc()
        after_exception(error, outcome)


def blame_signal(asked: list[signal.Signals], outcome: Outcome) -> None:
    """If a signal came before an unexpected error, report the signal instead of the error. The
    signal may have caused the error: during an import, transformers catches the exception that the
    signal raises and raises a different one. A terminal that closes sends SIGHUP, and later writes
    to it fail with EIO."""
    error = outcome.error
    is_foreseen = error is None or isinstance(error, (SpecdecError, OSError))
    is_gone = isinstance(error, OSError) and error.errno == errno.EIO and not error.filename
    if asked and (is_gone or not is_foreseen):
        if asked[-1] == signal.SIGINT:
            outcome.fail(ExitCode.SIGINT, "interrupted")
        else:
            outcome.fail(ExitCode.SIGTERM, "terminated")


def _after_system_exit(end: SystemExit, outcome: Outcome) -> None:
    code = end.code if isinstance(end.code, int) else int(end.code is not None)
    if isinstance(end.__context__, BrokenPipeError):  # typer and rich raise SystemExit from it
        outcome.fail(ExitCode.SIGPIPE, None)
    elif code == ExitCode.SIGTERM:
        outcome.fail(code, "terminated")
    elif code:
        outcome.fail(code, end.code if isinstance(end.code, str) else None)


def after_exception(error: Exception, outcome: Outcome) -> None:
    """Record an exception as a failure, with an exit code and a message for the user."""
    outcome.error = error
    if isinstance(error, help_page.ParserError):
        outcome.fail(ExitCode.USAGE, *help_page.explained(error))
    elif isinstance(error, SpecdecError):
        outcome.fail(error.code, error.message, error.hint)
        if isinstance(error, RanksError):
            outcome.trace = error.trace
    elif is_out_of_memory(error):
        outcome.fail(
            ExitCode.ENVIRONMENT,
            f"out of memory: {first_line(error) or 'no memory left'}",
            "try a smaller --batch-size, --max-new-tokens or --num-blocks",
        )
    elif isinstance(error, BrokenPipeError):
        outcome.fail(ExitCode.SIGPIPE, None)
    elif isinstance(error, ImportError):
        cause: BaseException = error
        while isinstance(cause.__cause__ or cause.__context__, ImportError):
            cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
        outcome.fail(
            ExitCode.ENVIRONMENT,
            f"cannot import {error.name or 'a library'}: {first_line(cause)}",
            "is the installation complete, and is there memory left (ulimit -v)?",
        )
    elif isinstance(error, FileNotFoundError) and (lost := _lost_folder(error)) is not None:
        outcome.fail(ExitCode.ENVIRONMENT, *lost)
    elif isinstance(error, OSError) and (error.filename or _is_machines(error)):
        # An error without a file name comes from writing to stdout.
        said = f"cannot write the result: {error.strerror}"
        if error.filename:
            said = f"{error.strerror}: {error.filename}"
        outcome.fail(ExitCode.ENVIRONMENT, said)
    else:
        outcome.fail(
            ExitCode.RUN_FAILED,
            unexpected(error),
            "this error is unexpected; run again with -v for the traceback",
        )
    if is_out_of_files(error):
        outcome.code = int(ExitCode.ENVIRONMENT)
        outcome.hint = "raise the limit on open files (ulimit -n)"


def _lost_folder(error: FileNotFoundError) -> tuple[str, str] | None:
    """Return a message and a hint if the working directory is gone, or if no temporary directory
    can be written; otherwise None."""
    if "temporary directory" in (told := error.strerror or ""):
        return told, "free space there, or set TMPDIR to a folder on another disk"
    try:
        os.getcwd()
    except FileNotFoundError:
        return "the working directory is gone", "change to a folder that exists"
    return None


# Errors that the machine causes, not the run, such as a full disk. EBADF and EIO mean that a stream
# cannot be written, EFBIG that a file would exceed its limit (ulimit -f).
_MACHINE_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOMEM}
    | {errno.EBADF, errno.EIO, errno.EFBIG}
)


def _is_machines(error: OSError) -> bool:
    """Return True if the machine caused the error, not the run. Python sets `characters_written`
    only if a non-blocking stream, such as a full pipe, took only a part of a text."""
    return error.errno in _MACHINE_ERRNOS or hasattr(error, "characters_written")


def show_error(outcome: Outcome, verbose: bool) -> None:
    """Write the error to stderr, with control characters escaped."""
    if not outcome.is_said:
        return
    lines = []
    if verbose and outcome.trace:
        lines.append(outcome.trace.rstrip())
    if outcome.message:
        lines += [f"error: {line}" for line in outcome.message.splitlines()]
    if outcome.hint:
        lines += [f"hint: {line}" for line in outcome.hint.splitlines()]
    # If stderr is closed, there is nowhere to report the error.
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write("".join(f"{inert(line)}\n" for line in lines))
        sys.stderr.flush()
