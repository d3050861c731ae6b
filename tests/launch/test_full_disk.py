"""A disk that is full for a moment neither ends the heartbeat of a rank nor hides how it ended."""

import errno
import json
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.launch import agent, rank
from specdec_cli.launch.agent import Exit
from specdec_cli.launch.heartbeat import read_beats, write_beat
from specdec_cli.launch.rank import Rank
from specdec_cli.launch.ranks import unwritable
from specdec_cli.launch.reports import End, Report, read_reports, write_report
from specdec_cli.launch.seat import Seat


def full_at_first(write: Callable[..., Any], times: int) -> Callable[..., Any]:
    """The same function, which fails a number of times before it writes."""
    left = [times]

    def attempt(*what: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*what)

    return attempt


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Rank]:
    monkeypatch.setattr(rank, "write_beat", full_at_first(write_beat, 2))
    monkeypatch.setattr(rank.signal, "signal", lambda *_: None)  # leave the handlers of pytest
    found = Rank(Seat(0, 2, 0, 2, "specdec", "localhost", 0, tmp_path), verbose=False)
    yield found
    found.heartbeat.stop()


def test_a_beat_that_cannot_be_written_does_not_end_the_heartbeat(
    one: Rank, tmp_path: Path
) -> None:
    deadline = time.monotonic() + 10
    while not read_beats(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [beat.rank for beat in read_beats(tmp_path)] == [0]


def test_a_report_is_tried_again(
    one: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "write_report", full_at_first(write_report, 3))
    assert one.end(Report(0, End.DONE, 0)) is None
    assert read_reports(tmp_path)[0].end is End.DONE


def test_a_report_that_can_never_be_written_does_not_keep_the_rank(
    one: Rank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "_TRY_S", 0.2)
    monkeypatch.setattr(rank, "write_report", full_at_first(write_report, 1000))
    assert one.end(Report(0, End.DONE, 0)) is None
    assert not read_reports(tmp_path)


@pytest.mark.parametrize("why", ["No space left on device", "No such file or directory"])
def test_a_folder_that_cannot_be_written_is_the_reason(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without beats and reports a rank seems to hang, though it runs."""
    folder = tmp_path / "ranks"
    folder.mkdir()
    stuck = Report(1, End.STUCK, 1, "hung in verify: the process stands still for 8 s")
    assert unwritable(stuck, folder) is None, "it can be written"
    told = Report(1, End.FAILED, 2, "its own error")
    write_report(folder, told)
    if "space" in why:
        monkeypatch.setattr(Path, "write_bytes", full_at_first(Path.write_bytes, 1000))
        assert unwritable(told, folder) is None, "the rank has said why it failed"
        (folder / "report-1").unlink()
    else:
        shutil.rmtree(folder)
    found = unwritable(stuck, folder)
    assert found is not None and (found.end, found.code) == (End.FAILED, 5)
    assert found.explained == f"cannot write {folder}, through which ranks report: {why}"
    assert unwritable(None, folder) is None


def test_the_ends_of_ranks_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_text", full_at_first(Path.write_text, 2))
    agent.patiently(partial(agent._write_exits, tmp_path, [Exit(1, -9, 5.0)]))
    assert json.loads((tmp_path / "exits").read_bytes()) == [[1, -9, 5.0]]
