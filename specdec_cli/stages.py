"""Logs the stages of a command's start-up. Imports nothing heavy, so that it adds no time to the
start-up."""

import logging
import time

_log = logging.getLogger("specdec")
_BEGUN = time.perf_counter()

FIRST_TOKEN = "the first token"


def begin_stage(what: str) -> None:
    """Log, with -v, that the stage `what` begins, and how many seconds have passed since this
    module was imported."""
    _log.debug("%.3f s: %s", time.perf_counter() - _BEGUN, what)
