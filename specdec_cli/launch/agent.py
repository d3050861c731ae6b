"""The process between a command and its ranks: torch's elastic launcher, on one machine.

`launch.ranks` runs it as a file, so it imports nothing of ours. It prints nothing: the ranks' exit
codes go into a file.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process as soon as its parent, process `parent`, is gone.

    Call it in the main thread. It does nothing on systems without prctl.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes  # not for those who only ask for help

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # the parent was gone before the call
        os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> None:
    """Run PROGRAM once per rank: agent.py PARENT_PID FOLDER NUM_RANKS PROGRAM..."""
    parent, folder, num_ranks, *program = arguments
    die_with(int(parent))
    logging.disable(logging.CRITICAL)
    os.environ["SPECDEC_LAUNCHER_PID"] = str(os.getpid())

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    options = ["--standalone", "--no-python", "--local-addr=localhost", "--monitor-interval=0.1"]
    options += [f"--nproc-per-node={num_ranks}", f"--log-dir={folder}/torchrun"]
    exits: dict[int, int] = {}
    try:
        run(parse_args([*options, *program]))
    except ChildFailedError as failed:
        exits = {rank: failure.exitcode for rank, failure in failed.failures.items()}
    except SignalException as asked:
        sys.exit(128 + asked.sigval)
    written = Path(folder, "exits.tmp")
    written.write_text(json.dumps(exits))
    written.rename(Path(folder, "exits"))
    os._exit(1 if exits else 0)  # the parent waits, and freeing torch's objects takes half a second


if __name__ == "__main__":
    main(sys.argv[1:])
