"""Run folders that hold what no run writes."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec_cli.errors import SetupError
from specdec_cli.experiment import disk, run_folder
from specdec_cli.experiment.run_folder import RunFolder
from specdec_cli.experiment.settings_file import read_settings_file
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
    for read in (read_folder, read_settings_file):
        with pytest.raises(SetupError) as caught:
            read(folder)
        assert caught.value.message == f"{folder / name} is no regular file"


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


def test_a_folder_without_a_lock_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(run_folder.fcntl, "flock", refuse)
    RunFolder.reopen(tmp_path).close()
    [record] = caplog.records
    assert record.levelname == "WARNING" and "is not locked" in record.getMessage()
