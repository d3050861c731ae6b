"""Chooses launch configurations for matmuls in which x has few rows: looks them up in
`tile_tables`, and adapts them to the GPU."""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specdec_kernels.gpu import (
    CACHE_LINE,
    CAPABILITY,
    MULTIPROCESSORS,
    SHARED_MEMORY,
    gpu_of,
    power_of_2_from,
    power_of_2_to,
)
from specdec_kernels.linear.stored import BLOCK, KINDS, MXFP4, TILE_ROWS, Stored
from specdec_kernels.linear.tile_tables import FINE, STORED, TABLES, TERMS, Tiles
from specdec_kernels.tiles import first_fit, table_for

FEW_ROWS = 64  # up to this many rows of x, tiles are adapted; see also `leaves_norm`
WASTE = 1.25  # a partial last wave matters if ceil(waves) / waves is at least this
SCRATCH = 4096  # bytes of shared memory for exchanges between warps

# Matmuls of one row.
NARROW = 7168  # one-row kernels are used if the residual stream has fewer bytes per row
LANE = 16  # bytes per load of a thread
LOADED = 256  # bytes of the weight that each thread holds in registers
GATE = 4096  # minimum bytes of gate weights per program; it loads as many bytes of up weights
MOST = 16  # maximum features per program
CHUNK = 2048  # maximum values of a row in one tile
HEAD = 4  # if output features / input features exceeds this, the matmul is the LM head

# Matmuls with quantised weights.
LEAST = 512  # minimum values of a weight row per split
SPLITS = 8  # maximum splits
FEW = 8  # up to this many rows of x, decoding codes is faster than splitting x into fp8 terms
SLICE = 16  # minimum bytes per slice, the K of one tensor-core instruction
GROUP = 32  # columns that share a scale in weights that can be tiled


def leaves_norm(x: Tensor) -> bool:
    """Return True if matmuls that add to the residual stream x leave the norm that follows to the
    next matmul.

    They do so for up to `FEW_ROWS` rows, because cuBLAS, which may multiply more rows, needs a
    finished norm. They never do so in fp16, because x times the norm's weight may be infinite where
    the finished norm is not.
    """
    return x.shape[0] <= FEW_ROWS and x.dtype != torch.float16


def spread(tiles: Tiles, programs: int, itemsize: int, room: int = SHARED_MEMORY) -> Tiles:
    """Add pipeline stages until two programs no longer fit on one multiprocessor, but only if there
    is a multiprocessor for every program.

    Without these stages, a kernel that starts before the preceding kernel has ended would crowd its
    programs onto the multiprocessors that become free first.
    """
    if programs > MULTIPROCESSORS:
        return tiles
    stage = (tiles.block_n + tiles.block_m) * tiles.block_k * itemsize
    more = room // 2 // stage + 1 - buffers(tiles, itemsize)
    return tiles._replace(num_stages=tiles.num_stages + max(0, more))


def at_once(tiles: Tiles, programs: int, itemsize: int, room: int = SHARED_MEMORY) -> Tiles:
    """Reduce a program's shared memory if all programs can then run at once. Without this, the last
    few would start only after the others have ended, and the matmul would take twice as long."""
    waves = programs / resident(tiles, itemsize, room)
    if waves <= 1 or math.ceil(waves) < WASTE * waves:
        return tiles
    fewest = min(tiles.num_stages, 4)
    smaller = [tiles._replace(num_stages=n) for n in range(tiles.num_stages - 1, 3, -1)]
    smaller += [tiles._replace(num_stages=n, early=0) for n in (fewest, 3)]
    return next((t for t in smaller if programs <= resident(t, itemsize, room)), tiles)


def resident(tiles: Tiles, itemsize: int, room: int = SHARED_MEMORY) -> int:
    """Return the number of programs that can run at once if only shared memory limits it."""
    stage = (tiles.block_n + tiles.block_m) * tiles.block_k * itemsize
    early = tiles.block_n * tiles.early * itemsize
    used = stage * buffers(tiles, itemsize) + early + SCRATCH
    return max(1, room // used) * MULTIPROCESSORS


def buffers(tiles: Tiles, itemsize: int) -> int:
    """Return how many buffers a pipeline needs: one fewer than its number of stages. With wgmma,
    which reads a buffer for longer, it needs one per stage."""
    is_wgmma = tiles.block_m >= 64 and itemsize == 2
    return tiles.num_stages if is_wgmma else tiles.num_stages - 1


def fitted(tiles: Tiles, parts: int, itemsize: int, room: int) -> Tiles:
    """Reduce the number of stages until the tiles fit into `room` bytes of shared memory. If fewer
    than two stages would fit, first stop loading weights early, and then halve block_k down to 64.

    parts: the number of weight tiles per stage, 2 for a gate.
    """
    while True:
        features = parts * tiles.block_n * itemsize
        stage = features * tiles.block_k + tiles.block_m * tiles.block_k * itemsize
        # There is one buffer fewer than there are stages. Weights that are loaded early take shared
        # memory, too.
        stages = (room - SCRATCH - features * tiles.early) // stage + 1
        if stages >= 2 or tiles.block_k <= 64:
            return tiles._replace(num_stages=max(1, min(tiles.num_stages, stages)))
        if tiles.early:
            tiles = tiles._replace(early=0)
        else:
            tiles = tiles._replace(block_k=tiles.block_k // 2)


def choose_tiles(kind: str, x: Tensor, weight: Tensor, room: int | None = None) -> Tiles | None:
    """Return tiles for a matmul of `kind` "norm", "gate" or "add". Return None if cuBLAS should
    compute it.

    The device's table has tiles for 16-bit values. These are adapted to other dtypes, to the width,
    and to `room`, the bytes of shared memory (by default the device's). For more than `FEW_ROWS`
    rows, they are used unchanged or not at all.
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
    """Return the tiles of the first case that fits in the table for `device`, a compute capability.
    None means cuBLAS: no case fits, or the case has no tiles."""
    return first_fit(table_for(TABLES, device)[kind], (num_rows, num_features), (width,))


class RowTiles(NamedTuple):
    """Launch configuration of `one_row_triton.one_row_linear_kernel`."""

    block_n: int  # features per program
    chunk: int  # values of a row in one tile
    num_warps: int


def choose_row_tiles(kind: str, x: Tensor, weight: Tensor | Stored) -> RowTiles | None:
    """Return tiles for a one-row matmul of `kind` "norm", "gate" or "add". Return None if x has
    more than one row, if other kernels are faster, or if a thread's load would cross a group
    boundary of a quantised weight."""
    num_rows, width = x.shape
    num_features = weight.shape[0] // (2 if kind == "gate" else 1)
    stream = num_features if kind == "add" else width  # the residual stream's width
    if num_rows != 1 or stream * x.element_size() >= NARROW:
        return None
    held, row = width, width * x.element_size()
    if isinstance(weight, Stored):
        if weight.storage.kind not in STORED or not fits_lanes(weight):
            return None
        held = width // KINDS[weight.storage.kind].per_code
        # If low and high codes are scaled separately, their scales and minima need as many
        # registers as the values of x, so assume that a row of the weight is as large as x.
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
        # The compiled kernel converts a whole chunk to fp32 while it waits for x. With smaller
        # chunks, five programs fit on a multiprocessor instead of three.
        chunk = max(least, min(chunk, CHUNK // 4))
    return RowTiles(block_n, chunk, num_warps)


def fits_lanes(weight: Stored) -> bool:
    """Return whether every load of a thread lies in one group, both for low codes and for high
    codes. A weight whose groups are whole rows fits only if it has no minima."""
    per_code, (_, wide) = KINDS[weight.storage.kind].per_code, weight.storage.group
    fits = weight.shape[1] % (LANE * per_code) == wide % LANE == 0
    return fits and (wide > 0 or not weight.storage.has_minima)


def chunk_of(width: int, least: int) -> int:
    """Return the chunk size for rows of `width` values, at most CHUNK: the largest power of 2 for
    which the unused lanes of the last chunk are at most 30 % of the width. Never return less than
    `least`, even if more lanes are then unused."""
    chunk = min(CHUNK, power_of_2_from(width))
    while chunk > least and 10 * (-width % chunk) > 3 * width:
        chunk //= 2
    return max(chunk, least)


def choose_stored_tiles(kind: str, x: Tensor, weight: Stored) -> Tiles | None:
    """Return tiles for a matmul of `kind` "norm", "gate" or "add" of x [T, K] and a quantised
    weight. Return None if the kernel cannot read the weight, or if x has more rows than the
    table covers."""
    kinds = STORED.get(weight.storage.kind)
    if kinds is None:
        return None
    if weight.storage.has_minima or 0 < weight.storage.group[1] < 32:
        kinds = FINE
    features = weight.shape[0] // (2 if kind == "gate" else 1)
    tiles = first_fit(kinds[kind], (x.shape[0], features), (weight.shape[1],))
    if tiles is None:
        return None
    if x.dtype == torch.float32:  # used only to compare results; mma.sync's K is half as large
        tiles = tiles._replace(block_k=max(128, tiles.block_k // 4), num_stages=2, early=0)
    if tiles.splits == 0:
        wanted = MULTIPROCESSORS * (3 if tiles.num_warps == 4 else 1)
        blocks = -(-features // tiles.block_n)
        most = max(1, power_of_2_to(weight.shape[1] // LEAST))
        tiles = tiles._replace(splits=min(SPLITS, most, power_of_2_from(-(-wanted // blocks))))
    slices = slices_for(weight, tiles.block_k, tiles.slices)
    return None if slices is None else tiles._replace(slices=slices)


def choose_terms_tiles(kind: str, x: Tensor, weight: Stored) -> Tiles | None:
    """Return tiles for a matmul that splits x [T, K] into fp8 terms and multiplies these by a
    quantised weight's codes.

    Return None if the GPU or the kind of code has no table, if x is not bf16, if decoding the codes
    is faster, or if the columns of a tile do not share one scale.
    """
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


def is_tiled(weight: Tensor | Stored) -> bool:
    """Return whether a weight is in the order of `Stored.tiled`."""
    return not isinstance(weight, Tensor) and weight.storage.is_tiled


def can_be_tiled(dtype: torch.dtype, device: torch.device, *weights: Tensor | Stored) -> bool:
    """Return whether `mx_sums_triton` can multiply x of a dtype by all these weights once they are
    tiled and on a device: x is bf16, the GPU has these matmuls, and weights are in mxfp4 with whole
    groups and tiles."""
    fits = dtype == torch.bfloat16 and gpu_of(device).capability == CAPABILITY
    return fits and all(map(_can_be_tiled, weights))


def _can_be_tiled(weight: Tensor | Stored) -> bool:
    if isinstance(weight, Tensor) or weight.storage.kind != MXFP4:
        return False
    is_whole = weight.shape[-1] % GROUP == weight.shape[-2] % TILE_ROWS == 0
    return is_whole and weight.storage.group == (1, GROUP)


def slices_for(weight: Stored, block_k: int, least: int) -> int | None:
    """Return the number of slices, at least `least`, into which a tile of `block_k` columns must be
    cut so that each slice lies in one group of columns. Return None if the kernels cannot read the
    weight in slices."""
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
