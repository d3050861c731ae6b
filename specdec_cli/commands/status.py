"""Shows a command's messages and log on stderr, and draws the plots in its run folder.

Imports nothing heavy.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from specdec_cli.errors import LOG, LOGGED, ExitCode, Notice, SetupError
from specdec_cli.stages import begin_stage
from specdec_cli.text import inert, say, shortened


def warn(warnings: Iterable[str | Notice]) -> None:
    for warning in warnings:
        told = warning.message if isinstance(warning, Notice) else warning
        say(f"warning: {shortened(told)}")


def show(
    document: Mapping[str, Any], print_results: Callable[[Any], None], *, as_json: bool
) -> None:
    """Print a document as JSON or as text. If nothing was measured, it contains an error, which is
    printed on stderr too."""
    from specdec_cli.experiment.folders.record_lines import to_json

    if as_json:
        typer.echo(to_json(document))
    else:
        print_results(document)
    if "error" in document:
        say(f"error: {shortened(document['error']['message'])}")
        say(f"hint: {document['error']['hint']}")


def conclude(
    document: Mapping[str, Any],
    print_results: Callable[[Any], None],
    said: Iterable[Notice],
    folder: Path | None,
    *,
    as_json: bool,
) -> None:
    """Warn of what was not `said` or logged yet, write a folder's plots, and show the results."""
    from specdec_cli.experiment.folders.settings_file import unsaid

    warn(unsaid(document["warnings"], [*said, *LOGGED]))
    if folder is not None:
        write_pictures(folder)
    show(document, print_results, as_json=as_json)


def strictly(code: ExitCode, warnings: Iterable[Notice], *, strict: bool) -> ExitCode:
    """Return the exit code of a run. With --strict, it is 3 (partial) instead of 0 if a warning
    says that the timings were disturbed."""
    from specdec_cli.experiment.statistics.noise import disturbances

    is_bad = strict and code == ExitCode.OK and disturbances(warnings)
    return ExitCode.PARTIAL if is_bad else code


def write_pictures(folder: Path) -> None:
    """Write `report.html` and `plots/`, or warn that matplotlib is missing."""
    from specdec_cli.report.content import Content
    from specdec_cli.report.folder import read_folder
    from specdec_cli.report.write import write_report

    try:
        write_report(Content(read_folder(folder)), folder, ("html", "png"))
    except SetupError as problem:
        warn([f"no plots: {problem.message}"])


@dataclass(slots=True)
class Stages:
    """Shows the progress of a command's preparation, which consists of stages.

    show: displays a stage's name, the number of stages done, and the total; None with --quiet.
    """

    show: Callable[[str, int, int], None] | None
    _done: int = -1
    _total: int = 0

    def expect(self, total: int) -> None:
        """Set the number of stages."""
        self._total = total

    def begin(self, what: str) -> None:
        """End the previous stage and begin `what`."""
        self._done += 1
        begin_stage(what)
        if self.show is not None:
            self.show(what, self._done, self._total)


@contextmanager
def waiting(what: str, *, quiet: bool) -> Iterator[Stages]:
    """Show `what`, and then the stages of the block, on stderr: as a progress bar or, if nothing
    can be redrawn there, as a line after every half minute without output."""
    from specdec_cli.terminal.progress import Ticker, can_redraw

    if quiet:
        yield Stages(None)
        return
    if not can_redraw():
        latest = [what]
        ticker = Ticker(lambda: latest[-1])
        try:
            yield Stages(lambda stage, done, total: latest.append(stage))
        finally:
            ticker.close()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    progress = Progress(
        SpinnerColumn("dots", style="dim"),
        TextColumn("{task.description}", style="dim", markup=False),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        transient=True,
        # By default, rich redirects stdout to its console, here stderr.
        redirect_stdout=False,
    )
    task = progress.add_task(what, total=None)

    def show(stage: str, done: int, total: int) -> None:
        progress.update(task, description=stage, completed=done, total=total or None)

    try:  # start inside `try`, or an interrupt could leave the cursor hidden
        progress.start()
        yield Stages(show)
    finally:
        progress.stop()


class _InertFormatter(logging.Formatter):
    """Writes log records like other messages, and escapes control characters in tracebacks."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {record.message}"

    def formatException(self, ei: Any) -> str:
        return inert(super().formatException(ei))


class _Kept(logging.Filter):
    """Keeps warnings for the command's document and logs each only once, because the plans for
    several ranks or drafts repeat them."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno == logging.WARNING:
            if (told := Notice(LOG, record.getMessage())) in LOGGED:
                return False
            LOGGED.append(told)
        return True


def _inert_record(*fields: Any, **more: Any) -> logging.LogRecord:
    """Make a log record whose message is escaped and shortened, because it may contain names of
    files and tensors. All libraries in the process use this factory."""
    record = logging.LogRecord(*fields, **more)
    with contextlib.suppress(
        TypeError, ValueError
    ):  # the arguments do not match the message's format
        record.msg, record.args = inert(shortened(record.getMessage())), ()
    return record


def set_up_logging(*, verbose: bool) -> None:
    """Send the package's log to stderr: only warnings, or everything with -v.

    Warnings also go into the command's document.
    """
    handler = logging.StreamHandler()
    handler.setLevel(logging.DEBUG)
    handler.setFormatter(_InertFormatter())
    logging.setLogRecordFactory(_inert_record)
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logger = logging.getLogger("specdec")
    logger.setLevel(logging.DEBUG if verbose else logging.WARNING)
    if not any(isinstance(one, _Kept) for one in logger.filters):
        logger.addFilter(_Kept())
    LOGGED.clear()
