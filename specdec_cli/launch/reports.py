"""Reports of how each rank ended, and the search for the one that explains why a run failed. Does
not import torch."""

import json
import os
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from specdec_cli.errors import ExitCode, RunError


class End(StrEnum):
    """The outcome of one rank. `_BLAME` lists the failures, causes before consequences."""

    DONE = "done"
    FAILED = "failed"  # the rank reported its own error, or ended without a report
    STUCK = "stuck"
    STOPPED = "stopped"  # a signal from outside specdec asked the rank to end
    ABORTED = "aborted"  # ended by SIGABRT, with which NCCL ends a rank that has lost its peers
    LOST_PEERS = "lost peers"  # a collective failed: another rank is the cause


_BLAME = (End.FAILED, End.STUCK, End.STOPPED, End.ABORTED, End.LOST_PEERS)


@dataclass(frozen=True, slots=True)
class Report:
    """A report on how one rank ended.

    message: the error message; None if there is nothing to show.
    at: the time of the report, in seconds since the epoch.
    is_common: whether all ranks had the same error; the message shown then names no rank.
    """

    rank: int
    end: End
    code: int
    message: str | None = None
    hint: str | None = None
    trace: str = ""
    at: float = field(default_factory=time.time)
    is_common: bool = False

    @property
    def explained(self) -> str | None:
        """The message, prefixed with the rank's number unless the error is the same on all ranks
        (for example, bad usage). None if there is no message."""
        is_alike = self.is_common or self.code in (ExitCode.USAGE, ExitCode.PARTIAL)
        if self.message is None or is_alike:
            return self.message
        return f"rank {self.rank}: {self.message}"

    def check(self) -> int:
        """Return the rank's exit code if it finished. Raises `RanksError` if it failed, or
        `SystemExit` if its failure has no message."""
        if self.end is End.DONE:
            return self.code
        if self.message is None:  # a closed pipe, for example, needs no message
            raise SystemExit(self.code)
        raise RanksError(self)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Report":
        found = json.loads(text)
        return cls(**{**found, "end": End(found["end"])})


class RanksError(RunError):
    """The error that ends a run in which ranks failed. It has the message and the exit code of the
    rank that caused the failure."""

    def __init__(self, failure: Report) -> None:
        super().__init__(failure.explained or "", failure.hint)
        self.code = ExitCode(failure.code)
        self.trace = failure.trace


def root_cause(reports: Iterable[Report]) -> Report | None:
    """Return the failure that caused the others; None if no rank failed. If a rank lost its peers,
    for example, another rank's failure is the cause."""
    failed = [report for report in reports if report.end is not End.DONE]
    return min(failed, key=lambda r: (_BLAME.index(r.end), r.at, r.rank), default=None)


def gone(rank: int, exit_code: int, at: float, last_words: str = "") -> Report:
    """Make the report of a rank that exited without writing one. exit_code: as in `subprocess`,
    negative for a signal. last_words: the last line that the rank wrote to standard error."""
    end, hint = End.FAILED, last_words or None
    if exit_code < 0:
        name = signal_name(-exit_code)
        message = f"was killed by {name}"
        if name == "SIGKILL":
            hint = hint or "the system kills processes when memory runs out; see its log"
        elif name == "SIGABRT":
            end = End.ABORTED
    elif exit_code in (ExitCode.SIGINT, ExitCode.SIGTERM):  # the rank was stopped while starting
        end, message = End.STOPPED, "was stopped"
    else:
        message = f"ended without a report (exit code {exit_code}) before the run was done"
    return Report(rank, end, ExitCode.RUN_FAILED, message, hint, at=at)


def how_ended(exit_code: int) -> str:
    """Describe an exit code as in `subprocess`, such as `exit code 1` or, for -9, `SIGKILL`."""
    return signal_name(-exit_code) if exit_code < 0 else f"exit code {exit_code}"


def signal_name(number: int) -> str:
    """Return the name of a signal, such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def write_report(folder: Path, report: Report) -> None:
    write_atomically(folder / f"report-{report.rank}", report.to_json())


def read_reports(folder: Path) -> dict[int, Report]:
    """Read all reports in the folder, by rank."""
    found = (Report.from_json(path.read_bytes()) for path in folder.glob("report-*[0-9]"))
    return {report.rank: report for report in found}


def stderr_path(folder: Path, rank: int) -> Path:
    """Return the path of the file that holds a silenced rank's standard error."""
    return folder / f"stderr-{rank}"


def last_words(folder: Path, rank: int) -> str:
    """Return the last line that a silenced rank wrote to its standard error; empty if none."""
    try:
        text = stderr_path(folder, rank).read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that readers see the whole text or nothing."""
    scratch = path.with_name(f"{path.name}.tmp")
    scratch.write_text(text, encoding="utf-8")
    os.replace(scratch, path)


def is_lost_peers(error: BaseException) -> bool:
    """Return True if an exception means that a collective failed. Another rank is then the cause of
    the failure."""
    names = {base.__name__ for base in type(error).__mro__}
    if "OutOfMemoryError" in names or isinstance(error, MemoryError):
        return False
    if names & {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    text = str(error)
    if isinstance(error, RuntimeError) and ("gloo/" in text or "NCCL" in text):
        return True
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(files) and "torch/distributed/" in files[-1]
