"""The sums over ranks that split matmuls use if ranks share memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from specdec_kernels import ops

from specdec_cli.models.split_products import SplitProducts

ROWS, WIDTH = 3, 8


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The calls of sums through shared memory: their names and arguments."""
    calls: list[tuple[Any, ...]] = []

    def noted(name: str) -> Any:
        return lambda *args: (calls.append((name, *args)), torch.ones(ROWS, WIDTH))[1]

    for name in ("linear_reduce", "linear_reduce_add_norm", "mixture_reduce_add_norm"):
        monkeypatch.setattr(ops, name, noted(name))
    return calls


def split_products(most_rows: int) -> tuple[Any, SplitProducts]:
    """Matmuls of two ranks that share memory for `most_rows` rows."""
    room = torch.zeros(most_rows, WIDTH)
    sums = SimpleNamespace(take=lambda place, n, width: room[:n] if n <= len(room) else None)
    whole = SimpleNamespace(size=2, all_reduce=lambda part: 2 * part)
    split = SplitProducts(whole, 10, SimpleNamespace(sums=sums), torch.zeros(1, WIDTH))  # type: ignore[arg-type]
    return sums, split


def test_each_half_of_a_layer_sums_in_a_buffer_of_its_own(told: list[tuple[Any, ...]]) -> None:
    sums, split = split_products(ROWS)
    x, weight, norm = torch.ones(ROWS, 4), torch.ones(WIDTH, 4), torch.ones(WIDTH)
    residual = torch.zeros(ROWS, WIDTH)
    stream = ops.Normed(residual, residual, None, 1e-5)
    split.add_norm(0, x, weight, None, None, residual, norm, 1e-5)
    split.mixture_add_norm(stream, object(), (x, weight), norm, 1e-5)  # type: ignore[arg-type]
    split.add_norm(1, x, weight, norm, None, residual, norm, 1e-5)
    assert [call[:3] for call in told] == [
        ("linear_reduce_add_norm", sums, 0),
        ("mixture_reduce_add_norm", sums, 1),
        ("linear_reduce_add_norm", sums, 1),
    ]
    start = told[1][5]
    assert torch.equal(start, x @ weight.T), "the shared experts' output is part of the sum"
    assert told[2][5] is norm, "the bias"


def test_a_norm_of_the_output_comes_after_the_sum(told: list[tuple[Any, ...]]) -> None:
    sums, split = split_products(ROWS)
    x, weight, norm = torch.ones(ROWS, 4), torch.ones(WIDTH, 4), torch.ones(WIDTH)
    out = split.add_norm(1, x, weight, None, norm, torch.zeros(ROWS, WIDTH), norm, 0.0)
    assert told == [("linear_reduce", sums, 1, x, weight, None)]
    assert torch.allclose(out.hidden, torch.ones(ROWS, WIDTH))


def test_rows_without_room_are_summed_by_the_group(told: list[tuple[Any, ...]]) -> None:
    _, split = split_products(ROWS - 1)
    x, weight, norm = torch.ones(ROWS, 4), torch.ones(WIDTH, 4), torch.ones(WIDTH)
    out = split.add_norm(0, x, weight, None, None, torch.zeros(ROWS, WIDTH), norm, 0.0)
    assert not told and torch.equal(out.hidden, torch.full((ROWS, WIDTH), 8.0))
