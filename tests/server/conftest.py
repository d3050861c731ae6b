"""Fixtures of all tests of servers."""

from collections.abc import Iterator

import pytest

from specdec_cli.experiment import machine, points


@pytest.fixture(scope="module", autouse=True)
def every_ratio_is_possible() -> Iterator[None]:
    """Keep a ratio of speeds that no speculation reaches: servers of the tests answer within
    milliseconds, and other work on the machine disturbs these. `unit/test_points.py` and
    `unit/test_impossible.py` test such ratios. Warnings about other work are silenced, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine.MachineWatch, "notices", lambda _: [])
        patch.setattr(points, "_BEYOND", float("inf"))
        yield
