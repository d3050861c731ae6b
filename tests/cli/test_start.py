"""The log of a command's start."""

import re

import pytest

from specdec_cli.app import main

SHORT = ("generate", "--prompt", "def add(", "--max-new-tokens", "3")


def test_the_log_names_every_stage_up_to_the_first_token(caplog: pytest.LogCaptureFixture) -> None:
    assert main([*SHORT, "-v"]) == 0
    found = [re.fullmatch(r"([0-9.]+) s: (.+)", line) for line in caplog.messages]
    times = [float(line[1]) for line in found if line]
    stages = [line[2] for line in found if line]
    assert times == sorted(times)
    known = [
        "reading the recipe",
        "describing the target",
        "loading the target",
        "loading the draft",
        "allocating the caches",
        "the first token",
    ]
    assert [stage for stage in stages if stage in known] == known
    assert stages[-1] == "the first token"


def test_without_verbose_no_stage_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert main([*SHORT]) == 0
    assert not caplog.messages
