"""`specdec report`: streams, files, exit codes; what it says is in `tests/unit/test_report.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_cli.app import main
from tests.cli.generate_helpers import environment
from tests.report_helpers import sweep_points, write_folder

pytest.importorskip("matplotlib")
Capture = pytest.CaptureFixture[str]
ALL = [
    "acceptance.csv",
    "categories.csv",
    "plots/acceptance.png",
    "plots/categories.png",
    "plots/predictions.png",
    "plots/rounds.png",
    "plots/speedup.png",
    "points.csv",
    "report.html",
    "report.md",
    "vllm.json",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "run", sweep_points(ks=(0, 1, 2), batch_sizes=(1,)))


def files(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_everything_into_the_run_folder(folder: Path, capsys: Capture) -> None:
    before = files(folder)
    assert main(["report", str(folder)]) == 0
    captured = capsys.readouterr()
    answer, *written = captured.out.splitlines()
    assert answer.startswith("Best at batch size 1: k = ") and captured.err == ""
    assert sorted(written) == [str(folder / name) for name in ALL]
    assert files(folder) == sorted([*before, *ALL])
    assert main(["report", str(folder), "--format", "csv"]) == 0  # again


def test_formats_and_places(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "new" / "out"
    assert main(["report", str(folder), "-o", str(out), "--format", "md, csv"]) == 0
    assert files(out) == ["acceptance.csv", "categories.csv", "points.csv", "report.md"]
    assert main(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    capsys.readouterr()
    for arguments, words in [
        (["--format", "pdf"], "--format: 'pdf' is none of html, png"),
        (["--format", ""], "--format: '' is none of"),
        (["-o", "x.html", "--format", "csv"], "-o x.html is one page"),
    ]:
        assert main(["report", str(folder), *arguments]) == 2
        assert words in capsys.readouterr().err


def test_json(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (folder / "summary.json").unlink()
    assert main(["report", str(folder), "--json", "-o", str(tmp_path), "--format", "vllm"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["kind"] == "sweep-k" and document["is_partial"] is True
    assert document["files"] == [str(tmp_path / "vllm.json")]
    assert document["vllm"] == json.loads((tmp_path / "vllm.json").read_text())
    assert main(["report", str(tmp_path / "none"), "--json"]) == 2
    assert "no such folder" in json.loads(capsys.readouterr().out)["error"]["message"]


def test_a_partial_run_is_warned_of(folder: Path, capsys: Capture) -> None:
    (folder / "summary.json").unlink()
    assert main(["report", str(folder), "--format", "csv"]) == 0
    assert "warning: This run did not come to its end" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "taken").touch()
    assert main(["report", str(folder), "-o", str(tmp_path / "taken"), "--format", "csv"]) == 5
    assert "cannot write" in capsys.readouterr().err


def test_needs_no_torch_and_no_display(folder: Path) -> None:
    code = (
        "import sys; from specdec_cli.app import main; "
        f"code = main(['report', {str(folder)!r}]); "
        "print(code, {'torch', 'transformers', 'matplotlib.pyplot'} & sys.modules.keys())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, check=True, text=True
    )
    assert done.stdout.splitlines()[-1] == "0 set()"
