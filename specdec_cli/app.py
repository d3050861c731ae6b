"""The `specdec` command line: registers the commands, runs one, and delivers its result or error.

The commands are implemented elsewhere. This module does not import slow libraries such as torch, so
that help appears quickly.
"""

import atexit
import contextlib
import gc
import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import typer

from specdec_cli import __version__
from specdec_cli.commands import (
    compare_tp,
    generate,
    help_page,
    merge,
    methods,
    profile_blocks,
    recipe,
    report,
    sweep_k,
)
from specdec_cli.commands.outcome import (
    Outcome,
    after_exception,
    blame_signal,
    run_and_record,
    show_error,
)
from specdec_cli.errors import ExitCode, SpecdecError, UsageError
from specdec_cli.launch.rank import Rank, how_it_ended
from specdec_cli.launch.reports import End, Report
from specdec_cli.launch.world import Place, find_place
from specdec_cli.signals import signals
from specdec_cli.text import JSON_ESCAPES

_EPILOG = (
    "Exit codes: 0 done · 1 run failed · 2 bad usage, recipe or prompts · 3 partial (the rest is "
    "saved) · 4 losslessness check failed · 5 environment (no such model, no device, out of "
    "memory, disk full) · 130 interrupted · 143 terminated"
)

app = typer.Typer(
    name="specdec",
    cls=help_page.Commands,
    help="Speculative decoding experiments: which draft, how many proposed tokens, how many GPUs.",
    epilog=_EPILOG,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's tables truncate option names on an 80-column terminal
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
app.command("generate", cls=help_page.OneSource)(generate.generate)
app.command("sweep-k", cls=help_page.OneSource)(sweep_k.sweep_k)
app.command("compare-tp", cls=help_page.OneSource)(compare_tp.compare_tp)
app.command(compare_tp.RANKS_COMMAND, hidden=True)(compare_tp.compare_tp_ranks)
app.command("merge", cls=help_page.Command)(merge.merge)
app.command("profile-blocks", cls=help_page.OneSource)(profile_blocks.profile_blocks)
app.command("report", cls=help_page.Command)(report.report)
app.command("methods", cls=help_page.Command)(methods.methods)
app.add_typer(recipe.app, name="recipe")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"specdec {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "-V", "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    if ctx.invoked_subcommand is None:
        raise UsageError("no command given", "`specdec --help` lists the commands")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code; no exception escapes.

    With --json, a command's standard output is held back until the command is done. If it fails
    after printing something, only the error is written. So the output is always one document: the
    result or the error.

    argv: the arguments. If None, those of this process are used, and the process may then end
    inside this call instead of returning, to save time.
    """
    code = _main(argv)
    if argv is None:
        _leave(code)
    return code


def _main(argv: Sequence[str] | None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_json = "--json" in options
    verbose = any(re.fullmatch(r"--verbose|-[qv]*v[qv]*", option) for option in options)
    program = [_module() if argv is None else "specdec_cli", *arguments]
    outcome = Outcome()
    held = io.StringIO()
    _forget_no_size()
    with signals(is_last=argv is None) as asked, _whole_writes():
        holding = contextlib.redirect_stdout(held) if as_json else contextlib.nullcontext()
        with _streams(JSON_ESCAPES if as_json else "backslashreplace"), holding:
            place = _place(program, verbose, outcome)
            if not outcome.failed:
                run_and_record(lambda: _command(arguments, place), outcome)
                blame_signal(asked, outcome)
        if place.rank is not None and outcome.failed:
            _end_rank(place.rank, outcome, asked)
        document = held.getvalue()
        is_mute = outcome.code and not document.strip() and not place.has_answered
        if as_json and (outcome.failed or is_mute):
            document = json.dumps({"error": outcome.document()}) + "\n" if outcome.is_said else ""
        show_error(outcome, verbose)
        # Show the list of commands if the user typed only `specdec`. Shell completion also runs
        # without arguments, but causes no UsageError, so it does not print the list.
        if not arguments and isinstance(outcome.error, UsageError):
            command = typer.main.get_command(app)
            context = command.make_context("specdec", [], resilient_parsing=True)
            typer.echo("\n" + command.get_help(context), err=True)
        _deliver(document, outcome)
        if place.rank is not None:
            _end_rank(place.rank, outcome, asked)
            if outcome.failed:
                place.rank.exit(outcome.code)
            if place.rank.seat.folder is not None:
                # The parent process reads this rank's exit code from its report. If this process
                # itself exited with a nonzero code, that would mean that the rank crashed.
                return 0
    return outcome.code


def _module() -> str:
    """Return the module that this process runs: `specdec_cli`, or a module that extends it."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec is not None else "specdec_cli"


def _place(program: Sequence[str], verbose: bool, outcome: Outcome) -> Place:
    try:
        place = find_place(program, os.environ, verbose=verbose)
    except SpecdecError as error:
        after_exception(error, outcome)
        return Place(tuple(program))
    outcome.is_said = place.rank is None or place.rank.tells_user
    return place


def _end_rank(rank: Rank, outcome: Outcome, asked: Sequence[signal.Signals] = ()) -> None:
    """Report how this rank ended. If the run failed and this rank must tell the user why, replace
    the error in `outcome` with the root cause, which may be another rank's error.

    asked: the signals received so far.
    """
    end = how_it_ended(outcome.error, outcome.code, failed=outcome.failed)
    if end is End.STOPPED and asked:
        outcome.message = f"was ended by {asked[0].name}"
    said = rank.end(
        Report(
            rank.seat.rank,
            end,
            outcome.code,
            outcome.message,
            outcome.hint,
            outcome.trace.rstrip(),
            is_common=isinstance(outcome.error, SpecdecError) and outcome.error.is_common,
        )
    )
    if said is not None and outcome.failed:
        outcome.is_said = True
        outcome.fail(said.code, said.explained, said.hint)
        outcome.trace = said.trace


def run_script(run: Callable[[], object]) -> int:
    """Run a function, report an error of it as a command does, and return the exit code."""
    outcome = Outcome()
    with signals(is_last=False) as asked:
        run_and_record(run, outcome)
        blame_signal(asked, outcome)
    show_error(outcome, verbose=False)
    _deliver("", outcome)
    return outcome.code


def _command(arguments: list[str], place: Place) -> object:
    command = typer.main.get_command(app)
    return command.main(args=arguments, prog_name="specdec", standalone_mode=False, obj=place)


def _deliver(document: str, outcome: Outcome) -> None:
    """Write the document that was held back to stdout, and flush stdout. If stdout cannot be
    written, for example because the disk is full or the pipe is closed, record this in `outcome`,
    unless the command has failed already."""
    if sys.stdout is None:  # started with stdout closed (>&-)
        return
    try:
        sys.stdout.write(document)
        sys.stdout.flush()
    except (OSError, KeyboardInterrupt, SystemExit) as error:
        _discard_stdout()
        if outcome.failed:  # the earlier error is reported instead
            return
        if isinstance(error, BrokenPipeError):
            outcome.fail(ExitCode.SIGPIPE, None)
        elif isinstance(error, OSError):
            outcome.fail(ExitCode.ENVIRONMENT, f"cannot write the result: {error.strerror}")
        else:  # interrupted while a pager reads the output
            is_interrupt = isinstance(error, KeyboardInterrupt)
            outcome.fail(ExitCode.SIGINT if is_interrupt else ExitCode.SIGTERM, None)
        show_error(outcome, verbose=False)


def _discard_stdout() -> None:
    """Redirect stdout to /dev/null. Otherwise the interpreter's flush at exit would fail again."""
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)


def _leave(code: int) -> None:
    """Skip Python's normal shutdown if torch has been imported: freeing torch's million objects one
    by one would take a second. Exit handlers still run.

    If CUDA was used, return so that the process exits normally, because profilers write their
    records then. After an interrupt, always exit at once: otherwise the pending signal may end
    Python, and the exit code would not be `code`.
    """
    cuda = sys.modules.get("torch.cuda")
    if code != ExitCode.SIGINT and (cuda is None or cuda.is_initialized()):
        # Objects that were frozen after the imports would never be freed, and libraries warn about
        # such objects at exit.
        gc.unfreeze()
        return
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    os._exit(code)


def _forget_no_size() -> None:
    """Remove COLUMNS or LINES from the environment if its value, such as 0, is not a valid terminal
    size. With an invalid size, rich would show nothing, or fail."""
    for name in ("COLUMNS", "LINES"):
        if not re.fullmatch("0*[1-9][0-9]{0,4}", os.environ.get(name, "1")):
            del os.environ[name]


@contextlib.contextmanager
def _whole_writes() -> Iterator[None]:
    """Buffer stdout by line in the block if it has no buffer (PYTHONUNBUFFERED). Without a buffer,
    a text may be written in part, and Python drops the rest and raises no error."""
    stdout = sys.stdout
    if not isinstance(stdout, io.TextIOWrapper) or not isinstance(stdout.buffer, io.RawIOBase):
        yield
        return
    number, encoding = stdout.fileno(), stdout.encoding
    with open(number, "w", buffering=1, encoding=encoding, closefd=False) as sys.stdout:
        try:
            yield
        finally:
            sys.stdout = stdout


@contextlib.contextmanager
def _streams(errors: str) -> Iterator[None]:
    """Escape characters that stdout cannot encode; restore streams that a command replaced.

    errors: the name of the handler that escapes them.
    """
    stdout, stderr = sys.stdout, sys.stderr
    # Python sets a stream to None if it was closed when the command started (>&-). Commands expect
    # a file, so open /dev/null in its place.
    closed = []
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            closed.append(open(os.devnull, "w"))
            setattr(sys, name, closed[-1])
    if isinstance(stdout, io.TextIOWrapper):
        stdout.reconfigure(errors=errors)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = stdout, stderr
        for nothing in closed:
            nothing.close()
