"""Command lines of these scripts: help with defaults, sizes by device, errors of one line."""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from specdec_cli.errors import SpecdecError


class Help(argparse.ArgumentDefaultsHelpFormatter):
    """Help that shows each default, even of options without help. Its usage has only the required
    words, so that an error stands below one line and not below twenty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, argparse.SUPPRESS, False) or action.default == []:
            return action.help
        return super()._get_help_string(action) or "default: %(default)s"

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None
    ) -> str:
        required = [one for one in actions if one.required]
        return super()._format_usage(usage, required, [], prefix)


def by_device(
    args: argparse.Namespace, sizes: Mapping[str, tuple[int, int]], device: str = "auto"
) -> None:
    """Fill in sizes that were not given. sizes: by name, on a GPU and on a CPU."""
    is_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    for name, pair in sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, pair[is_cpu])


def default(sizes: Mapping[str, tuple[int, int]], name: str) -> str:
    """The defaults of a size, for its help."""
    return "default: {} on a GPU, {} on a CPU".format(*sizes[name])


def minutes(text: str) -> float:
    """The value of --minutes. Raises `ValueError`, of which argparse makes its error."""
    found = float(text)
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"expected minutes above 0, got {text}")
    return found


def run(main: Callable[[], None]) -> None:
    """Run a command. An error that a user can cause ends it with one line and the code of
    `specdec`'s commands."""
    try:
        main()
    except SpecdecError as problem:
        hint = f"\nhint: {problem.hint}" if problem.hint else ""
        sys.exit(_said(f"{problem.message}{hint}", int(problem.code)))
    except OSError as problem:
        told = f"{problem.filename}: {problem.strerror}" if problem.filename else str(problem)
        sys.exit(_said(" ".join(told.split())))
    except ValueError as problem:
        sys.exit(_said(" ".join(str(problem).split())))
    except KeyboardInterrupt:
        sys.exit(130)


def _said(told: str, code: int = 2) -> int:
    print(f"error: {told}", file=sys.stderr)
    return code
