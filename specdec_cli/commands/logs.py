"""A command's logger: escaped lines on stderr, and warnings kept for the command's document."""

import contextlib
import logging
from typing import Any

from specdec_cli.errors import LOGGED, Notice
from specdec_cli.text import inert, shortened


class _InertFormatter(logging.Formatter):
    """Escapes control characters in tracebacks."""

    def formatException(self, ei: Any) -> str:
        return inert(super().formatException(ei))


class _Kept(logging.Filter):
    """Keeps warnings for the command's document."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING:
            LOGGED.append(Notice("log", record.getMessage()))
        return True


def _inert_record(*fields: Any, **more: Any) -> logging.LogRecord:
    """A record of any library, escaped and shortened: it may hold names of files and tensors."""
    record = logging.LogRecord(*fields, **more)
    with contextlib.suppress(TypeError, ValueError):  # the message does not fit its arguments
        record.msg, record.args = inert(shortened(record.getMessage())), ()
    return record


def set_up_logging(*, verbose: bool) -> None:
    """Send the package's logger to stderr: warnings, and everything with -v.

    Warnings are kept for the command's document too.
    """
    handler = logging.StreamHandler()
    handler.setLevel(logging.DEBUG)
    handler.setFormatter(_InertFormatter("%(levelname)s: %(message)s"))
    logging.setLogRecordFactory(_inert_record)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logger = logging.getLogger("specdec")
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
    if not any(isinstance(one, _Kept) for one in logger.filters):
        logger.addFilter(_Kept())
    LOGGED.clear()
