"""Lines of progress on a stderr that is no terminal."""

import re
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from specdec_cli.commands.status import waiting
from specdec_cli.experiment.folders.records import Key, Sample
from specdec_cli.terminal import progress
from specdec_cli.terminal.progress import Ticker
from specdec_cli.terminal.sinks import PromptLines
from specdec_cli.terminal.watching import SweepLines


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SILENCE_S", 0.2)
    monkeypatch.setattr(progress, "_LOOK_S", 0.02)


def test_silence_is_broken_and_lines_put_it_off(capsys: pytest.CaptureFixture[str]) -> None:
    found = Ticker(lambda: "on the way")
    time.sleep(0.5)
    found.close()
    lines = capsys.readouterr().err.splitlines()
    assert lines and set(lines) <= {"on the way after 0:00", "on the way after 0:01"}
    busy = Ticker(lambda: "on the way")
    for _ in range(8):
        busy.say("a point")
        time.sleep(0.05)
    busy.close()
    assert set(capsys.readouterr().err.splitlines()) == {"a point"}
    time.sleep(0.3)
    assert capsys.readouterr().err == "", "closed"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_preparation_tells_its_stage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    """Bars do not appear in a file, nor on a terminal that cannot move its cursor."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "dumb")
    with waiting("getting ready", quiet=False) as stages:
        time.sleep(0.5)
        stages.begin("loading models")
        time.sleep(0.5)
    lines = capsys.readouterr().err.splitlines()
    assert {line.partition(" after ")[0] for line in lines} == {"getting ready", "loading models"}
    with waiting("getting ready", quiet=True):
        time.sleep(0.5)
    assert capsys.readouterr().err == ""


def test_a_sweep_tells_its_stage_and_the_samples_of_other_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    batches: list[list[Any]] = [[1, 2, 3]]
    view = SweepLines(10, lambda: batches.pop() if batches else [])
    view.begin("warming up")
    time.sleep(0.5)
    view.close()
    first, *_ = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"warming up: 3 of 10 samples after 0:0\d", first)
    view = SweepLines(10)
    view.begin("measuring")
    view.sample(Key(None, 1, 0), cast(Sample, None))
    view.close()
    assert capsys.readouterr().err == "measuring: 1 of 10 samples, 0:00 left\n"


def test_generate_tells_of_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    job: Any = SimpleNamespace(prompts=range(4))
    sink = PromptLines(job)
    for _ in range(3):
        sink.tokens(SimpleNamespace(token_ids=[5, 6]), is_last=False)  # type: ignore[arg-type]
    sink.output(SimpleNamespace())  # type: ignore[arg-type]
    time.sleep(0.5)
    sink.close()
    assert capsys.readouterr().err.startswith("1 of 4 prompts, 6 tokens after 0:0")
