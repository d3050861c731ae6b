"""Launch configurations of `stored_rows_triton`: a table by bits and kind of product, fitted to a
weight's groups.

`scripts/bench/pass_tiles.py --weights` measures them.
"""

import math

from torch import Tensor

from specdec_kernels.linear.stored import BLOCK, KINDS, Stored
from specdec_kernels.linear.tile_tables import STORED, Tiles
from specdec_kernels.tiles import first_fit


def choose_stored_tiles(kind: str, x: Tensor, weight: Stored) -> Tiles | None:
    """Tiles for a product of `kind` "norm", "gate" or "add" of x [T, K] and a stored weight.

    None where the weight is made plain for cuBLAS: more rows than the table has, experts, kinds and
    groups that the kernel does not read.
    """
    storage, width = weight.storage, weight.shape[-1]
    if storage.kind not in STORED or len(weight.shape) != 2:
        return None
    features = weight.shape[0] // (2 if kind == "gate" else 1)
    tiles = first_fit(STORED[storage.kind][kind], (x.shape[0], features), (width,))
    return None if tiles is None else fitted_to(weight, tiles)


def fitted_to(weight: Stored, tiles: Tiles) -> Tiles | None:
    """The tiles with slices that lie in one group of columns each; None if no slices do."""
    per_code, (_, wide) = KINDS[weight.storage.kind].per_code, weight.storage.group
    width = weight.shape[-1]
    most = math.gcd(tiles.block_k // per_code, wide)  # bytes of a slice: gcd(n, 0) is n
    if per_code == 2:
        most = math.gcd(most, BLOCK // 2, width % BLOCK // 2)
    least = 16 if tiles.block_m < 64 else 32
    if most & (most - 1) or most < least or weight.codes.dtype.itemsize != 1:
        return None
    if per_code == 1 and weight.zeros is not None:
        return None
    return tiles._replace(slices=max(tiles.slices, tiles.block_k // per_code // most))
