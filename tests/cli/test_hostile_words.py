"""Words for hostile names, cells and libraries: one line, said where it is seen."""

from pathlib import Path

import pytest

from specdec_cli.app import main
from specdec_cli.commands import status
from specdec_cli.report.export import _cell
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
