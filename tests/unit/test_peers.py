"""The limits of sums through peers' memory; tests/ops has the tests of the kernels."""

import os

import pytest
import torch

from specdec_cli.core.parallel import TensorParallel
from specdec_cli.core.peers import sum_rows
from specdec_cli.launch.quiet import meeting_quietly


@pytest.mark.parametrize(
    ("size", "width", "dtype", "rows"),
    [
        (2, 8192, torch.bfloat16, 256),  # one part of 256 rows is 4 MiB
        (4, 2048, torch.bfloat16, 256),  # the memory has no more rows
        (4, 4096, torch.bfloat16, 170),
        (4, 8192, torch.bfloat16, 85),
        (4, 8192, torch.float32, 42),
        (8, 2**20, torch.float32, 1),  # one row always
    ],
)
def test_a_rank_reads_four_mebibytes_for_a_sum_at_most(
    size: int, width: int, dtype: torch.dtype, rows: int
) -> None:
    assert sum_rows(size, width, dtype) == rows


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
