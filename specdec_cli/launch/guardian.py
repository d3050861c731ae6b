"""The process between a command and its server. It makes sure that no process of the server
survives.

`python -P guardian.py MARK SECONDS COMMAND...` runs a command in its own session. To stop the
command, write a line to the guardian's standard input, or close it. The command's process group
then gets SIGTERM and, after SECONDS, SIGKILL. When the command has ended, its exit code is written
to standard output. After that, every process that is left is killed: all descendants, and all
processes with MARK in their environment. Runs only on Linux. It does not import other modules of
specdec, because it is run as a file.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "SPECDEC_SERVER"
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_S = 0.05
_KILLS_S = 10.0  # how long to wait until killed processes are gone


def main(mark: str, seconds: str, *command: str) -> int:
    libc, own = ctypes.CDLL(None), os.getpid()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)

    def tied() -> None:  # runs in the child: the kernel kills it when this process ends
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != own:
            os._exit(1)
        for number in _IGNORED:  # otherwise the command would inherit SIG_IGN and ignore SIGTERM
            signal.signal(number, signal.SIG_DFL)

    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)  # stop only when the parent asks or ends
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
            preexec_fn=tied,
            env={**os.environ, MARK: mark},
            restore_signals=True,
        )
    except OSError as problem:
        print(f"cannot start {command[0]}: {problem.strerror}", file=sys.stderr, flush=True)
        _tell(127)
        return 0
    while child.poll() is None:
        if select.select([0], [], [], _LOOK_S)[0]:
            _stop(child, float(seconds))
            break
    _tell(child.wait())
    kill_all(mark, own)
    return 0


def _tell(code: int) -> None:
    with contextlib.suppress(OSError):  # the reader may be gone
        os.write(1, f"{code}\n".encode())


def _stop(child: "subprocess.Popen[bytes]", seconds: float) -> None:
    """Send SIGTERM to the command's process group, wait up to `seconds` for its first process to
    end, then kill the whole group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def kill_all(mark: str, ancestor: int | None = None) -> None:
    """Keep killing the processes that have the mark, until there are none or 10 s have passed.

    ancestor: the id of this process, to kill its descendants too; None to leave them.
    """
    deadline = time.monotonic() + _KILLS_S
    while (left := _left(mark, ancestor)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if ancestor is not None:
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        time.sleep(0.01)


def _left(mark: str, ancestor: int | None) -> list[int]:
    """Return the ids of the living processes that have the mark or descend from `ancestor`, without
    this process."""
    own, parents, marked = os.getpid(), dict[int, int](), set[int]()
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(folder.name)
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if state == "Z" or pid == own:
                continue
            parents[pid] = int(parent)
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                marked.add(pid)
    found = set(marked)
    for pid in parents:
        above = pid
        while above in parents:
            above = parents[above]
        if above == ancestor:
            found.add(pid)
    return sorted(found)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
