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

    def add_argument(self, action: argparse.Action) -> None:
        if not action.help and not _is_without(action):
            action.help = "default: %(default)s"  # argparse shows nothing of an option without help
        super().add_argument(action)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if _is_without(action) else super()._get_help_string(action)

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Any, prefix: str | None
    ) -> str:
        required = [one for one in actions if one.required]
        return super()._format_usage(usage, required, [], prefix)


def _is_without(action: argparse.Action) -> bool:
    """Whether an option has no default that help should show."""
    return action.default in (None, argparse.SUPPRESS, False) or action.default == []


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


def count(text: str) -> int:
    """The value of an option that counts something. Raises `ValueError`, of which argparse makes
    its error."""
    found = int(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number above 0, got {text}")
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
