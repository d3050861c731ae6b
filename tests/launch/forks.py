"""Runs commands with ranks as forks of the tests' process, which has imported what they need.

`test_launch.py` starts them as users do, and `test_generate_ranks.py` a run of models.
"""

import atexit
import importlib
import logging
import os
import runpy
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import NoReturn
from unittest.mock import patch

import torch

from specdec_cli import signals
from specdec_cli.launch import agent, ranks, seat
from tests.cli.generate_helpers import Result, specdec
from tests.launch import faults

for name in agent._SHARED:
    importlib.import_module(name)


class Fork:
    """A fork of this process, with what `run_ranks` uses of a Popen."""

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
                raise subprocess.TimeoutExpired("a fork", timeout)
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
) -> Fork:
    """In place of `launch.ranks._start`; it plants faults, as `site` does in a real agent."""
    parent = os.getpid()
    if pid := os.fork():
        return Fork(pid)
    try:
        os.setsid()
        atexit._clear()  # an agent's own process has no temporary folders of the command to remove
        for number, usual in signals._USUAL.items():  # nor the command's handlers
            signal.signal(number, usual)
        # The command may have replaced its own.
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        os.environ[seat.FOLDER] = str(folder)
        if fault := environ.get("PLANTED_FAULT"):
            faults.plant(fault)
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


class Started:
    """A program in a fork of this process, with its streams and with the lives of its descendants.

    process: its process.
    """

    def __init__(self, program: Sequence[str], environ: Mapping[str, str], said: str = "") -> None:
        """Start `python PROGRAM`, a list that begins with `-m MODULE`. Ranks that it starts are
        forks, too.

        environ: its whole environment. said: its standard input.
        """
        self._out, self._err = TemporaryFile(), TemporaryFile()
        # Its end comes when no descendant holds the other end.
        self._ended, held = os.pipe()
        with TemporaryFile() as given:
            given.write(said.encode())
            given.seek(0)
            streams = [file.fileno() for file in (given, self._out, self._err)]
            sys.stdout.flush()
            tests = os.getpid()
            self.process = Fork(os.fork())
            if self.process.pid == 0:
                agent.die_with(tests)
                _be_program(program, environ, streams)
        os.close(held)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; returns what it and its descendants have written to its streams."""
        self.process.wait(timeout)
        texts = []
        for file in (self._out, self._err):
            file.seek(0)
            texts.append(file.read().decode())
        return texts[0], texts[1]

    def is_outlived(self, seconds: float) -> bool:
        """Return True if a descendant is still alive after the time."""
        return not select.select([self._ended], [], [], seconds)[0]

    def close(self) -> None:
        """Forget its streams."""
        self._out.close()
        self._err.close()
        os.close(self._ended)


def _be_program(
    program: Sequence[str], environ: Mapping[str, str], streams: Sequence[int]
) -> NoReturn:
    """Run a program in this process, a fork, and end with its code."""
    code = 1
    try:
        os.setsid()
        atexit._clear()  # those of the tests' process
        for descriptor, given in enumerate(streams):
            os.dup2(given, descriptor)
        faults._STDERR = os.dup(2)
        os.environ.clear()
        os.environ.update(environ)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
        logging.getLogger().handlers.clear()  # pytest's
        torch.set_num_threads(1)  # a fork has only this thread
        _, module, *sys.argv[1:] = program
        with patch.object(ranks, "_start", forked_agent):
            try:
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
