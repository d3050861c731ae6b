"""Runs `specdec` command lines in forks of this process, and judges how they end.

The parent has imported what the commands import and runs nothing itself, so a case costs no
imports. A fork has a limit of time and of memory. Knows nothing of what the cases are.
"""

import contextlib
import importlib
import json
import os
import pkgutil
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SECONDS = 30.0
BYTES = 4 * 2**30
_NOISE = ("Traceback (most recent call last)", "panicked at", "Fatal Python error", "Exception ign")
_LONGEST_LINE = 1100
_ONE_LINE = ("config", "index", "tokenizer", "weights", "head", "files", "folder", "meanwhile")
_AT_A_LINE = re.compile(r"error: (?P<place>.+?\.yaml:\d+: \S+|.+?:\d+): ")
_NOT_MADE = 99


@dataclass(frozen=True)
class Case:
    """A command line for a folder of its own.

    told: what is hostile about it. codes: the exit codes that may end it. setup: run in the fork
    before the command, such as to change a folder while the command writes there.
    """

    number: int
    kind: str
    told: str
    arguments: list[str]
    codes: tuple[int, ...] = (0, 1, 2, 3, 5)
    setup: Callable[[], None] | None = None


@dataclass
class Ended:
    """The end of a case. code: minus the signal that ended it. bytes: the most that was resident.

    problems: empty for an end as promised.
    """

    number: int
    folder: Path
    code: int
    seconds: float
    bytes: int
    kind: str = ""
    told: str = "the case could not be made"
    arguments: list[str] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def out(self) -> str:
        return (self.folder / ".out").read_text(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / ".err").read_text(errors="replace")

    @property
    def lines(self) -> list[str]:
        """The errors that the command told."""
        return [one for one in self.err.splitlines() if one.startswith("error:")]

    @property
    def line(self) -> str:
        """The first of them."""
        return next(iter(self.lines), "")


def preload(configs: Iterable[str] = ()) -> None:
    """Import what commands import; torch computes nothing here, so no thread starts.

    configs: modules of transformers' configs, whose models are imported too.
    """
    import specdec_cli

    for module in pkgutil.walk_packages(specdec_cli.__path__, "specdec_cli."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in ("datasets", "pyarrow.parquet", "transformers.models.auto.tokenization_auto"):
        importlib.import_module(name)
    for name in configs:
        importlib.import_module(name.replace("configuration_", "modeling_"))


Make = Callable[[int, Path], Case]


def run_cases(
    numbers: Sequence[int], make: Make, scratch: Path, *, jobs: int = 1, seconds: float = SECONDS
) -> Iterator[Ended]:
    """Run cases, at most `jobs` at a time, and yield them as they end.

    make: writes the files of a case into its folder and returns it; runs in the fork. seconds:
    limit of a case, without those in which it was starved.
    """
    waiting, running = list(reversed(numbers)), dict[int, tuple[int, Path, float]]()
    while waiting or running:
        while waiting and len(running) < jobs:
            number = waiting.pop()
            folder = scratch / f"case-{number}"
            folder.mkdir(parents=True)
            running[_forked(number, make, folder)] = number, folder, time.monotonic()
        for child, (number, folder, began) in list(running.items()):
            ended, status, usage = os.wait4(child, os.WNOHANG)
            spent = time.monotonic() - began
            if not ended and spent > seconds and spent - starved(child) > seconds:
                os.killpg(child, signal.SIGKILL)
                ended, status, usage = os.wait4(child, 0)
            if ended:
                del running[child]
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)  # what it left behind
                code = os.waitstatus_to_exitcode(status)
                end = Ended(number, folder, code, spent, usage.ru_maxrss * 1024)
                if (file := folder / ".case").exists():
                    for name, value in json.loads(file.read_text()).items():
                        setattr(end, name, value)
                end.problems = list(problems_of(end, seconds))
                yield end
        time.sleep(0.01)


def starved(group: int) -> float:
    """Seconds that the living processes of a group were ready to run and other work ran instead.

    On a busy machine an honest case takes long by that alone. A case that loops gets to its limit
    all the same, and one that waits for nothing is not ready to run.
    """
    waited = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            after_name = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(after_name[2]) == group:
                waited += int((folder / "schedstat").read_text().split()[1])
    return waited / 1e9


def _forked(number: int, make: Make, folder: Path) -> int:
    """The process that makes and runs a case."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.setpgid(child, child)
        return child
    code = _NOT_MADE
    try:
        os.setpgid(0, 0)
        _redirect(folder)
        code = _run(make(number, folder), folder)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BaseException:
        with contextlib.suppress(BaseException):
            os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def _run(case: Case, folder: Path) -> int:
    told = ("kind", "told", "arguments", "codes")
    (folder / ".case").write_text(json.dumps({name: getattr(case, name) for name in told}))
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if case.setup is not None:
        case.setup()
    from specdec_cli.app import main  # as the setup left it

    return main(case.arguments)


def _redirect(folder: Path) -> None:
    """Point the standard streams to the case's files; nothing is piped in."""
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for descriptor, name in ((1, ".out"), (2, ".err")):
        made = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(made, descriptor)
        os.close(made)
    # As Python opens them in a UTF-8 locale.
    sys.stdin, sys.stdout = open(0), open(1, "w", encoding="utf-8")
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)


def problems_of(end: Ended, seconds: float = SECONDS) -> Iterator[str]:
    """The promises that an end breaks."""
    if end.code == -signal.SIGKILL and end.seconds > seconds:
        yield "hang"
        return
    if end.code < 0:
        yield f"crash: {signal.Signals(-end.code).name}"
        return
    if end.bytes > BYTES:
        yield f"memory: {end.bytes / 2**30:.1f} GiB"
    if end.code not in end.codes:
        yield f"exit code {end.code}"
    err = end.err
    if any(noise in err for noise in _NOISE) or "this error is unexpected" in err:
        yield "traceback"
    if max(map(len, err.splitlines()), default=0) > _LONGEST_LINE:
        yield "endless line"
    if len(end.lines) > 1 and not _are_several_problems(end):
        yield "several error lines"
    if any(char not in "\n\t" and ord(char) < 32 for char in err):
        yield "control characters"
    if end.code in (1, 2, 5) and not end.line and end.kind != "output":
        yield "no error line"
    if "--json" in end.arguments and (told := _document_problem(end)):
        yield f"--json: {told}"


def _are_several_problems(end: Ended) -> bool:
    """True if each line is a problem of its own: recipes and data may have several, and other
    files where each line names another place in a file, or another key of a recipe."""
    places = [found["place"] for line in end.lines if (found := _AT_A_LINE.match(line))]
    return end.kind not in _ONE_LINE or len(set(places)) == len(end.lines)


def _document_problem(end: Ended) -> str | None:
    def refuse(name: str) -> Any:
        raise ValueError(name)

    if not end.out.strip():
        return "empty"
    try:
        document = json.loads(end.out, parse_constant=refuse)
    except (ValueError, RecursionError) as problem:
        return f"not one document ({problem})"
    if end.code in (1, 2, 5) and not (isinstance(document, dict) and "error" in document):
        return "no error in the document"
    return None
