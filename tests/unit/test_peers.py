"""Shares of ranks, and what they say when they meet; tests/ops has the tests of their sums."""

import os

import pytest

from specdec_cli.core.parallel import TensorParallel
from specdec_cli.launch.quiet import meeting_quietly


def test_the_last_ranks_have_what_is_left() -> None:
    shares = [TensorParallel(rank, 4).share(10) for rank in range(4)]
    assert shares == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert [TensorParallel(rank, 4).share(2) for rank in (1, 2, 3)] == [(1, 2), (2, 2), (2, 2)]


def test_lines_of_a_meeting_are_dropped_and_later_ones_shown(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with meeting_quietly():
        os.write(2, b"during\n")
    os.write(2, b"after\n")
    assert capfd.readouterr().err == "after\n"
