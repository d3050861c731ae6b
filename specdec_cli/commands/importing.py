"""Importing what is heavy. Imports nothing heavy itself."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Around imports of the engine, which bring torch and transformers.

    They make a million objects that stay to the end. The garbage collector would go through them
    again and again while they are imported, and later whenever a run collects its own.
    """
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
