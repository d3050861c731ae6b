"""Makes the current process one of several ranks: silences its output unless it is rank 0, starts
its heartbeat, and reports how it ended.

A rank started by `specdec` reports to its parent through the run's folder. A rank started by
torchrun or srun reports to rank 0 through the store that all ranks share, and rank 0 tells the
user.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from functools import partial
from typing import Any, NoReturn

from specdec_cli.core.control_groups import cpu_quota
from specdec_cli.errors import ExitCode, SetupError
from specdec_cli.launch import seat as seats
from specdec_cli.launch.agent import die_with, patiently
from specdec_cli.launch.heartbeat import BUSY, Beat, Heartbeat, PeerWatch, is_frozen, write_beat
from specdec_cli.launch.reports import (
    End,
    Report,
    is_lost_peers,
    root_cause,
    signal_name,
    stderr_path,
    write_report,
)
from specdec_cli.launch.seat import Seat

_LINGER_S = 2.0  # how long a failed rank waits for others to report before it exits


class PeersMissing(SetupError):
    """The ranks could not connect, or another rank failed."""


class Rank:
    """This process as one of several ranks. Create it once, in the main thread, before torch loads.

    store: torch's store, through which ranks started by torchrun or srun report; None until they
        are connected.
    limit_s: the seconds after which a hung rank ends the run; None if a parent process watches the
        ranks.
    watch: watches the other ranks; None if a parent process does.
    """

    def __init__(self, seat: Seat, *, verbose: bool) -> None:
        self.seat = seat
        self.store: Any = None
        self.limit_s: float | None = None
        self.watch: PeerWatch | None = None
        self.threads = _own_threads(seat)
        self._stderr = -1
        self._has_told = False
        if seat.folder is None and "TORCHELASTIC_RUN_ID" in os.environ:
            die_with(os.getppid())
        if seat.rank:
            self._silence(verbose=verbose)
        self.heartbeat = Heartbeat(seat.rank, self._on_beat, self._on_stop)

    @property
    def tells_user(self) -> bool:
        """True if this process tells the user about errors."""
        return self.seat.folder is None and self.seat.rank == 0

    def end(self, report: Report) -> Report | None:
        """Report how this rank ended. Returns the report that this rank must show to the user; None
        if it must not show any."""
        self.heartbeat.stop()
        return self._tell(report)

    def exit(self, code: int) -> NoReturn:
        """End the process at once after a failure. Destructors do not run, since they would wait
        for other ranks."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)

    def _tell(self, report: Report) -> Report | None:
        if self._has_told:
            return None
        self._has_told = True
        # Report even if the launcher is already ending this process: ignore its signals.
        asked = threading.Event()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            with contextlib.suppress(ValueError):  # only the main thread may set handlers
                signal.signal(number, lambda *_: asked.set())
        if self.seat.folder is not None:
            # If this keeps failing, the parent says that this rank ended without a report.
            patiently(partial(write_report, self.seat.folder, report))
            if report.end is End.LOST_PEERS:
                asked.wait(_LINGER_S)
            return None
        return None if report.end is End.DONE else self._tell_peers(report)

    def _tell_peers(self, report: Report) -> Report | None:
        try:
            if self.store is None:
                raise RuntimeError("the ranks have not met")
            self.store.set(key := f"report/{self.seat.rank}", report.to_json())
            self.store.check([key])  # unlike `set`, raises if the store is gone
        except RuntimeError:  # the ranks never connected, or rank 0 and its store are gone
            if self.seat.rank == 0:
                return report
            if self.seat.rank == 1 and (report.end is End.LOST_PEERS or report.rank == 0):
                self._speak()
                return report if self.store is None or report.rank == 0 else _said_nothing(0)
            if self.store is None:
                time.sleep(_LINGER_S)  # so that rank 0 can fail and report before torchrun ends it
            return None
        if self.seat.rank == 1 and report.rank == 0:  # rank 0 hangs and cannot report it
            self._speak()
            return report
        if self.seat.rank:
            time.sleep(_LINGER_S)
            return None
        return root_cause(self._gather(report))

    def _speak(self) -> None:
        """Restore the stderr of this rank, which was silenced."""
        if self._stderr >= 0:
            os.dup2(self._stderr, 2)

    def _gather(self, own: Report) -> list[Report]:
        """Collect the reports that other ranks send within `_LINGER_S` seconds. Returns them and
        rank 0's own report."""
        deadline = time.monotonic() + _LINGER_S
        found = {own.rank: own}
        while len(found) < self.seat.size and time.monotonic() < deadline:
            for rank in set(range(self.seat.size)) - found.keys():
                with contextlib.suppress(RuntimeError):
                    if self.store.check([key := f"report/{rank}"]):
                        found[rank] = Report.from_json(self.store.get(key))
            if any(r.end in (End.FAILED, End.STUCK) for r in found.values()):
                break
            time.sleep(0.05)
        else:
            silent = set(range(self.seat.size)) - found.keys()
            if own.end is End.LOST_PEERS and silent:
                found[min(silent)] = _said_nothing(min(silent))
        return list(found.values())

    def _on_beat(self, beat: Beat) -> None:
        if self.seat.folder is not None:
            # The parent may have deleted the folder, or the disk may be full for a moment. An error
            # here would end the heartbeat, and the parent would take this rank for hung.
            with contextlib.suppress(OSError):
                write_beat(self.seat.folder, beat)
        elif self.limit_s is not None:
            is_hung = beat.state == BUSY and beat.at - beat.moved_at > self.limit_s
            found = beat if is_hung else self._look_at_peers(beat, self.limit_s)
            if found is not None:
                self._end_here(stuck(found, time.monotonic(), self.limit_s))

    def _look_at_peers(self, beat: Beat, limit_s: float) -> Beat | None:
        """Return the beat of another rank that holds up the others, if any."""
        if self.watch is None:
            return None
        asked_at = time.monotonic()
        try:
            return self.watch.exchange(beat)
        except RuntimeError:
            # Either the store is gone, perhaps because the run is over, or rank 0 and its store are
            # frozen. In the second case, the call has waited until its timeout.
            self.watch = None
            if time.monotonic() - asked_at < limit_s:
                return None
            self._end_here(_said_nothing(0))

    def _on_stop(self, number: int) -> None:
        message = f"was ended by {signal_name(number)}"
        self._end_here(Report(self.seat.rank, End.STOPPED, ExitCode.SIGTERM, message))

    def _end_here(self, report: Report) -> NoReturn:
        """End the process from the heartbeat's thread while the main thread is stuck."""
        said = self._tell(report)
        if said is not None and said.explained is not None:
            os.write(2, f"error: {said.explained}\n".encode())
        os._exit(report.code)

    def _silence(self, *, verbose: bool) -> None:
        """Silence a rank other than 0. Its stdout is dropped. Unless `verbose` is true, its stderr
        goes to a file in the run's folder or, without a folder, is dropped."""
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, 1)
        if not verbose:
            self._stderr = os.dup(2)
            folder = self.seat.folder
            if folder is not None:
                path = stderr_path(folder, self.seat.rank)
                devnull = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(devnull, 2)


def stuck(beat: Beat, now: float, timeout_s: float) -> Report:
    """Make the report of a rank that holds up the others."""
    how = "the process stands still" if is_frozen(beat, now) else "nothing happened"
    message = f"hung in {beat.where}: {how} for {timeout_s:g} s"
    hint = "run.timeout_s sets how long to wait"
    return Report(beat.rank, End.STUCK, ExitCode.RUN_FAILED, message, hint)


def _said_nothing(rank: int) -> Report:
    return Report(
        rank,
        End.FAILED,
        ExitCode.RUN_FAILED,
        "is gone or hangs, and gave no reason",
        "torchrun or srun may know how it ended",
    )


def how_it_ended(error: BaseException | None, code: int, *, failed: bool) -> End:
    """Classify how a command ended, from its exception and exit code."""
    if not failed:
        return End.DONE
    if isinstance(error, PeersMissing) or (error is not None and is_lost_peers(error)):
        return End.LOST_PEERS
    return End.STOPPED if code in (ExitCode.SIGINT, ExitCode.SIGTERM) else End.FAILED


def _own_threads(seat: Seat) -> int | None:
    """Return how many threads torch may use on this rank: its share of the cores, or the number
    that the parent chose. None if the user chose a number with OMP_NUM_THREADS or
    MKL_NUM_THREADS."""
    chosen = os.environ.pop(seats.THREADS, None)
    if chosen is not None:
        return int(chosen)
    if {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        return None
    return max(1, num_cores() // seat.local_size)


def num_cores() -> int:
    """Return the number of cores that this process may use at once: those on which it may run, or
    fewer if its control groups have a CPU quota, which is rounded down.

    More threads would use up the quota and then all stand still until its period ends. Under a
    quota of 1.5, two threads would stand still for 25 ms of every 100. By the times of one and two
    threads in docs/performance.md, CPU, they would be at most a tenth faster than one thread, and
    slower under a quota below 1.35. A tenth is not worth times that vary with the quota's periods.
    """
    quota = cpu_quota()
    return num_allowed() if quota is None else max(1, min(num_allowed(), int(quota.processors)))


def num_allowed() -> int:
    """Return the number of cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
