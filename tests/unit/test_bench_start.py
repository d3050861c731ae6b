"""The starts of scripts/bench/start.py, of a command by its log, and of scripts/bench/cpu.py."""

import logging
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from specdec_cli.commands.status import _InertFormatter
from specdec_cli.stages import FIRST_TOKEN, begin_stage

BENCH = Path(__file__).resolve().parents[2] / "scripts" / "bench"


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(BENCH))
    return runpy.run_path(str(BENCH / "start.py"))


def log_of(*stages: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines of a command with -v whose stages these are."""
    with caplog.at_level(logging.DEBUG, logger="specdec"):
        for stage in stages:
            begin_stage(stage)
    return [f"{_InertFormatter().format(record)}\n" for record in caplog.records]


def test_stages_are_those_of_the_log(
    start: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    log = log_of("reading", "loading", "reading", FIRST_TOKEN, caplog=caplog)
    found = start["stages_of"](["warning: 1.0 s: slow\n", *log], [])
    assert list(found) == ["starting Python", "reading", "loading", FIRST_TOKEN]
    assert start["to_first_token"](found) == pytest.approx(sum([*found.values()][:3]))


def test_a_log_without_a_first_token_is_no_measurement(
    start: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    log = [*log_of("reading", caplog=caplog), "error: no such model\n"]
    with pytest.raises(SystemExit, match="error: no such model\nerror: the log names no stage"):
        start["stages_of"](log, [])


@pytest.mark.parametrize("asked", ["--hogs 2", "--hogs=2", "--hog 2", "--k 2"])
def test_hogs_begin_before_torch(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(sys, "argv", ["cpu.py", *asked.split()])
    monkeypatch.setattr(subprocess, "Popen", begun.append)
    monkeypatch.setattr("specdec_cli.launch.spinning.choose_spins", sys.exit)
    with pytest.raises(SystemExit):
        runpy.run_path(str(BENCH / "cpu.py"))
    assert len(begun) == (2 if "hog" in asked else 0)
