"""Launch configurations of products of few rows, chosen from shapes and measured on an H200.

`scripts/bench/kernels.py` shows their effect. Nothing is tuned at run time: every rank and every
run uses the same.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.gpu import (
    CACHE_LINE,
    MULTIPROCESSORS,
    SHARED_MEMORY,
    power_of_2_from,
    power_of_2_to,
    shared_memory,
)

FEW_ROWS = 64
WIDE = 3584  # rows of at least this many numbers get deeper tiles
WASTE = 1.25  # a partial last wave matters if ceil(waves) is at least this times waves
SCRATCH = 4096  # bytes of shared memory for exchanges between warps

# Products of one row.
NARROW = 7168  # a residual stream of fewer bytes has products that are small enough
LANE = 16  # bytes of one load of a thread
LOADED = 256  # bytes of the weight that a thread holds in registers
GATE = 4096  # least bytes of each half that a program of a gate loads
MOST = 16  # most features of a program
CHUNK = 2048  # most numbers of a row in one tile
HEAD = 4  # products with more than this many features for each number read are the logits


class Tiles(NamedTuple):
    """Launch configuration of `few_rows_triton.few_rows_linear_kernel`."""

    block_m: int  # at least the number of rows; below 16 they are the columns of mma.sync
    block_n: int  # features of a program
    block_k: int  # numbers of the sum at a time
    slices: int  # parts of block_k, each for some warps
    splits: int  # parts of the sum, each for a program
    prefetch: int  # numbers of each weight row to prefetch before the wait
    num_warps: int
    num_stages: int
    early: int = 0  # numbers of each weight row to load into registers before the wait


def spread(tiles: Tiles, programs: int, itemsize: int, room: int = SHARED_MEMORY) -> Tiles:
    """Add stages until two programs do not fit on one multiprocessor, if there is one for each.

    A kernel that starts early runs where its predecessor happens to end first. Without this its
    programs would crowd there and leave other multiprocessors idle.
    """
    if programs > MULTIPROCESSORS:
        return tiles
    stage = (tiles.block_n + tiles.block_m) * tiles.block_k * itemsize
    more = room // 2 // stage + 1 - buffers(tiles, itemsize)
    return tiles._replace(num_stages=tiles.num_stages + max(0, more))


def at_once(tiles: Tiles, programs: int, itemsize: int, room: int = SHARED_MEMORY) -> Tiles:
    """Reduce a program's shared memory if that lets all programs run at once.

    A few programs that wait for the others double the time, while most multiprocessors idle: at
    5120 features, 264 of 320 programs ran at first.
    """
    waves = programs / resident(tiles, itemsize, room)
    if waves <= 1 or math.ceil(waves) < WASTE * waves:
        return tiles
    fewest = min(tiles.num_stages, 4)
    smaller = [tiles._replace(num_stages=n) for n in range(tiles.num_stages - 1, 3, -1)]
    smaller += [tiles._replace(num_stages=n, early=0) for n in (fewest, 3)]
    return next((t for t in smaller if programs <= resident(t, itemsize, room)), tiles)


def resident(tiles: Tiles, itemsize: int, room: int = SHARED_MEMORY) -> int:
    """Programs that run at once, by shared memory alone."""
    stage = (tiles.block_n + tiles.block_m) * tiles.block_k * itemsize
    early = tiles.block_n * tiles.early * itemsize
    used = stage * buffers(tiles, itemsize) + early + SCRATCH
    return max(1, room // used) * MULTIPROCESSORS


def buffers(tiles: Tiles, itemsize: int) -> int:
    """Buffers of a pipeline: one less than stages, or as many for wgmma, which reads one while it
    is refilled."""
    is_wgmma = tiles.block_m >= 64 and itemsize == 2
    return tiles.num_stages if is_wgmma else tiles.num_stages - 1


def fitted(tiles: Tiles, parts: int, itemsize: int, room: int) -> Tiles:
    """Reduce stages, and then their depth, until `room` bytes of shared memory are enough.

    parts: weights that a program reads, 2 for a gate.
    """
    while True:
        features = parts * tiles.block_n * itemsize
        stage = features * tiles.block_k + tiles.block_m * tiles.block_k * itemsize
        # One buffer less than stages; weights that were loaded early take shared memory as well.
        stages = (room - SCRATCH - features * tiles.early) // stage + 1
        if stages >= 2 or tiles.block_k <= 64:
            return tiles._replace(num_stages=max(1, min(tiles.num_stages, stages)))
        if tiles.early:
            tiles = tiles._replace(early=0)
        else:
            tiles = tiles._replace(block_k=tiles.block_k // 2)


def choose_tiles(kind: str, x: Tensor, weight: Tensor, room: int | None = None) -> Tiles | None:
    """Tiles for a product of `kind` "norm", "gate" or "add"; None for cuBLAS.

    Up to FEW_ROWS rows these kernels are faster, since with cuBLAS the norm, the gate and the sum
    are kernels of their own. Up to 8 rows are the columns of mma.sync, up to 16 its rows; more use
    an M of 64, which the compiler maps to wgmma. room: bytes of shared memory, else the GPU's.
    """
    room = shared_memory(x.device) if room is None else room
    num_rows, width = x.shape
    num_features = weight.shape[0] // (2 if kind == "gate" else 1)
    if num_rows > FEW_ROWS:
        return None
    if num_rows <= 8:
        tiles = tiles_of_8(kind, width, num_features)
    elif num_rows <= 16:
        tiles = tiles_of_16(kind, width, num_features)
    else:
        tiles = tiles_of_64(kind, width, num_features)
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
        if tiles.block_m < 64:  # larger tiles are measured as they are
            tiles = at_once(tiles, programs, x.element_size(), room)
    if room < SHARED_MEMORY:
        tiles = fitted(tiles, 2 if kind == "gate" else 1, x.element_size(), room)
    return tiles


def tiles_of_8(kind: str, width: int, num_features: int) -> Tiles:
    """Tiles for up to 8 rows: 16 features, with four warps that each have a quarter of BLOCK_K.

    A warp's products run one after the other, so a tile of one slice would take four times as long
    from one barrier to the next, longer than loading its weights.
    """
    programs = -(-num_features // 16)
    if kind == "gate":
        if num_features > (32 if width < WIDE else 64) * MULTIPROCESSORS:
            return tiles_of_16(kind, width, num_features)
        return Tiles(8, 16, 512, 4, 1, 256, 4, 6 if programs <= MULTIPROCESSORS else 3)
    if num_features > 128 * MULTIPROCESSORS:
        return tiles_of_16(kind, width, num_features)
    early = 512 if width > 2048 or (width >= 1024 and programs <= MULTIPROCESSORS) else 0
    if kind == "norm":
        if width < WIDE:
            return Tiles(8, 16, 512, 4, 1, 1024, 4, 5, early)
        return Tiles(8, 16, 512, 4, 1, 256, 4, 3, early)
    if programs <= MULTIPROCESSORS and width >= 2048:
        return Tiles(8, 16, 1024, 4, 1, 512, 4, 5)
    if programs > MULTIPROCESSORS and width <= 2048:
        return Tiles(8, 16, 512, 4, 1, 512, 4, 5)
    return Tiles(8, 16, 256, 4, 1, 512, 4, 6, early)


def tiles_of_16(kind: str, width: int, num_features: int) -> Tiles:
    """Tiles for up to 16 rows."""
    narrow, many = width < WIDE, num_features > 32 * MULTIPROCESSORS
    if kind == "add":
        if num_features <= 16 * MULTIPROCESSORS and width >= 2048:
            return Tiles(16, 16, 1024, 4, 1, 512, 4, 4)
        return Tiles(16, 16, 256, 4, 1, 512, 4, 6, 0 if narrow or many else 512)
    if narrow and many:
        return Tiles(16, 32, 128, 1, 1, 256, 4, 5)
    if kind == "gate":
        return Tiles(16, 32, 256, 1, 1, 256, 4, 3)
    if num_features > 64 * MULTIPROCESSORS:
        return Tiles(16, 32, 256, 1, 1, 256, 4, 4)
    if many:
        return Tiles(16, 32, 256, 1, 1, 512, 4, 4, 256)
    if narrow:
        return Tiles(16, 16, 256, 4, 1, 1024, 4, 7)
    return Tiles(16, 32, 256, 1, 1, 1024, 4, 4, 512)


def tiles_of_64(kind: str, width: int, num_features: int) -> Tiles:
    """Tiles for up to FEW_ROWS rows: wide, since every program loads and multiplies all of x.

    At 5120 features, 80 programs of 64 features are faster than 160 of 32.
    """
    narrow, many = width < WIDE, num_features > 32 * MULTIPROCESSORS
    one_turn = num_features <= 64 * MULTIPROCESSORS  # one wave of programs of 64 features
    if kind == "add":
        if num_features <= 16 * MULTIPROCESSORS:
            return Tiles(64, 32, 128, 1, 2, 512, 4, 8)
        if not many:
            return Tiles(64, 32, 256, 1, 1, 512, 4, 4)
        if one_turn:
            return Tiles(64, 64, 128, 1, 1, 512, 4, 6)
        return Tiles(64, 32, 128, 1, 1, 512, 4, 8)
    if kind == "gate":
        if not one_turn and num_features <= 128 * MULTIPROCESSORS:
            return Tiles(64, 64, 128, 1, 1, 256, 8, 4)
        return Tiles(64, 64, 64, 1, 1, 256, 4, 5)
    if not many:
        return Tiles(64, 32, 128, 1, 1, 256, 4, 5)
    if narrow:
        return Tiles(64, 64, 64, 1, 1, 256, 4, 7)
    return Tiles(64, 64, 128, 1, 1, 256, 4, 5 if one_turn else 3)


class RowTiles(NamedTuple):
    """Launch configuration of `one_row_triton.one_row_linear_kernel`."""

    block_n: int  # features of a program
    chunk: int  # numbers of a row in one tile
    num_warps: int


def choose_row_tiles(kind: str, x: Tensor, weight: Tensor) -> RowTiles | None:
    """Tiles for a product of `kind` "norm", "gate" or "add" of one row.

    None for any other number of rows, and where other kernels are faster: for larger layers and for
    logits.
    """
    num_rows, width = x.shape
    num_features = weight.shape[0] // (2 if kind == "gate" else 1)
    stream = num_features if kind == "add" else width  # the model's width, whatever a rank holds
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
        # The compiler converts a whole chunk to fp32 while it waits for x. With a smaller one five
        # programs fit on a multiprocessor instead of three.
        chunk = max(least, min(chunk, CHUNK // 4))
    return RowTiles(block_n, chunk, num_warps)


def chunk_of(width: int, least: int) -> int:
    """The largest power of 2 with at most 3 idle lanes for 10 busy ones, or `least`."""
    chunk = min(CHUNK, power_of_2_from(width))
    while chunk > least and 10 * (-width % chunk) > 3 * width:
        chunk //= 2
    return max(chunk, least)
