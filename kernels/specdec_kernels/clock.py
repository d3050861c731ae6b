"""Time stamps among kernels: torch reference."""

import time

from torch import Tensor


def stamp_reference(out: Tensor, place: int) -> None:
    """See `ops.stamp`."""
    out[place] = time.perf_counter_ns()
