"""The process between a command and its ranks. It imports the packages that all ranks need, and
then forks the ranks.

Forked ranks share these imports, so a rank starts in a tenth of a second instead of four seconds.
The agent waits for all ranks and records the order in which they end, because the
rank that fails first usually makes the others fail. This module is run as a script.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_TRY_S, _AGAIN_S = 10.0, 0.1  # how long to try to write a file, and the time between attempts
# These modules import nearly everything that a rank uses. They run nothing on a device, because a
# rank could not use CUDA if it were forked from a process that uses CUDA. They include the code of
# two model families, which imports nearly all that other families need. For a program other than
# specdec, only torch is imported in advance.
_SHARED = (
    "specdec_cli.app",
    "specdec_cli.backends.native",
    "specdec_cli.commands.generate_run",
    "specdec_cli.models.heads.layers",
)
_LEAST = ("torch.distributed",)


@dataclass(frozen=True, slots=True)
class Exit:
    """Records how and when the process of a rank ended.

    code: its exit code, or minus the number of the signal that killed it.
    at: seconds since the epoch.
    """

    rank: int
    code: int
    at: float


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to send this process a signal as soon as its parent, process `parent`, ends.

    Call it in the main thread. It does nothing on systems other than Linux.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # imported here to keep --help fast

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Run `python -m MODULE` once per rank.

    Usage: agent.py PARENT_PID FOLDER NUM_RANKS MODULE...
    """
    parent, folder, num_ranks, *program = arguments
    die_with(int(parent))
    package = str(Path(__file__).parents[2])
    if package not in sys.path:
        sys.path.append(package)
    is_ours = program[0].partition(".")[0] == "specdec_cli"
    gc.disable()  # saves a quarter of the import time; imported objects are never freed anyway
    for name in _SHARED if is_ours else _LEAST:
        # The ranks will meet the same error and report it.
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    # Otherwise, garbage collection in a rank would write to shared pages, which copies them.
    gc.freeze()
    gc.enable()

    ranks: dict[int, int] = {}  # ranks by process id

    def end_ranks(signum: int, frame: object) -> NoReturn:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)
        os._exit(1)

    def pass_on(signum: int, frame: object) -> None:
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    # When this process ends, the kernel kills only those ranks that have called `die_with`. Until
    # every rank has called it, the kernel must not kill this process when the parent ends, but send
    # it SIGTERM, whose handler kills the ranks.
    tied, tie = os.pipe()
    signal.signal(signal.SIGTERM, end_ranks)
    die_with(int(parent), signal.SIGTERM)
    # Block SIGTERM while forking: ranks must not run the inherited handler, and the handler must
    # not run before it knows every rank.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # Python warns that forking a process with threads is unsafe. The only threads are OpenBLAS's,
    # and OpenBLAS ends them before a fork.
    warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
    agent = os.getpid()
    for rank in range(int(num_ranks)):
        try:
            pid = os.fork()
        except OSError as problem:
            _report_unstarted(Path(folder), rank, int(num_ranks), problem)
            end_ranks(0, None)
        if pid == 0:
            os.close(tied)
            _be_rank(rank, int(num_ranks), agent, tie, program)
        ranks[pid] = rank
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    os.close(tie)
    os.read(tied, 1)  # returns when every rank has closed the other end
    signal.signal(signal.SIGTERM, pass_on)
    die_with(int(parent))

    exits: list[Exit] = []
    while ranks:
        pid, status = os.wait()
        exits.append(Exit(ranks.pop(pid), os.waitstatus_to_exitcode(status), time.time()))
        patiently(partial(_write_exits, Path(folder), exits))
    os._exit(0)  # the parent waits, and freeing torch's objects takes half a second


def _report_unstarted(folder: Path, rank: int, num_ranks: int, problem: OSError) -> None:
    """Report in place of a rank whose process the system did not start."""
    # This module is a script, so it can import others only after `main` has set the path.
    from specdec_cli.errors import ExitCode
    from specdec_cli.launch.reports import End, Report, write_report

    told = f"cannot start rank {rank} of {num_ranks}: {problem.strerror}"
    hint = "end other processes, or raise the limit on their number (ulimit -u)"
    code = ExitCode.ENVIRONMENT
    report = Report(rank, End.FAILED, code, told, hint, is_common=True)
    patiently(partial(write_report, folder, report))


def _write_exits(folder: Path, exits: list[Exit]) -> None:
    """Write which ranks have ended."""
    scratch = folder / "exits.tmp"
    scratch.write_text(json.dumps([astuple(end) for end in exits]))
    scratch.rename(folder / "exits")


def patiently(write: Callable[[], None]) -> None:
    """Write a file into the run's folder, and try again for a while if that fails, for example
    because the disk is full."""
    deadline = time.monotonic() + _TRY_S
    while time.monotonic() < deadline:
        try:
            return write()
        except FileNotFoundError:  # the parent has deleted the folder
            return None
        except OSError:
            time.sleep(_AGAIN_S)
    return None


def _be_rank(rank: int, num_ranks: int, agent: int, tie: int, program: list[str]) -> NoReturn:
    """Run the program in this forked process, and exit with its code. tie: the end of a pipe that
    the rank closes after its call of `die_with`."""
    code = 1
    try:
        die_with(agent)
        os.close(tie)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        of_rank = {"RANK": rank, "WORLD_SIZE": num_ranks}
        of_host = {"LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": num_ranks}
        os.environ |= {name: str(value) for name, value in (of_rank | of_host).items()}
        module, *sys.argv[1:] = program
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        atexit._run_exitfuncs()  # profilers write their records at exit
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1:])
