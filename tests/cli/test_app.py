"""The shell around the commands: exit codes, streams, signals and the single JSON document."""

import atexit
import contextlib
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import typer

from specdec_cli import __version__
from specdec_cli.app import app, main
from specdec_cli.commands.options import Json, Verbose
from specdec_cli.errors import ExitCode, RunError, SetupError, SpecdecError, UsageError
from specdec_cli.experiment.folders.record_lines import to_json
from specdec_cli.signals import _USUAL

ROOT = Path(__file__).parents[2]
Body = Callable[[], None]


@pytest.fixture
def command() -> Iterator[Callable[[Body], None]]:
    """Registers a body as `specdec boom` during a test."""

    def register(body: Body) -> None:
        def boom(as_json: Json = False, verbose: Verbose = False) -> None:
            body()

        app.command("boom")(boom)

    before = list(app.registered_commands)
    yield register
    app.registered_commands[:] = before


def raiser(error: BaseException) -> Body:
    def body() -> None:
        typer.echo('{"half": "a document"}')
        raise error

    return body


class OutOfMemoryError(RuntimeError):
    """An error with the name of torch's, which this test does not import."""


class LosslessnessError(SpecdecError):
    code = ExitCode.LOSSLESSNESS


OUTCOMES: dict[str, tuple[BaseException, int, str | None]] = {
    "run": (RunError("rank 1 died", "look at its log"), 1, "rank 1 died"),
    "usage": (UsageError("bad prompt"), 2, "bad prompt"),
    "lossless": (LosslessnessError("token 5 differs"), 4, "token 5 differs"),
    "setup": (SetupError("no such model: x"), 5, "no such model: x"),
    "parser": (typer.BadParameter("not a list"), 2, "Invalid value: not a list"),
    "unexpected": (KeyError("x"), 1, "KeyError: 'x'"),
    "assertion": (AssertionError(), 1, "AssertionError"),
    "multi-line": (ValueError("first\nsecond"), 1, "ValueError: first"),
    "memory": (MemoryError(), 5, "out of memory: no memory left"),
    "gpu-memory": (OutOfMemoryError("CUDA out of memory. Tried"), 5, "out of memory: CUDA out"),
    "cpu-memory": (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 5, "out of memory"),
    "disk-full": (OSError(errno.ENOSPC, "No space left on device", "/x"), 5, "No space left on"),
    "large-file": (OSError(errno.EFBIG, "File too large"), 5, "cannot write the result: File too"),
    "fork": (BlockingIOError(errno.EAGAIN, "no"), 1, "BlockingIOError: [Errno 11] no"),
    "forbidden": (PermissionError(errno.EACCES, "Permission denied", "/x"), 5, "Permission denied"),
    "no-temporary": (FileNotFoundError(2, "No usable temporary directory"), 5, "No usable temp"),
    "few-files": (RuntimeError("pipe: Too many open files"), 5, "RuntimeError: pipe: Too many"),
    "interrupt": (KeyboardInterrupt(), 130, "interrupted"),
    "abort": (typer.Abort(), 130, "interrupted"),
    "terminate": (SystemExit(143), 143, "terminated"),
    "broken-pipe": (BrokenPipeError(errno.EPIPE, "Broken pipe"), 141, None),
}


@pytest.mark.parametrize("case", OUTCOMES)
def test_outcomes(
    case: str, command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]
) -> None:
    error, code, message = OUTCOMES[case]
    command(raiser(error))
    assert main(["boom"]) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    if message is None:
        assert captured.err == ""
    else:
        assert captured.err.startswith(f"error: {message}")

    assert main(["boom", "--json"]) == code
    document = json.loads(capsys.readouterr().out)
    assert list(document) == ["error"]
    assert document["error"]["code"] == code
    if message is not None:
        assert document["error"]["message"].startswith(message)


def test_hint_and_traceback(
    command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raiser(RunError("rank 1 died", "look at its log")))
    main(["boom"])
    assert capsys.readouterr().err == "error: rank 1 died\nhint: look at its log\n"
    few = SetupError("cannot load the tokenizer", "the model folder needs its tokenizer files")
    few.__cause__ = OSError(errno.EMFILE, "Too many open files")
    command(raiser(few))
    main(["boom"])
    assert capsys.readouterr().err.endswith("\nhint: raise the limit on open files (ulimit -n)\n")
    main(["boom", "-v"])
    assert "Traceback (most recent call last)" in capsys.readouterr().err
    command(raiser(ZeroDivisionError("oh")))
    main(["boom"])
    assert "-v for the traceback" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 3, 4])
def test_a_command_may_choose_its_code_and_keep_its_result(
    code: int, command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        typer.echo('{"result": 1}')
        raise typer.Exit(code)

    command(body)
    for arguments in (["boom"], ["boom", "--json"]):
        assert main(arguments) == code
        captured = capsys.readouterr()
        assert json.loads(captured.out) == {"result": 1} and captured.err == ""


def test_failing_in_silence_still_gives_a_document(
    command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        raise typer.Exit(1)

    command(body)
    assert main(["boom", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["code"] == 1


def test_messages_are_inert_on_a_terminal(
    command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command(raiser(UsageError("[red]\x1b[31m\x07\r\udcff[/red]")))
    assert main(["boom"]) == 2
    assert capsys.readouterr().err == "error: [red]\\x1b[31m\\x07\nerror: \\udcff[/red]\n"


@pytest.mark.parametrize(
    "arguments",
    [[], ["nope"], ["--nope"], ["recipe"], ["recipe", "show"], ["recipe", "ls", "--jsn"]],
    ids=" ".join,
)
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ")
    assert "\nhint: " in captured.err
    assert main([*arguments, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == 2


@pytest.mark.parametrize(
    ("arguments", "schema"),
    [
        (["ls"], "specdec.recipes/1"),
        (["show", "demo"], "specdec.recipe/1"),
        (["validate", "demo"], "specdec.recipe-validate/1"),
    ],
)
def test_documents_about_recipes_name_their_schema(
    arguments: list[str], schema: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["recipe", *arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == schema


def test_the_name_alone_shows_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    told = capsys.readouterr().err
    assert main(["--help"]) == 0
    assert told.partition("\n\n")[2] == capsys.readouterr().out


@pytest.mark.parametrize("command", ["generate", "sweep-k", "compare-tp", "profile-blocks"])
def test_help_cuts_no_name_at_80_columns(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    assert re.search(r"^  (-k, )?--(k|num-speculative-tokens) |--device DEVICE", shown, re.M)


def test_json_after_a_double_dash_is_no_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe", "show", "--", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--version", "-V"):
        assert main([option]) == 0
        assert capsys.readouterr().out == f"specdec {__version__}\n"
    assert main(["--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for code in (
        "0 done",
        "1 run failed",
        "2 bad usage",
        "3 partial",
        "4 lossless",
        "5 env",
        "143",
    ):
        assert code in text
    assert "compare-tp-ranks" not in text, "which users do not start"


def test_help_honours_columns_and_no_color() -> None:
    done = specdec("--help", COLUMNS="50", NO_COLOR="1", FORCE_COLOR="1", TERM="xterm-256color")
    assert done.returncode == 0
    assert "\x1b[3" not in done.stdout  # no colours; bold and dim may stay
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    assert max(len(line) for line in plain.splitlines()) <= 50


def test_signals_in_process(
    command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]
) -> None:
    cleaned: list[str] = []

    def body() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            cleaned.append("up")

    command(body)
    before = signal.getsignal(signal.SIGTERM)
    assert main(["boom", "--json"]) == 143
    assert cleaned == ["up"]
    assert json.loads(capsys.readouterr().out)["error"]["message"] == "terminated"
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_handlers_are_given_back(number: int, command: Callable[[Body], None]) -> None:
    def body() -> None:
        assert signal.getsignal(number) != before

    command(body)
    before = signal.getsignal(number)
    assert main(["boom"]) == 0 and signal.getsignal(number) == before
    ignored = signal.signal(number, signal.SIG_IGN)  # like nohup
    try:
        command(lambda: os.kill(os.getpid(), number))
        assert main(["boom"]) == 0 and signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, ignored)


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_what_a_library_makes_of_a_signal(
    number: int, code: int, command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> None:
        try:
            os.kill(os.getpid(), number)
            time.sleep(5)
        except BaseException as end:
            raise ModuleNotFoundError("Could not import module 'AttentionInterface'") from end

    command(body)
    assert main(["boom"]) == code
    assert re.fullmatch("error: (interrupted|terminated)\n", capsys.readouterr().err)


def test_a_terminal_that_closes_is_a_signal(
    command: Callable[[Body], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Writing to it fails while the command cleans up, and the disk has not failed."""
    for file, code, told in ((None, 143, "terminated"), ("/x", 5, "Input/output error: /x")):

        def body(file: str | None = file) -> None:
            try:
                os.kill(os.getpid(), signal.SIGHUP)
                time.sleep(5)
            finally:
                raise OSError(errno.EIO, "Input/output error", file)

        command(body)
        assert main(["boom"]) == code
        assert capsys.readouterr().err == f"error: {told}\n"


@pytest.mark.parametrize("waits", [False, True])
def test_a_signal_after_the_results_changes_nothing_unless_an_exit_handler_hangs(
    command: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    """Exit handlers of libraries run then, and an exception there is told as a traceback. Signals
    much later mean that one of them hangs."""
    ended: list[int] = []
    last: list[Callable[[], object]] = []

    def leave(_: int) -> None:
        assert {signal.getsignal(number) for number in _USUAL}.isdisjoint(_USUAL.values())
        time.sleep(0.06 * waits)
        for number in _USUAL:
            os.kill(os.getpid(), number)

    command(lambda: None)
    monkeypatch.setattr("specdec_cli.signals._SAME_REQUEST_S", 0.05 if waits else 60.0)
    monkeypatch.setattr(sys, "argv", ["specdec", "boom"])
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(atexit, "register", lambda *call: last.append(partial(*call)))
    monkeypatch.setattr("specdec_cli.app._leave", leave)
    before = {number: signal.signal(number, usual) for number, usual in _USUAL.items()}
    try:
        assert main() == 0 and ended == ([130, 143, 143] if waits else [])
        (ignore,) = last
        ignore()
        assert [signal.getsignal(number) for number in _USUAL] == [signal.SIG_IGN] * 3
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_much_later_is_another_request(
    command: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first exception may be lost in a `__del__`, or clean-up may hang."""
    monkeypatch.setattr("specdec_cli.signals._SAME_REQUEST_S", 0.1)
    heeded: list[bool] = []

    def body() -> None:
        for wait in (0.0, 0.0, 0.2):
            time.sleep(wait)
            with contextlib.suppress(SystemExit):
                heeded.append(False)
                os.kill(os.getpid(), signal.SIGTERM)
                continue
            heeded[-1] = True

    command(body)
    assert main(["boom"]) == 0 and heeded == [True, False, True]


@pytest.mark.parametrize("number, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_disturbs_nothing(number: int, code: int) -> None:
    """A second signal interrupts neither clean-up, nor the message, nor the interpreter's end."""
    program = """
import sys, time
from specdec_cli.app import app, main

class Slow:
    def __del__(self):  # where an exception would be told as a traceback
        time.sleep(0.2)

def boom():
    slow = Slow()
    try:
        print("ready", file=sys.stderr, flush=True)
        time.sleep(20)
    finally:
        time.sleep(0.1)

app.command("boom")(boom)
late = Slow()
sys.exit(main())
"""
    child = subprocess.Popen(
        [sys.executable, "-c", program, "boom"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    assert child.stderr is not None and child.stderr.readline() == "ready\n"
    for _ in range(14):  # so that signals hit every stage of its end
        child.send_signal(number)
        time.sleep(0.05)
    _, told = child.communicate(timeout=30)
    assert re.fullmatch("error: (interrupted|terminated)\n", told) and child.returncode == code


def test_help_on_a_terminal_of_no_width() -> None:
    for columns in ("0", "9" * 30):
        assert "Usage: specdec" in specdec("--help", COLUMNS=columns).stdout


def specdec(
    *arguments: str, stdout: int = subprocess.PIPE, **extra: str
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **extra}
    return subprocess.run(
        [sys.executable, "-m", "specdec_cli", *arguments],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_disk_full(flags: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = specdec("recipe", "schema", *flags, stdout=full.fileno())
    assert done.returncode == 5
    assert "Traceback" not in done.stderr
    assert re.fullmatch("error: (cannot write the result: )?No space left on device\n", done.stderr)


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_output_that_is_written_in_part(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With PYTHONUNBUFFERED, as here, Python itself would drop the rest in silence."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)  # a pipe that is full takes no more
    raw = io.FileIO(writing, "w")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "utf-8", write_through=True))
    with contextlib.closing(raw), open(reading, "rb"):
        raw.write(b" " * (1 << 20))
        os.read(reading, 4096)
        assert main(["recipe", "schema", *flags]) == 5
    told = capsys.readouterr().err
    assert told == "error: cannot write the result: write could not complete without blocking\n"


def test_output_that_cannot_be_written_to() -> None:
    with open(os.devnull) as read_only:
        done = specdec("recipe", "schema", stdout=read_only.fileno())
    assert done.returncode == 5
    assert done.stderr == "error: cannot write the result: Bad file descriptor\n"


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_closed_pipe(flags: tuple[str, ...]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = specdec("recipe", "schema", *flags, stdout=writing)
    finally:
        os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == ""


def test_ascii_terminal() -> None:
    done = specdec("recipe", "show", "caf\u00e9\u2028", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert done.returncode == 2 and "Traceback" not in done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_json_in_any_encoding(
    encoding: str, command: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    document = {"text": "\u00e9\U0001f600\u20ac \\ \x9b"}
    command(lambda: typer.echo(to_json(document)))
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding))
    assert main(["boom", "--json"]) == 0
    assert json.loads(written.getvalue().decode(encoding)) == document


def test_a_working_directory_that_is_gone(
    command: Callable[[Body], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)

    def body() -> None:
        gone.rmdir()
        os.path.abspath("relative")

    command(body)
    for arguments in (["boom"], ["recipe", "ls"]):  # while the command runs, and before it
        assert main(arguments) == 5
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("error: the working directory is gone\nhint: ")


@pytest.mark.parametrize(
    ("cause", "code", "message"),
    [
        # Python remembers this, to end by the signal.
        ("exec('raise KeyboardInterrupt')", 130, "interrupted"),
        ("os.kill(os.getpid(), signal.SIGINT)", 130, "interrupted"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "terminated"),
        ("os.kill(os.getpid(), signal.SIGHUP)", 143, "terminated"),
    ],
)
def test_a_signal_while_it_begins(cause: str, code: int, message: str) -> None:
    """Only the entry point itself can catch a signal during imports."""
    done = stopped_at_once(cause, stderr=subprocess.PIPE)
    assert done.returncode == code and done.stderr == f"error: {message}\n"
    document = {"error": {"code": code, "message": message, "hint": None}}
    assert json.loads(done.stdout) == document


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_signal_while_it_begins_ends_it_though_nobody_can_be_told() -> None:
    with open("/dev/full", "w") as full:
        done = stopped_at_once("os.kill(os.getpid(), signal.SIGHUP)", stderr=full.fileno())
    assert done.returncode == 143


def stopped_at_once(cause: str, stderr: int) -> subprocess.CompletedProcess[str]:
    """A command during whose imports `cause` happens."""
    program = f"""
import os, signal, sys

class Stopping:
    def find_spec(self, name, path=None, target=None):
        if name == "specdec_cli.app":
            {cause}

sys.meta_path.insert(0, Stopping())
from specdec_cli.__main__ import main
sys.exit(main())
"""
    return subprocess.run(
        [sys.executable, "-c", program, "recipe", "ls", "--json"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        check=False,
    )


def test_an_incomplete_installation_is_one_line() -> None:
    program = (
        "import sys; sys.modules['typer'] = None; from specdec_cli.__main__ import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 5 and "Traceback" not in done.stderr
    assert done.stderr.startswith("error: cannot import typer: ")
    assert json.loads(done.stdout)["error"]["hint"] == "is the installation complete?"
