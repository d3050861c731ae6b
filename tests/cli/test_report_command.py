"""`specdec report`: streams, files, exit codes. `tests/unit/test_report.py` tests the content."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_cli.app import main
from tests.cli.generate_helpers import environment, generate
from tests.cli.without_torch import without_torch
from tests.report_helpers import sweep_points, write_folder

pytestmark = pytest.mark.usefixtures("small_demo")

pytest.importorskip("matplotlib")
Capture = pytest.CaptureFixture[str]
ALL = [
    "acceptance.csv",
    "categories.csv",
    "comparisons.csv",
    "plots/acceptance.png",
    "plots/break_even.png",
    "plots/categories.png",
    "plots/comparisons.png",
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
    assert answer.startswith("Recommended at batch size 1: k = ") and captured.err == ""
    assert sorted(written) == [str(folder / name) for name in ALL]
    assert files(folder) == sorted([*before, *ALL])
    assert main(["report", str(folder), "--format", "csv"]) == 0  # again


def test_formats_and_places(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "new" / "out"
    assert main(["report", str(folder), "-o", str(out), "--format", "md, csv"]) == 0
    tables = ["acceptance.csv", "categories.csv", "comparisons.csv", "points.csv"]
    assert files(out) == [*tables, "report.md"]
    assert main(["report", str(folder), "-o", str(out / "x"), "--format", "tex,svg,pdf"]) == 0
    written = {file.suffix: file for file in (out / "x").rglob("*") if file.is_file()}
    assert (out / "x" / "plots" / "speedup.pdf").read_bytes().startswith(b"%PDF")
    assert b"<svg" in (out / "x" / "plots" / "speedup.svg").read_bytes()
    assert written.keys() == {".tex", ".svg", ".pdf"}
    head, begin, *_ = (out / "x" / "results.tex").read_text().splitlines()
    assert head.startswith("% ") and begin.startswith("\\begin{tabular}{lrr")
    assert main(["report", str(folder), "-o", str(tmp_path / "page.html")]) == 0
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    capsys.readouterr()
    (loop := tmp_path / "loop").symlink_to(loop)
    for arguments, words in [
        ([str(loop)], f"{loop}: no such folder"),
        (["--format", "gif"], "--format: 'gif' is none of html, png"),
        (["--format", ""], "--format: '' is none of"),
        (["-o", "x.html", "--format", "csv"], "-o x.html is a single page"),
        ([f"{folder}/"], f"{folder} is given twice"),
        ([str(tmp_path), f"{folder}/../{folder.name}"], f"{folder.name} is given twice"),
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
    assert "warning: This run is incomplete" in capsys.readouterr().err


@pytest.mark.parametrize("count", [1, 2])
def test_warnings_of_the_run_are_named_and_not_printed_again(
    folder: Path, capsys: Capture, count: int
) -> None:
    found = [
        {"code": "few_prompts", "message": "2 prompts are few", "evidence": {}},
        {"code": "cpu_load", "message": "it was loud", "evidence": {}},
        {"code": "cpu_load", "message": "it was loud again", "evidence": {}},
    ]
    summary = json.loads((folder / "summary.json").read_text()) | {"warnings": found}
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "recipe.yaml").write_text("speculation: {acceptance: synthetic}\n")
    folders = [str(folder), str(shutil.copytree(folder, folder.with_name("copy")))][:count]
    assert main(["report", *folders, "-o", str(folder / "page"), "--format", "md"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 * count and "Acceptance was given, not measured" in told[0]
    said = "3 warnings from the run (--json has the messages): few_prompts, cpu_load"
    assert told[1].startswith("warning: ") and told[1].endswith(said)
    page = (folder / "page" / "report.md").read_text()
    assert page.count("it was loud again") == count
    assert main(["report", *folders, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert sum("2 prompts are few" in one["message"] for one in document["warnings"]) == count


def test_an_empty_name_is_not_the_current_folder(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    for arguments in (["report", ""], ["merge", "", "-o", "new"]):
        assert main(arguments) == 2
        assert "Invalid value for 'DIR...': the name is empty" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "taken").touch()
    assert main(["report", str(folder), "-o", str(tmp_path / "taken"), "--format", "csv"]) == 5
    assert "cannot write" in capsys.readouterr().err


def test_real_metrics(tmp_path: Path, capsys: Capture) -> None:
    points = []
    for k in (0, 2):
        document = generate(
            capsys, "demo", "-k", str(k), "--max-new-tokens", "12", "--json", "-q"
        ).document
        draft = document["recipe"]["draft"]["model"] if k else None
        metrics = document["metrics"]
        points.append({"k": k, "batch_size": 1, "draft": draft, "status": "ok", "metrics": metrics})
    plain, fast = (p["metrics"] for p in points)
    folder = write_folder(tmp_path, points, finished=False, recipe=document["recipe"])
    assert main(["report", str(folder), "--format", "csv,vllm,html", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    gain = fast["decode_tokens_per_second"] / plain["decode_tokens_per_second"]
    assert f"{gain:.2f}×" in report["answer"]
    with (folder / "points.csv").open() as file:
        _, row = csv.DictReader(file)
    assert float(row["speedup"]) == gain
    for name in ("round_ms", "draft_ms", "mean_acceptance_length", "output_tokens_per_second"):
        assert float(row[name]) == fast[name]
    assert float(row["ttft_p50_ms"]) == fast["ttft_ms"]["p50"]
    assert all(
        row[name]
        for name in row
        if not name.endswith(("_lo", "_hi", "reason"))
        and name not in ("broadcast_ms", "predicted_speedup")
        and not name.startswith("break_even")  # which samples give, and there are none
    )
    if gain > 1:
        rates = report["vllm"]["rehearsal"]["synthetic_acceptance_rates"]
        assert rates == pytest.approx(fast["acceptance_rate_per_pos"], abs=1e-6)


def test_needs_no_torch_and_no_display(folder: Path) -> None:
    assert without_torch("report", folder) == 0
    assert without_torch("recipe", "show", "demo") == 0


def test_under_torchrun_one_process_writes(folder: Path) -> None:
    before = files(folder)
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    program = [sys.executable, "-m", "specdec_cli"]
    for command in (["report", str(folder)], ["merge", str(folder), "-o", str(folder / "all")]):
        done = subprocess.run(
            [*program, *command],
            env=environment() | place | {"MASTER_PORT": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0 and done.stdout == "" and files(folder) == before, done.stderr
