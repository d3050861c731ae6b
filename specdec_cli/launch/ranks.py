"""Starts ranks on this machine, watches them, and finds out how they ended. Does not import
torch."""

import contextlib
import fcntl
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from specdec_cli.errors import ExitCode, SetupError
from specdec_cli.launch import agent, seat, spinning
from specdec_cli.launch.agent import Exit
from specdec_cli.launch.heartbeat import LEAST_START_S, find_stuck, read_beats
from specdec_cli.launch.rank import num_cores, stuck
from specdec_cli.launch.reports import (
    End,
    Report,
    gone,
    how_ended,
    last_words,
    read_reports,
    root_cause,
)

_LOOK_S = 0.1
_SETTLE_S = 5.0  # how long to wait, after a failure, for a report of its cause
_SETTLE_KNOWN_S = 0.3  # the same wait once a rank has reported its own error
_STOP_S = 2.0  # seconds from SIGTERM to SIGKILL
_LEAVE_S = 10.0  # seconds for processes to end after every rank has reported
_PROBE_BYTES = 4096  # more than any report and beat needs
# Names of private folders contain the host's name: other hosts may not see this host's locks.
_PREFIX = f"specdec-ranks-{os.uname().nodename}-"
_OLD_S = 60.0  # the age from which such a folder is locked if its command still runs


def run_ranks(
    program: Sequence[str],
    num_ranks: int,
    *,
    timeout_s: float,
    inputs: object = None,
    environ: Mapping[str, str] = os.environ,
) -> Report:
    """Run `program` (a module and its arguments) as `num_ranks` ranks until they end. Returns the
    report of the root cause if a rank failed, otherwise rank 0's report.

    Rank 0 uses the caller's standard streams. No process is left behind, even if a signal handler
    raises an exception. Call this function from the main thread, because the ranks are killed when
    the calling thread ends.

    timeout_s: the seconds after which a hung rank ends the run.
    inputs: any object that can be pickled; every rank can read it.
    environ: the environment of the ranks.
    """
    spinning.choose_spins()  # before ranks start, since each would count the others as other work
    _delete_old_folders()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))  # mode 0700
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        if inputs is not None:
            (folder / "inputs").write_bytes(pickle.dumps(inputs))
        launcher = _start(program, num_ranks, folder, environ)
        try:
            failure = _watch(launcher, num_ranks, folder, timeout_s)
        finally:
            _stop(launcher, folder)
        return unwritable(failure, folder) or failure or read_reports(folder)[0]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def unwritable(failure: Report | None, folder: Path) -> Report | None:
    """Return a report that the folder cannot be written, such as on a full disk, if this explains a
    failure: a rank that sends no beats or no report looks as if it hung or were gone."""
    if failure is None or failure.rank in read_reports(folder):
        return None
    try:
        (folder / "probe").write_bytes(bytes(_PROBE_BYTES))
    except OSError as problem:
        told = f"cannot write {folder}, through which ranks report: {problem.strerror}"
        hint = "make room there and leave the folder alone, or set TMPDIR to another place"
        return replace(
            failure,
            end=End.FAILED,
            code=ExitCode.ENVIRONMENT,
            message=told,
            hint=hint,
            is_common=True,
        )
    return None


def _delete_old_folders() -> None:
    """Delete the private folders of commands that were killed: the kernel has released their
    locks."""
    for old in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's folder, or a lock that is held
            lock = os.open(old, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(lock).st_mtime > _OLD_S:
                    shutil.rmtree(old)
            finally:
                os.close(lock)


def _start(
    program: Sequence[str], num_ranks: int, folder: Path, environ: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    arguments = [str(os.getpid()), str(folder), str(num_ranks), *program]
    # Without -P, a file in the agent's folder could shadow a module.
    command = [sys.executable, "-P", str(Path(agent.__file__)), *arguments]
    env = {**environ, seat.FOLDER: str(folder)}
    if not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & env.keys():
        threads = spinning.threads_beside(spinning.others() or 0.0, num_cores())
        env[seat.THREADS] = str(max(1, threads // num_ranks))
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        # Use a separate session, so that a terminal's Ctrl-C reaches only this process, which then
        # ends the ranks itself.
        return subprocess.Popen(command, env=env, start_new_session=True)
    except OSError as problem:
        raise SetupError(f"cannot start {num_ranks} ranks: {problem.strerror}") from problem


def _watch(
    launcher: "subprocess.Popen[bytes]", num_ranks: int, folder: Path, timeout_s: float
) -> Report | None:
    """Wait until every rank is done, or until the cause of a failure is known. Returns the report
    of the cause; None if every rank is done."""
    started = looked = time.monotonic()
    settled = stuck_from = done_by = float("inf")
    while True:
        is_over = launcher.poll() is not None  # first, so that the files read below are complete
        now = time.monotonic()
        beats, exits = read_beats(folder), _exits(folder)
        reports = read_reports(folder)  # read after `exits`, since a rank reports before it ends
        failures = _failures(folder, reports, exits)
        if len(reports) == num_ranks and not failures:
            done_by = min(done_by, now + _LEAVE_S)
            if is_over or now > done_by:
                return None
        elif failures:
            is_known = any(r.end in (End.FAILED, End.STUCK, End.STOPPED) for r in failures)
            if is_over and launcher.returncode and not is_known:
                return _launcher_failed(launcher.returncode)
            settled = min(settled, now + (_SETTLE_KNOWN_S if is_known else _SETTLE_S))
            if is_over or now > settled:
                return root_cause(failures)
        elif is_over:
            return _launcher_failed(launcher.returncode)
        # If this process was suspended (Ctrl-Z), the beats that it has read may be old: give the
        # ranks a second to send new ones.
        if now - looked > 1:
            stuck_from = now
        if now - stuck_from > 1 or stuck_from == float("inf"):
            live = [beat for beat in beats if beat.rank not in reports]
            beat = None
            if not failures:
                beat = find_stuck(live, num_ranks - len(reports), now, timeout_s)
            if beat is not None:
                return stuck(beat, now, timeout_s)
            if now - started > max(timeout_s, LEAST_START_S) and len(beats) < num_ranks:
                late = min(set(range(num_ranks)) - {beat.rank for beat in beats})
                return Report(late, End.STUCK, ExitCode.RUN_FAILED, "did not start")
        looked = now
        time.sleep(_LOOK_S)


def _failures(folder: Path, reports: Mapping[int, Report], exits: Sequence[Exit]) -> list[Report]:
    """Return the reports of failed ranks. For a rank that ended without a report, make one."""
    found = []
    for report in reports.values():
        # This process stops no rank while it watches, so another process stopped the rank.
        if report.end is End.STOPPED:
            report = replace(report, code=ExitCode.RUN_FAILED)
        if report.end is not End.DONE:
            found.append(report)
    silent = [end for end in exits if end.rank not in reports]
    return found + [gone(e.rank, e.code, e.at, last_words(folder, e.rank)) for e in silent]


def _launcher_failed(code: int) -> Report:
    message = f"the process that starts the ranks ended ({how_ended(code)})"
    return Report(0, End.FAILED, ExitCode.RUN_FAILED, message, is_common=True)


def _exits(folder: Path) -> list[Exit]:
    """Read which ranks have ended, in the order in which they ended."""
    try:
        return [Exit(*end) for end in json.loads((folder / "exits").read_text())]
    except FileNotFoundError:
        return []


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _stop(launcher: "subprocess.Popen[bytes]", folder: Path) -> None:
    """End the launcher, and with it the ranks. Returns when all are gone, or a second after the
    launcher has ended."""
    try:
        if launcher.poll() is None:
            launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                launcher.wait(_STOP_S)
    finally:
        launcher.kill()  # the kernel then kills the ranks, as `die_with` asked it to
        launcher.wait()
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline and any(_is_alive(b.pid) for b in read_beats(folder)):
        time.sleep(0.02)
