"""Keeps Python's garbage collector out of a block of code."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def garbage_stays() -> Iterator[None]:
    """Turn garbage collection off during the block. Reference counts still free most objects."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
