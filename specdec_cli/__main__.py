"""Starts the `specdec` command line; `python -m specdec_cli` runs this module, too. The imports are
slow, so a signal can arrive before they are done. This module then ends the process with the exit
code that the command line uses for that signal."""

import contextlib
import json
import os
import sys
from typing import NoReturn

from specdec_cli.errors import ExitCode
from specdec_cli.signals import signals
from specdec_cli.text import first_line


def main() -> int:
    """Run the command line of this process and return its exit code."""
    try:
        with signals(is_last=False):
            from specdec_cli.app import main as run
    except (KeyboardInterrupt, SystemExit) as end:
        is_interrupt = isinstance(end, KeyboardInterrupt)
        code = int(ExitCode.SIGINT if is_interrupt else ExitCode.SIGTERM)
        _end(code, "interrupted" if is_interrupt else "terminated")
    except ImportError as problem:
        told = f"cannot import {problem.name or 'a library'}: {first_line(problem)}"
        _end(int(ExitCode.ENVIRONMENT), told, "is the installation complete?")
    return run()


def _end(code: int, message: str, hint: str | None = None) -> NoReturn:
    """Print an error to stderr, and with --json also as a document to stdout. Then exit at once."""
    told = f"error: {message}{f'{chr(10)}hint: {hint}' if hint else ''}"
    with contextlib.suppress(OSError):  # such as that of a terminal that has closed
        if "--json" in sys.argv:
            error = {"code": code, "message": message, "hint": hint}
            print(json.dumps({"error": error}), flush=True)
        print(told, file=sys.stderr, flush=True)
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
