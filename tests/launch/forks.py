"""Runs commands with ranks as forks of the tests' process, which has imported what they need.

`test_launch.py` starts them as users do, and `test_generate_ranks.py` a run of models.
"""

import atexit
import importlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from specdec_cli.launch import agent, ranks, seat
from tests.cli.generate_helpers import Result, specdec
from tests.launch.faults import plant

for name in agent._SHARED:
    importlib.import_module(name)


class ForkedAgent:
    """The agent of ranks, with what `run_ranks` uses of a Popen."""

    returncode: int | None = None

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode

    def wait(self, timeout: float = 60.0) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the agent", timeout)
            time.sleep(0.01)
        return code

    def terminate(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def forked_agent(
    program: Sequence[str], num_ranks: int, folder: Path, environ: Mapping[str, str]
) -> ForkedAgent:
    """In place of `launch.ranks._start`; it plants faults, as `site` does in a real agent."""
    parent = os.getpid()
    if pid := os.fork():
        return ForkedAgent(pid)
    try:
        os.setsid()
        atexit._clear()  # an agent's own process has no temporary folders of the command to remove
        # The command may have replaced its own.
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        os.environ[seat.FOLDER] = str(folder)
        if fault := environ.get("PLANTED_FAULT"):
            plant(fault)
        agent.main([str(parent), str(folder), str(num_ranks), *program])
    finally:
        os._exit(1)


def over_forks(
    *arguments: str | Path, until: Callable[[], bool] | None = None, **extra: str
) -> Result:
    """Run `specdec ARGUMENTS`, which starts ranks; fails if one outlives it.

    until: send it Ctrl-C once this is true. extra: added to its environment; PLANTED_FAULT as for
    `faults.plant`.
    """
    reading, writing = os.pipe()  # its end comes when no descendant holds the other end
    try:
        with patch.object(ranks, "_start", forked_agent):
            result = specdec(*arguments, until=until, **extra)
    finally:
        os.close(writing)
    outlived = not select.select([reading], [], [], 0)[0]
    os.close(reading)
    assert not outlived, "a rank outlives the command"
    return result
