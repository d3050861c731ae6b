"""Launch configurations of `stored_rows_triton`: from a table, fitted to a weight's groups."""

import math

import torch
from torch import Tensor

from specdec_kernels.gpu import MULTIPROCESSORS, gpu_of, power_of_2_from, power_of_2_to
from specdec_kernels.linear.stored import BLOCK, FP8, KINDS, Stored
from specdec_kernels.linear.tile_tables import FINE, STORED, TERMS, Tiles
from specdec_kernels.tiles import first_fit

LEAST = 512  # numbers of a row in each split of a sum
SPLITS = 8  # most of them
FEW = 16  # rows up to which codes in registers are faster than terms of x
SLICE = 16  # least bytes of a slice, a product of tensor cores


def choose_stored_tiles(kind: str, x: Tensor, weight: Stored) -> Tiles | None:
    """Tiles for a product of `kind` "norm", "gate" or "add" of x [T, K] and a stored weight; None
    where the kernel does not read it, or there are more rows than in the table."""
    kinds = STORED.get(weight.storage.kind)
    if kinds is None:
        return None
    if weight.storage.has_minima or 0 < weight.storage.group[1] < 32:
        kinds = FINE
    features = weight.shape[0] // (2 if kind == "gate" else 1)
    tiles = first_fit(kinds[kind], (x.shape[0], features), (weight.shape[1],))
    if tiles is None:
        return None
    if x.dtype == torch.float32:  # only for comparisons: mma.sync, and half as many numbers
        tiles = tiles._replace(block_k=max(128, tiles.block_k // 4), num_stages=2, early=0)
    if tiles.splits == 0:
        wanted = MULTIPROCESSORS * (3 if tiles.num_warps == 4 else 1)
        blocks = -(-features // tiles.block_n)
        most = max(1, power_of_2_to(weight.shape[1] // LEAST))
        tiles = tiles._replace(splits=min(SPLITS, most, power_of_2_from(-(-wanted // blocks))))
    slices = slices_for(weight, tiles.block_k, tiles.slices)
    return None if slices is None else tiles._replace(slices=slices)


def choose_terms_tiles(kind: str, x: Tensor, weight: Stored) -> Tiles | None:
    """Tiles for a product whose x [T, K] meets the codes as terms of fp8; None where that is
    slower, or x or the codes do not have such terms."""
    table = TERMS.get(gpu_of(x.device).capability)
    if table is None or weight.storage.kind != FP8 or x.dtype != torch.bfloat16:
        return None
    features = weight.shape[0] // (2 if kind == "gate" else 1)
    tiles = first_fit(table[kind], (x.shape[0], features), (weight.shape[1],))
    if tiles is None or x.shape[0] <= FEW or slices_for(weight, tiles.block_k, tiles.slices) != 1:
        return None
    blocks, most = -(-features // tiles.block_n), power_of_2_to(weight.shape[1] // LEAST)
    return tiles._replace(splits=min(SPLITS, most, power_of_2_to(MULTIPROCESSORS // blocks)))


def slices_for(weight: Stored, block_k: int, least: int) -> int | None:
    """At least as many slices of tiles of `block_k`, so that each lies in one group of columns;
    None for weights that the kernels do not read so."""
    if weight.storage.kind not in STORED:
        return None
    kind, (_, wide) = KINDS[weight.storage.kind], weight.storage.group
    width, tile = weight.shape[-1], block_k // kind.per_code
    size = math.gcd(tile, wide)  # bytes of a slice; gcd(n, 0) is n
    if kind.per_code == 2:
        size = math.gcd(size, BLOCK // 2, width % BLOCK // 2)
        assert block_k % BLOCK == 0
    has_zeros, has_minima = weight.storage.has_zeros, weight.storage.has_minima
    if (has_zeros and kind.per_code == 1) or (has_minima and not wide):
        return None
    if size & (size - 1) or size < SLICE:
        return None
    return max(least, tile // size)
