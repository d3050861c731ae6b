"""How products of one row are cut, chosen from their shapes by measurement on an H200.

scripts/bench/kernels.py shows the outcome.
"""

from typing import NamedTuple

from torch import Tensor

from specdec_kernels.hopper import MULTIPROCESSORS
from specdec_kernels.powers import power_of_2_from, power_of_2_to

NARROW = 7168  # bytes of a residual stream below which a layer's products are small enough
LANE = 16  # bytes that a thread loads at a time
LOADED = 256  # bytes of the weight that a thread has in registers
GATE = 4096  # bytes of either half that a gate's program has, or more
MOST = 16  # features of a program
CHUNK = 2048  # numbers of a row that are one tile, at most
HEAD = 4  # features for each number read from which on a product is no layer's, but the logits'


class RowTiles(NamedTuple):
    """How one product is cut; see `one_row_linear_triton.one_row_linear_kernel`."""

    block_n: int  # features of a program
    chunk: int  # numbers of a row that are one tile
    num_warps: int


def choose_row_tiles(kind: str, x: Tensor, weight: Tensor) -> RowTiles | None:
    """Tiles for a product of `kind` "norm", "gate" or "add" of one row.

    None for other numbers of rows, none among them, and where other kernels take less time: in
    larger layers, and for logits.
    """
    num_rows, width = x.shape
    num_features = weight.shape[0] // (2 if kind == "gate" else 1)
    stream = num_features if kind == "add" else width  # of the model, whichever rank has how much
    itemsize = x.element_size()
    if num_rows != 1 or stream * itemsize >= NARROW:
        return None
    if kind == "norm" and num_features > HEAD * width:
        return None
    row = width * itemsize
    if kind == "gate":
        num_warps = 4 if row >= GATE else 2
        block_n = min(MOST, power_of_2_from(-(-GATE // row)))
    else:
        num_warps = 4 if row <= 2 * GATE else 8
        block_n = min(MOST, power_of_2_to(32 * num_warps * LOADED // row))
    least = LANE // itemsize * 32 * num_warps // block_n
    chunk = chunk_of(width, least)
    if kind == "norm" and -(-num_features // block_n) > 3 * MULTIPROCESSORS:
        # The compiler widens all of a chunk while it waits for x. With less of it five programs fit
        # on a multiprocessor where three do.
        chunk = max(least, min(chunk, CHUNK // 4))
    return RowTiles(block_n, chunk, num_warps)


def chunk_of(width: int, least: int) -> int:
    """A power of 2 from `least` on; the largest that leaves at most 3 lanes idle for 10 at work."""
    chunk = min(CHUNK, power_of_2_from(width))
    while chunk > least and 10 * (-width % chunk) > 3 * width:
        chunk //= 2
    return max(chunk, least)
