"""Starts and stops a server process. A guardian process ends the server if this process dies."""

import os
import re
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from specdec_cli.errors import ExitCode, RunError
from specdec_cli.launch import guardian
from specdec_cli.launch.reports import how_ended
from specdec_cli.text import inert

HOST = "127.0.0.1"
_LAST_LINES = 5
_UNKNOWN = re.compile(r"unrecognized arguments: (.*)")
_SLACK_S = 20.0  # extra time after `stop_timeout_s`, for killed processes to exit


_NOT_FOUND = 127  # the exit code for a command that does not exist, as in shells


class NotUpError(RunError):
    """The server could not be started on this machine, or did not become healthy in time. If the
    command has not measured any point yet, it exits with code 5."""

    code = ExitCode.ENVIRONMENT


class Process:
    """A server process that ends when this process ends.

    words: the server's command line.
    env: variables to add to its environment.
    log: the file to which its output is appended.
    stop_timeout_s: how long the server may take to stop before it is killed, in seconds.
    """

    def __init__(
        self, words: Sequence[str], env: dict[str, str], log: Path, stop_timeout_s: float
    ) -> None:
        self._log, self._from = log, log.stat().st_size if log.exists() else 0
        self._stop_timeout_s = stop_timeout_s
        self.code: int | None = None
        self._mark = secrets.token_hex(8)
        # -P keeps the script's folder off the module path, since its files could shadow modules.
        command = [sys.executable, "-P", str(Path(guardian.__file__))]
        command += [self._mark, str(stop_timeout_s)]
        with log.open("ab") as file:
            self._guardian = subprocess.Popen(
                [*command, *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **env},
            )

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Wait up to `within_s` seconds for the server's main process to end. Returns True if it
        has ended; `code` is then its exit code."""
        if self.code is None:
            assert self._guardian.stdout is not None
            if not select.select([self._guardian.stdout], [], [], within_s)[0]:
                return False
            line = self._guardian.stdout.readline()
            self.code = int(line) if line.strip() else -signal.SIGKILL
        return True

    def check(self, within_s: float = 0.0) -> None:
        """Raise `RunError` if the server ends within `within_s` seconds. The message has the exit
        code and the last lines of the log."""
        if self.has_ended(within_s):
            kind = NotUpError if self.code == _NOT_FOUND else RunError
            raise kind(f"the server ended with {how_ended(self.code or 0)}: {self.last_words}")

    @property
    def written(self) -> str:
        """Everything that the server has written to its log so far."""
        with self._log.open("rb") as file:
            file.seek(self._from)
            return file.read().decode(errors="replace")

    @property
    def last_words(self) -> str:
        lines = [line.strip() for line in self.written.splitlines() if line.strip()]
        return inert(" | ".join(lines[-_LAST_LINES:])) or "it wrote nothing"

    @property
    def unknown_flags(self) -> list[str]:
        """The flags that the server reported as unknown."""
        found = _UNKNOWN.search(self.written)
        words = found[1].split() if found is not None else []
        return [word.partition("=")[0] for word in words if word.startswith("-")]

    def stop(self) -> None:
        """Stop the server. Returns when none of its processes is left."""
        assert self._guardian.stdin is not None and self._guardian.stdout is not None
        with suppress(OSError):  # the guardian has ended with its server
            self._guardian.stdin.close()
        try:
            self._guardian.wait(self._stop_timeout_s + _SLACK_S)
        except subprocess.TimeoutExpired:
            self._guardian.kill()
            self._guardian.wait()
        if self._guardian.returncode:  # killed before it could kill the server's other processes
            guardian.kill_all(self._mark)
        self._guardian.stdout.close()


def free_port() -> int:
    """Return a port that no process is using now."""
    with socket.socket() as found:
        found.bind((HOST, 0))
        return int(found.getsockname()[1])
