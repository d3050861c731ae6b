"""The limits of sums through peers' memory; tests/ops has the tests of the kernels."""

import pytest
import torch

from specdec_cli.core.peers import sum_rows


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
