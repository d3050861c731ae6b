"""Launch configurations for matmuls of few rows: looked up in `tile_tables` and fitted to a GPU."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.gpu import (
    CACHE_LINE,
    MULTIPROCESSORS,
    SHARED_MEMORY,
    gpu_of,
    power_of_2_from,
    power_of_2_to,
)
from specdec_kernels.linear.stored import BLOCK, KINDS, Stored
from specdec_kernels.linear.tile_tables import FINE, STORED, TABLES, TERMS, Tiles
from specdec_kernels.tiles import first_fit, table_for

FEW_ROWS = 64  # up to this many rows, every table has tiles and matmuls include the norm
WASTE = 1.25  # a partial last wave matters if ceil(waves) is at least this times waves
SCRATCH = 4096  # bytes of shared memory for exchanges between warps

# Matmuls of one row.
NARROW = 7168  # one-row kernels are for residual streams of fewer bytes a row
LANE = 16  # bytes of one load of a thread
LOADED = 256  # bytes of the weight in registers per thread
GATE = 4096  # for a gate: minimum bytes of each half per program
MOST = 16  # maximum features per program
CHUNK = 2048  # maximum values of a row in one tile
HEAD = 4  # more output features than this for each input feature mark the LM head

# Matmuls with stored weights.
LEAST = 512  # minimum values of a row in each split of a sum
SPLITS = 8  # maximum splits
FEW = 8  # rows up to which codes in registers are faster than terms of x
SLICE = 16  # least bytes of a slice, the K of one tensor-core instruction


def spread(tiles: Tiles, programs: int, itemsize: int, room: int = SHARED_MEMORY) -> Tiles:
    """Add stages until two programs do not fit on one multiprocessor, if there are enough
    multiprocessors. Otherwise the programs of a kernel that starts early would crowd onto the
    multiprocessors where its predecessor ends first."""
    if programs > MULTIPROCESSORS:
        return tiles
    stage = (tiles.block_n + tiles.block_m) * tiles.block_k * itemsize
    more = room // 2 // stage + 1 - buffers(tiles, itemsize)
    return tiles._replace(num_stages=tiles.num_stages + max(0, more))


def at_once(tiles: Tiles, programs: int, itemsize: int, room: int = SHARED_MEMORY) -> Tiles:
    """Reduce a program's shared memory if that lets all programs run at once. A few programs
    waiting for the others would double the time."""
    waves = programs / resident(tiles, itemsize, room)
    if waves <= 1 or math.ceil(waves) < WASTE * waves:
        return tiles
    fewest = min(tiles.num_stages, 4)
    smaller = [tiles._replace(num_stages=n) for n in range(tiles.num_stages - 1, 3, -1)]
    smaller += [tiles._replace(num_stages=n, early=0) for n in (fewest, 3)]
    return next((t for t in smaller if programs <= resident(t, itemsize, room)), tiles)


def resident(tiles: Tiles, itemsize: int, room: int = SHARED_MEMORY) -> int:
    """The number of programs that run at once, by shared memory alone."""
    stage = (tiles.block_n + tiles.block_m) * tiles.block_k * itemsize
    early = tiles.block_n * tiles.early * itemsize
    used = stage * buffers(tiles, itemsize) + early + SCRATCH
    return max(1, room // used) * MULTIPROCESSORS


def buffers(tiles: Tiles, itemsize: int) -> int:
    """The number of buffers of a pipeline. It is one less than its stages, or equal for wgmma,
    which still reads one of them."""
    is_wgmma = tiles.block_m >= 64 and itemsize == 2
    return tiles.num_stages if is_wgmma else tiles.num_stages - 1


def fitted(tiles: Tiles, parts: int, itemsize: int, room: int) -> Tiles:
    """Reduce stages, and then their depth, until `room` bytes of shared memory are enough.

    parts: the number of weights that a program reads, 2 for a gate.
    """
    while True:
        features = parts * tiles.block_n * itemsize
        stage = features * tiles.block_k + tiles.block_m * tiles.block_k * itemsize
        # There is one buffer fewer than stages; weights that were loaded early take shared memory
        # as well.
        stages = (room - SCRATCH - features * tiles.early) // stage + 1
        if stages >= 2 or tiles.block_k <= 64:
            return tiles._replace(num_stages=max(1, min(tiles.num_stages, stages)))
        if tiles.early:
            tiles = tiles._replace(early=0)
        else:
            tiles = tiles._replace(block_k=tiles.block_k // 2)


def choose_tiles(kind: str, x: Tensor, weight: Tensor, room: int | None = None) -> Tiles | None:
    """Tiles for a matmul of `kind` "norm", "gate" or "add"; None for cuBLAS.

    The device's table has tiles for 16 bits. They are fitted to other types, to the width and to
    the shared memory, `room` bytes. For more than `FEW_ROWS` rows they are used unchanged or not at
    all.
    """
    gpu = gpu_of(x.device)
    room = gpu.shared_memory if room is None else room
    num_rows, width = x.shape
    num_features = weight.shape[0] // (2 if kind == "gate" else 1)
    tiles = tiles_for(gpu.capability, kind, num_rows, width, num_features)
    is_as_measured = x.dtype != torch.float32 and room >= SHARED_MEMORY
    if tiles is None or (num_rows > FEW_ROWS and not is_as_measured):
        return None
    if x.dtype == torch.float32:
        tiles = tiles._replace(block_k=tiles.block_k // 2, early=tiles.early // 2)
    while tiles.block_k > 256 and width % tiles.block_k:
        tiles = tiles._replace(block_k=tiles.block_k // 2, num_stages=2 * tiles.num_stages - 1)
    prefetch = min(tiles.prefetch, 2 ** (width.bit_length() - 1))
    if prefetch * x.element_size() < CACHE_LINE:
        prefetch = 0
    tiles = tiles._replace(prefetch=prefetch)
    programs = -(-num_features // tiles.block_n) * tiles.splits
    if kind != "gate":
        tiles = spread(tiles, programs, x.element_size(), room)
        if tiles.block_m < 64:  # larger tiles are used unchanged
            tiles = at_once(tiles, programs, x.element_size(), room)
    if room < SHARED_MEMORY:
        tiles = fitted(tiles, 2 if kind == "gate" else 1, x.element_size(), room)
    return tiles


@lru_cache
def tiles_for(
    device: tuple[int, int], kind: str, num_rows: int, width: int, num_features: int
) -> Tiles | None:
    """The tiles of the first fitting case in the table of `device`, a compute capability; None, for
    cuBLAS, if there is no table or no fitting case."""
    return first_fit(table_for(TABLES, device)[kind], (num_rows, num_features), (width,))


class RowTiles(NamedTuple):
    """Launch configuration of `one_row_triton.one_row_linear_kernel`."""

    block_n: int  # features per program
    chunk: int  # values of a row in one tile
    num_warps: int


def choose_row_tiles(kind: str, x: Tensor, weight: Tensor | Stored) -> RowTiles | None:
    """Tiles for a matmul of `kind` "norm", "gate" or "add" with one row; None for more rows, if
    other kernels are faster, or if groups of stored weights cut a thread's load."""
    num_rows, width = x.shape
    num_features = weight.shape[0] // (2 if kind == "gate" else 1)
    stream = num_features if kind == "add" else width  # the whole model's width on any rank
    if num_rows != 1 or stream * x.element_size() >= NARROW:
        return None
    held, row = width, width * x.element_size()
    if isinstance(weight, Stored):
        if weight.storage.kind not in STORED or not fits_lanes(weight):
            return None
        held = width // KINDS[weight.storage.kind].per_code
        # If low and high codes have separate scales, scales and minima take as many registers as
        # values of x.
        row = row if weight.storage.is_apart else held
    if kind == "norm" and num_features > HEAD * width:
        return None
    if kind == "gate":
        num_warps = 4 if row >= GATE else 2
        block_n = min(MOST, power_of_2_from(-(-GATE // row)))
    else:
        num_warps = 4 if row <= 2 * GATE else 8
        block_n = min(MOST, power_of_2_to(32 * num_warps * LOADED // row))
    least = LANE // x.element_size() * 32 * num_warps // block_n
    chunk = chunk_of(held, least)
    if kind == "norm" and -(-num_features // block_n) > 3 * MULTIPROCESSORS:
        # The compiler converts a whole chunk to fp32 while it waits for x. With a smaller chunk
        # five programs fit on a multiprocessor instead of three.
        chunk = max(least, min(chunk, CHUNK // 4))
    return RowTiles(block_n, chunk, num_warps)


def fits_lanes(weight: Stored) -> bool:
    """True if the low codes of every load of a thread lie in one group, and so do the high codes;
    or if groups are whole rows without minima."""
    per_code, (_, wide) = KINDS[weight.storage.kind].per_code, weight.storage.group
    fits = weight.shape[1] % (LANE * per_code) == wide % LANE == 0
    return fits and (wide > 0 or not weight.storage.has_minima)


def chunk_of(width: int, least: int) -> int:
    """The largest power of 2 with at most 3 idle lanes for 10 busy ones, or `least`."""
    chunk = min(CHUNK, power_of_2_from(width))
    while chunk > least and 10 * (-width % chunk) > 3 * width:
        chunk //= 2
    return max(chunk, least)


def choose_stored_tiles(kind: str, x: Tensor, weight: Stored) -> Tiles | None:
    """Tiles for a matmul of `kind` "norm", "gate" or "add" of x [T, K] and a stored weight; None if
    the kernel does not read the weight, or if there are more rows than in the table."""
    kinds = STORED.get(weight.storage.kind)
    if kinds is None:
        return None
    if weight.storage.has_minima or 0 < weight.storage.group[1] < 32:
        kinds = FINE
    features = weight.shape[0] // (2 if kind == "gate" else 1)
    tiles = first_fit(kinds[kind], (x.shape[0], features), (weight.shape[1],))
    if tiles is None:
        return None
    if x.dtype == torch.float32:  # for comparisons only: mma.sync, half as many values
        tiles = tiles._replace(block_k=max(128, tiles.block_k // 4), num_stages=2, early=0)
    if tiles.splits == 0:
        wanted = MULTIPROCESSORS * (3 if tiles.num_warps == 4 else 1)
        blocks = -(-features // tiles.block_n)
        most = max(1, power_of_2_to(weight.shape[1] // LEAST))
        tiles = tiles._replace(splits=min(SPLITS, most, power_of_2_from(-(-wanted // blocks))))
    slices = slices_for(weight, tiles.block_k, tiles.slices)
    return None if slices is None else tiles._replace(slices=slices)


def choose_terms_tiles(kind: str, x: Tensor, weight: Stored) -> Tiles | None:
    """Tiles for a matmul of the codes with fp8 terms of x [T, K]; None if that is slower, or if x
    or the codes do not allow it."""
    table = TERMS.get(gpu_of(x.device).capability, {}).get(weight.storage.kind)
    if table is None or weight.storage.is_apart or x.dtype != torch.bfloat16:
        return None
    features = weight.shape[0] // (2 if kind == "gate" else 1)
    tiles = first_fit(table[kind], (x.shape[0], features), (weight.shape[1],))
    if tiles is None or x.shape[0] <= FEW or slices_for(weight, tiles.block_k, tiles.slices) != 1:
        return None
    if tiles.splits:
        return tiles
    programs = MULTIPROCESSORS * (2 if tiles.num_warps == 4 else 1)
    most = min(SPLITS, power_of_2_to(weight.shape[1] // LEAST))
    return tiles._replace(
        splits=min(most, power_of_2_to(programs // -(-features // tiles.block_n)))
    )


def slices_for(weight: Stored, block_k: int, least: int) -> int | None:
    """The number of slices of tiles of `block_k`, at least `least`, such that each lies in one
    group of columns. None for weights that the kernels do not read in slices."""
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
