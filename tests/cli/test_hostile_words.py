"""Messages about hostile names, cells and libraries: one line, on the stream that users see."""

import json
import logging
import resource
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from specdec_cli.app import main
from specdec_cli.commands import starting, status
from specdec_cli.commands.status import set_up_logging
from specdec_cli.errors import SetupError
from specdec_cli.report.export import _cell
from tests.launch.helpers import marked
from tests.report_helpers import sweep_points, write_folder


@pytest.mark.parametrize("text", ["＝1+1", "＋1", "＠SUM(1)", " =1", "\u3000＝1", "=1"])
def test_signs_that_a_spreadsheet_reads_as_formulas(text: str) -> None:
    assert _cell(text).startswith("'")
    assert _cell(f"a{text}") == f"a{text}"


def test_missing_plots_are_said_whatever_the_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_folder(tmp_path, sweep_points(ks=(0, 1), batch_sizes=(1,)))
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    status.write_pictures(folder)
    assert capsys.readouterr().err.startswith("warning: no plots: ")


@pytest.mark.parametrize("arguments", [["sweep-k", "-o", "a\nb"], ["report", "a\rb"]])
def test_names_with_line_breaks_are_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr().err.splitlines()
    assert "has a line break" in said[0] and len(said) == 2


@pytest.mark.parametrize("command", [["report"], ["merge", "-o", "x"], ["recipe", "show"]])
def test_endless_names_take_one_short_line(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "n" * 5000]) in (2, 5)
    assert max(map(len, capsys.readouterr().err.splitlines())) < 1100


@pytest.mark.parametrize(
    ("command", "mebibytes"), [("generate", 540), ("generate", 1025), ("report .", 100)]
)
def test_too_little_memory_for_imports_is_one_line(command: str, mebibytes: int) -> None:
    """With 540 MiB torch would abort; with 1025 MiB scipy's OpenBLAS would ask without end."""
    limited = f"ulimit -v {mebibytes << 10}; exec {sys.executable} -m specdec_cli {command} --json"
    ended = subprocess.run(
        ["bash", "-c", limited], env=marked(), capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 5, ended.stderr
    assert json.loads(ended.stdout)["error"]["code"] == 5
    said = ended.stderr.splitlines()
    assert [line.partition(":")[0] for line in said] == ["error", "hint"]


def test_the_room_for_imports_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    starting.check_room("x", 2**40)
    resource.setrlimit(resource.RLIMIT_AS, (2**50, hard))
    try:
        starting.check_room("x", 1)
        with pytest.raises(
            SetupError, match=r"x needs 1099511627776 MiB .* of 1073741824 MiB leav"
        ):
            starting.check_room("x", 2**40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (held + 2**27, hard))
    with pytest.raises(SetupError, match="x needs 256 MiB"):  # and the process's own count
        starting.check_room("x", 256)


def test_a_library_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        try:
            raise ImportError("libx.so: failed to map segment from shared object")
        except ImportError as problem:
            raise ImportError("IMPORTANT: READ THIS", name="numpy") from problem

    monkeypatch.setattr("specdec_cli.report.folder.refuse_special_files", fail)
    assert main(["report", str(tmp_path)]) == 5
    said = capsys.readouterr().err.splitlines()
    assert (
        said[0] == "error: cannot import numpy: libx.so: failed to map segment from shared object"
    )


def test_warnings_are_short_and_inert(capsys: pytest.CaptureFixture[str]) -> None:
    """They may come from the settings of a run folder, or name a tensor."""
    status.warn(["\x1b[31m" + "n" * 5000])
    said = capsys.readouterr().err
    assert said.startswith("warning: \\x1b[31mnnn") and len(said) < 1100


def test_records_of_libraries_are_short_and_inert(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "_logRecordFactory", logging.LogRecord)
    set_up_logging(verbose=False)
    lines = StringIO()
    handler = logging.StreamHandler(lines)
    handler.setFormatter(logging.Formatter("%(message)s"))
    library = logging.getLogger("a library")
    library.addHandler(handler)
    library.warning("\x07%s 100%%", "n" * 5000)
    said = lines.getvalue()
    assert said.startswith("\\x07nnn") and said.endswith("n 100%\n") and len(said) < 1100
