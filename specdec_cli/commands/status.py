"""What a terminal shows while a command is getting ready. Imports nothing heavy."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def waiting(what: str, *, quiet: bool) -> Iterator[None]:
    """Shows `what` with a spinner on stderr for as long as it takes, where that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    spinner = Spinner("dots", Text(what, style="dim"), style="dim")
    # stdout is left alone: rich would send what is printed there to stderr.
    live = Live(spinner, console=Console(file=sys.stderr), transient=True, redirect_stdout=False)
    try:  # around the start too: interrupted there, the cursor would stay hidden
        live.start()
        yield
    finally:
        live.stop()
