"""Run folders that hold what no run writes, or that change while a run writes there."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec_cli.app import main
from specdec_cli.errors import ExitCode, SetupError
from specdec_cli.experiment import disk
from specdec_cli.experiment.folders import run_folder
from specdec_cli.experiment.folders.conclusions import VERSION
from specdec_cli.experiment.folders.run_folder import LostRecords, RunFolder
from specdec_cli.experiment.folders.settings_file import kept_settings
from specdec_cli.experiment.sweep.sweep_folder import read_settings
from specdec_cli.experiment.sweep.sweep_records import SweepSettings
from specdec_cli.report.folder import read_folder
from tests.report_helpers import sweep_points, write_folder

SPECIAL: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "nowhere": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["samples.jsonl", "environment.json", "settings.json"])
def test_only_regular_files_are_read(name: str, kind: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "run", sweep_points(ks=(0, 1), batch_sizes=(1,)))
    read_folder(folder)
    (folder / name).unlink(missing_ok=True)
    SPECIAL[kind](folder / name)
    for read in (read_folder, read_settings):
        with pytest.raises(SetupError) as caught:
            read(folder)
        assert caught.value.message == f"{folder / name} is not a regular file"


def test_settings_nested_too_deeply_are_damaged(tmp_path: Path) -> None:
    """Code that walks through them would recurse too deeply, although the JSON reader does not."""
    deep: list[object] = []
    for _ in range(500):
        deep = [deep]
    settings = dict.fromkeys(("recipe", "prompts", "device", "dtype", "predict_only", "shard"))
    settings |= {"drafts": [], "ks": [], "batch_sizes": [], "dtype": deep}
    file = tmp_path / "settings.json"
    file.write_text(json.dumps({"version": VERSION, "hash": "", "settings": settings}))
    for read in (read_settings, lambda path: kept_settings(path, SweepSettings)):
        with pytest.raises(SetupError) as caught:
            read(tmp_path)
        assert caught.value.message == f"{file}: no settings of a sweep"


def test_sizes_are_looked_at_before_files_are_read(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, sweep_points(ks=(0, 1), batch_sizes=(1,)))
    os.truncate(folder / "samples.jsonl", disk.MAX_FILE_BYTES + 1)
    with pytest.raises(SetupError, match=r"samples.jsonl is larger than 1 GiB"):
        read_folder(folder)


def test_pipes_are_not_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "samples.jsonl")
    os.mkfifo(tmp_path / ".summary.json.tmp")
    folder = RunFolder(tmp_path)
    with pytest.raises(SetupError, match=r"cannot write .*samples.jsonl"):
        folder.append("samples.jsonl", {"k": 1})
    folder.write("summary.json", "{}")
    assert (tmp_path / "summary.json").read_text() == "{}"


def test_only_the_run_s_own_records_are_repaired(tmp_path: Path) -> None:
    for name in ("samples.jsonl", "questions.jsonl"):
        (tmp_path / name).write_text('{"k": 1}\n{"k": 2}')
    RunFolder.reopen(tmp_path).close()
    assert (tmp_path / "samples.jsonl").read_text() == '{"k": 1}\n'
    assert (tmp_path / "questions.jsonl").read_text() == '{"k": 1}\n{"k": 2}'


def replace_folder(path: Path) -> None:
    shutil.copytree(path, path.with_name("copy"))
    shutil.rmtree(path)
    path.with_name("copy").rename(path)


LOSSES: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder moved": (lambda path: path.rename(path.with_name("other")), "removed or replaced"),
    "folder replaced": (replace_folder, "removed or replaced"),
    "file removed": (lambda path: (path / "samples.jsonl").unlink(), "removed or replaced"),
    "file replaced": (
        lambda path: disk.replace_file(path / "samples.jsonl", b"{}\n" * 99),
        "removed or replaced",
    ),
    "file cut": (lambda path: os.truncate(path / "samples.jsonl", 3), "cut short"),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("then", ["the same file", "another file", "a document"])
def test_records_that_are_lost_end_the_run(loss: str, then: str, tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    folder = RunFolder.reopen(path)
    folder.append("samples.jsonl", {"k": 1})
    folder.append("samples.jsonl", {"k": 2})
    change, said = LOSSES[loss]
    change(path)
    with pytest.raises(LostRecords) as caught:
        if then == "a document":
            folder.write("summary.json", "{}")
        else:
            name = "samples.jsonl" if then == "the same file" else "replay.jsonl"
            folder.append(name, {"k": 3})
    folder.close()
    assert caught.value.code == ExitCode.RUN_FAILED == 1
    assert str(path) in caught.value.message and said in caught.value.message
    assert not (path / "summary.json").exists()


def test_a_sweep_that_loses_its_samples_ends_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    append = RunFolder.append

    def losing(folder: RunFolder, name: str, *records: object) -> None:
        append(folder, name, *records)  # type: ignore[arg-type]
        if name == "points.jsonl":
            (folder.path / "samples.jsonl").unlink(missing_ok=True)

    monkeypatch.setattr(RunFolder, "append", losing)
    options = "--k 0,1 --limit 1 --max-new-tokens 4 --set run.repeats=1 --set run.warmup=0 --json"
    assert main(["sweep-k", "-o", str(tmp_path / "run"), *options.split()]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["code"] == 1 and "samples.jsonl was removed or replaced" in error["message"]


def test_a_folder_without_a_lock_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_folder.fcntl, "flock", refuse)
    RunFolder.reopen(tmp_path).close()
    [record] = caplog.records
    assert record.levelname == "WARNING" and "is not locked" in record.getMessage()


def test_a_write_that_the_disk_cut_short_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path)
    folder.append("samples.jsonl", {"index": 0})
    write = os.write
    monkeypatch.setattr(run_folder.os, "write", lambda file, data: write(file, data[:-3]))
    with pytest.raises(SetupError, match=r"samples\.jsonl: the disk took only part of a record"):
        folder.append("samples.jsonl", {"index": 1})
    monkeypatch.undo()
    folder.mend()
    assert (tmp_path / "samples.jsonl").read_text() == '{"index": 0}\n'
