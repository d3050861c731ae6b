"""Fixtures of all tests of servers."""

import pytest

from specdec_cli.backends.server import times

# Servers of the tests answer within milliseconds, which other work on the machine disturbs.
from tests.cli.conftest import calm_machine as calm_machine


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RETRY_S", "SCRAPE_S", "LOOK_S"):
        monkeypatch.setattr(times, name, 0.01)
