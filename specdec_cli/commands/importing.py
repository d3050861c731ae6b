"""Imports of heavy packages. Imports nothing heavy itself."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Wraps imports of the engine, which load torch and transformers.

    These create a million objects that live to the end. The garbage collector would traverse them
    again and again during the imports, and later with every collection of a run.
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
