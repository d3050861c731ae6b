"""Measures the rates of this GPU on which floors rest, in the run that uses them.

Imports nothing of `specdec_cli`. That would import transformers, which looks for a module called
`kernels`, finds the script of this folder, and runs its imports.
"""

import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Protocol

import torch
from specdec_kernels import ops

_MATRIX = (131072, 4096)  # 1 GiB of bf16, many times the L2 cache
_SQUARE = 8192  # rows and columns of a product that keeps every multiprocessor busy
_LAUNCHES, _REPLAYS = 8, 9
_PAUSE = 0.5  # seconds in which a device cools


class Timed(Protocol):
    """Microseconds per call in each replay of a graph of calls, such as `graph_times`."""

    def __call__(
        self, step: Callable[[int], object], launches: int, replays: int
    ) -> list[float]: ...


def measured_rates(timed: Timed) -> tuple[float, float]:
    """Both rates of this GPU, TB/s and TFLOP/s. The memory for the measurement is freed."""
    found = read_rate(timed), product_rate(timed)
    torch.cuda.empty_cache()
    return found


@torch.inference_mode()
def read_rate(timed: Timed, device: str = "cuda", shape: tuple[int, int] = _MATRIX) -> float:
    """TB/s at which a bf16 matrix is read to multiply it by a vector.

    The fastest median of the library's two ways and our own kernel, so that no pass reads its
    weights faster than the floor says. Ends this process if there is no GPU.
    """
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: this measures a GPU, and torch finds none")
    matrix = torch.empty(shape, dtype=torch.bfloat16, device=device).normal_()
    row = torch.empty(1, shape[1], dtype=torch.bfloat16, device=device).normal_()
    steps: list[Callable[[int], object]] = [
        lambda _: torch.mv(matrix, row[0]),
        lambda _: torch.nn.functional.linear(row, matrix),
        lambda _: ops.linear(row, matrix),
    ]
    return matrix.nbytes / _fastest(steps, timed) / 1e6


@torch.inference_mode()
def product_rate(timed: Timed, device: str = "cuda", size: int = _SQUARE) -> float:
    """TFLOP/s of a product of two square bf16 matrices, one after a pause.

    Products that go on for more than some 15 ms make a GPU lower its clock: an H200 does 800
    TFLOP/s first and 680 from then on. Short passes are as fast as the first ones, and a floor has
    to hold for them too.
    """
    one, other = (
        torch.empty(size, size, dtype=torch.bfloat16, device=device).normal_() for _ in range(2)
    )
    return 2 * size**3 / _fastest([lambda _: one @ other], timed, launches=1) / 1e6


def _fastest(
    steps: list[Callable[[int], object]], timed: Timed, launches: int = _LAUNCHES
) -> float:
    """Microseconds of the fastest step. Each runs once, followed by a pause, before it is timed."""
    found = []
    for step in steps:
        step(0)
        time.sleep(_PAUSE)
        found.append(median(timed(step, launches, _REPLAYS)))
    return min(found)
