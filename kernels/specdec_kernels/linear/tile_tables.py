"""Tiles of products of few rows: a table for each device, as `scripts/bench/tiles.py` measures it.

A new device takes a table in `TABLES`. `tiles.tiles_for` reads them, and nothing here is code.
"""

from typing import NamedTuple

ANY = 1 << 62


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


class Case(NamedTuple):
    """A class of products and its tiles in 16 bits. cuBLAS takes what has no tiles or no case."""

    kind: str  # "norm", "gate" or "add"
    rows: int  # at most
    width: int  # numbers of the sum, at least
    features: int  # at most
    tiles: Tiles | None


# The first case that fits counts. Up to 8 rows are the columns of mma.sync, up to 16 its rows; more
# use an M of 64, which the compiler maps to wgmma. 2112 features are 16 for each multiprocessor.
# With 16 features a program, four warps each have a quarter of block_k: a warp's products run one
# after the other, so one slice would take four times as long from one barrier to the next, longer
# than loading its weights. For more than 16 rows tiles are wide, since every program loads and
# multiplies all of x; at 5120 features, 80 programs of 64 features are faster than 160 of 32. From
# 65 rows on a gate has tiles where one wave of programs fills at least 4 of 5 multiprocessors.
# Elsewhere cuBLAS was faster.
H200 = (
    Case("norm", 8, 3584, 16896, Tiles(8, 16, 512, 4, 1, 256, 4, 3, 512)),
    Case("norm", 8, 2049, 16896, Tiles(8, 16, 512, 4, 1, 1024, 4, 5, 512)),
    Case("norm", 8, 1024, 2112, Tiles(8, 16, 512, 4, 1, 1024, 4, 5, 512)),
    Case("norm", 8, 0, 4224, Tiles(8, 16, 512, 4, 1, 1024, 4, 5)),
    Case("norm", 8, 2048, 8448, Tiles(8, 32, 256, 4, 1, 512, 4, 5)),
    Case("norm", 8, 0, 16896, Tiles(8, 16, 512, 4, 1, 1024, 4, 5)),
    Case("norm", 16, 3584, 4224, Tiles(16, 32, 256, 1, 1, 1024, 4, 4, 512)),
    Case("norm", 16, 3584, 8448, Tiles(16, 32, 256, 1, 1, 512, 4, 4, 256)),
    Case("norm", 16, 3584, ANY, Tiles(16, 32, 256, 1, 1, 256, 4, 4)),
    Case("norm", 16, 0, 4224, Tiles(16, 16, 256, 4, 1, 1024, 4, 7)),
    Case("norm", 16, 0, ANY, Tiles(16, 32, 128, 1, 1, 256, 4, 5)),
    Case("norm", 64, 0, 4224, Tiles(64, 32, 128, 1, 1, 256, 4, 5)),
    Case("norm", 64, 3584, 8448, Tiles(64, 64, 128, 1, 1, 256, 4, 5)),
    Case("norm", 64, 3584, ANY, Tiles(64, 64, 128, 1, 1, 256, 4, 3)),
    Case("norm", 64, 0, ANY, Tiles(64, 64, 64, 1, 1, 256, 4, 7)),
    Case("gate", 8, 0, 2112, Tiles(8, 16, 512, 4, 1, 256, 4, 6)),
    Case("gate", 8, 3584, 8448, Tiles(8, 16, 512, 4, 1, 256, 4, 3)),
    Case("gate", 8, 0, 4224, Tiles(8, 16, 512, 4, 1, 256, 4, 3)),
    Case("gate", 16, 3584, ANY, Tiles(16, 32, 256, 1, 1, 256, 4, 3)),
    Case("gate", 16, 0, 4224, Tiles(16, 32, 256, 1, 1, 256, 4, 3)),
    Case("gate", 16, 0, ANY, Tiles(16, 32, 128, 1, 1, 256, 4, 5)),
    Case("gate", 64, 0, 8448, Tiles(64, 64, 64, 1, 1, 256, 4, 5)),
    Case("gate", 64, 0, 16896, Tiles(64, 64, 128, 1, 1, 256, 8, 4)),
    Case("gate", 64, 0, ANY, Tiles(64, 64, 64, 1, 1, 256, 4, 5)),
    Case("gate", 128, 0, 6720, None),
    Case("gate", 128, 2048, 8448, Tiles(128, 64, 64, 1, 1, 256, 8, 6)),
    Case("gate", 128, 0, 13440, None),
    Case("gate", 128, 3584, 16896, Tiles(128, 128, 64, 1, 1, 256, 8, 4)),
    Case("add", 8, 4097, 2112, Tiles(8, 16, 1024, 4, 1, 512, 4, 5)),
    Case("add", 8, 4096, 2112, Tiles(8, 16, 512, 4, 1, 512, 4, 6, 512)),
    Case("add", 8, 2048, 2112, Tiles(8, 16, 1024, 4, 1, 512, 4, 5)),
    Case("add", 8, 2049, 16896, Tiles(8, 16, 256, 4, 1, 512, 4, 6, 512)),
    Case("add", 8, 1024, 2112, Tiles(8, 16, 256, 4, 1, 512, 4, 6, 512)),
    Case("add", 8, 0, 2112, Tiles(8, 16, 256, 4, 1, 512, 4, 6)),
    Case("add", 8, 0, 16896, Tiles(8, 16, 512, 4, 1, 512, 4, 5)),
    Case("add", 16, 2048, 2112, Tiles(16, 16, 1024, 4, 1, 512, 4, 4)),
    Case("add", 16, 3584, 4224, Tiles(16, 16, 256, 4, 1, 512, 4, 6, 512)),
    Case("add", 16, 0, ANY, Tiles(16, 16, 256, 4, 1, 512, 4, 6)),
    Case("add", 64, 0, 2112, Tiles(64, 32, 128, 1, 2, 512, 4, 8)),
    Case("add", 64, 0, 4224, Tiles(64, 32, 256, 1, 1, 512, 4, 4)),
    Case("add", 64, 0, 8448, Tiles(64, 64, 128, 1, 1, 512, 4, 6)),
    Case("add", 64, 0, ANY, Tiles(64, 32, 128, 1, 1, 512, 4, 8)),
)
TABLES = {(9, 0): H200}  # by compute capability; devices without a table use an H200's
