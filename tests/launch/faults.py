"""Faults that tests plant in ranks; the package does not know them."""

import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from specdec_cli.errors import SetupError

# Ranks other than the first are silenced later.
_STDERR = os.dup(2)


def fail(mode: str) -> None:
    """Fail as `mode` says, and print the time."""
    os.write(_STDERR, f"fault at {time.time()}\n".encode())
    match mode:
        case "raise":
            raise ArithmeticError("the planted error")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "hang":
            threading.Event().wait()
        case "gone":
            os._exit(0)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "spin":
            while True:
                pass
        case "oom":
            import torch

            raise torch.OutOfMemoryError("tried to allocate 3 GiB")
        case "setup":
            raise SetupError("no such thing", "look elsewhere")
        case _:
            raise AssertionError(mode)


def plant(fault: str) -> None:
    """Make rank R fail in a stage of the real command. fault: MODE:STAGE:R; R may be `all`."""
    mode, stage, faulty = fault.split(":")
    import specdec_cli.engine.build as build
    import specdec_cli.engine.round as round_
    from specdec_cli.methods.draft_model import DraftModel

    owner, name = {
        "load": (build, "load"),
        "draft": (DraftModel, "propose"),
        "verify": (round_, "_score"),
    }[stage]
    works = getattr(owner, name)
    failing = _failing(works, mode, faulty, after=0 if stage == "load" else 2)

    def drafting(self: Any, *arguments: Any) -> Any:
        """Fail here only on ranks that hold a part of the draft, or if all ranks fail."""
        takes_part = faulty == "all" or self.model is not None
        return (failing if takes_part else works)(self, *arguments)

    setattr(owner, name, drafting if stage == "draft" else failing)


def _failing(
    function: Callable[..., Any], mode: str, faulty: str, after: int
) -> Callable[..., Any]:
    """A wrapper of `function` that works `after` times and then fails on rank `faulty`."""
    calls = iter(range(after))

    @functools.wraps(function)
    def failing(*arguments: Any, **options: Any) -> Any:
        is_faulty = faulty in ("all", os.environ.get("RANK"))
        if is_faulty and next(calls, None) is None:
            fail(mode)
        return function(*arguments, **options)

    return failing
