"""Silences stderr while ranks connect. No error is hidden, since failures raise exceptions."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def meeting_quietly() -> Iterator[None]:
    """Discard writes to stderr's descriptor during the block.

    gloo writes messages there if a rank leaves while the others connect to it.
    """
    try:
        held = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(held, 2)
        os.close(held)
        os.close(nowhere)
