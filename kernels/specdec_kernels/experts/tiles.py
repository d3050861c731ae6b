"""Launch configurations of the experts' matmuls, measured on an H200."""

from typing import NamedTuple

from specdec_kernels.gpu import SHARED_MEMORY
from specdec_kernels.linear.tiles import SCRATCH
from specdec_kernels.tiles import Case, first_fit

MANY_TOKENS = 512  # maximum tokens for `grouped_triton`; more tokens take `sorted_triton`


class ExpertTiles(NamedTuple):
    """Launch configuration of the kernels of `gate_up_triton` and `down_triton`."""

    block_m: int  # at least the number of tokens; if below 16, tokens are the matmul's columns
    block_n: int  # features per program
    block_k: int  # step along the reduction dimension
    slices: int  # equal divisions of block_k, each for some of the warps
    splits: int  # programs that divide the list of chosen experts; 1 for gate and up
    ahead: int  # experts whose weights a program prefetches before the wait; 0 for gate and up
    num_warps: int
    num_stages: int


# Tiles of gate and up, and of down, by maximum tokens (scripts/bench/experts.py, experts of 2048 x
# 768). From 8 tokens on, there are so many chosen experts that dividing them among programs pays,
# although the last program of a block must wait for the others.
H200 = (
    Case((ExpertTiles(8, 64, 128, 1, 1, 0, 4, 4), ExpertTiles(8, 16, 256, 4, 4, 2, 4, 5)), (2,)),
    Case((ExpertTiles(8, 16, 512, 4, 1, 0, 4, 3), ExpertTiles(8, 16, 256, 4, 4, 2, 4, 5)), (8,)),
    Case((ExpertTiles(16, 32, 256, 1, 1, 0, 4, 3), ExpertTiles(16, 32, 128, 1, 8, 2, 4, 5)), (16,)),
)
# Tiles for quantised weights, which are the left operand for any number of tokens. Up to 16 tokens
# use these tiles, even if every expert has some tokens: `STORED_GROUPS` was not measured for so few
# tokens.
STORED = (
    Case((ExpertTiles(8, 16, 512, 4, 1, 0, 4, 3), ExpertTiles(8, 16, 256, 4, 4, 2, 4, 4)), (2,)),
    Case((ExpertTiles(8, 16, 256, 4, 1, 0, 4, 4), ExpertTiles(8, 16, 256, 4, 8, 2, 4, 4)), (8,)),
    Case((ExpertTiles(16, 16, 512, 4, 1, 0, 4, 3), ExpertTiles(16, 16, 256, 4, 8, 2, 4, 4)), (16,)),
)
PARTIAL_SUMS = max(down.splits for (_, down), *_ in H200)


def choose_expert_tiles(
    num_rows: int, itemsize: int, stored: bool = False
) -> tuple[ExpertTiles, ExpertTiles]:
    """Return tiles of gate and up, and of down, for T = `num_rows` tokens. stored: whether the
    weights are quantised; `mixture_triton.fitted` then fits the tiles to the weights' groups."""
    found = first_fit(STORED if stored else H200, (num_rows,))
    assert found is not None
    gate_up, down = found
    if itemsize > 2:
        gate_up = gate_up._replace(block_k=gate_up.block_k // 2)
        down = down._replace(block_k=down.block_k // 2)
    return gate_up, down


class RouterTiles(NamedTuple):
    """Launch configuration of the kernels of `route_triton` and `group_triton`."""

    block_m: int  # tokens per program, the columns of one matmul
    block_e: int  # experts per program, the rows of the matmul
    depth: int  # step along the reduction dimension
    slices: int  # equal divisions of that step, one per warp
    early: int  # values of each router row to load before the wait


def router_tiles(width: int, itemsize: int) -> RouterTiles:
    """Return tiles for rows of `width` values of `itemsize` bytes."""
    return RouterTiles(8, 16, 2048 // itemsize, 8, min(width, 8192 // itemsize))


class GroupTiles(NamedTuple):
    """Launch configuration of the kernel of `grouped_triton`."""

    block_m: int  # pairs of an expert in one step
    block_n: int  # features per program
    block_k: int  # step along the reduction dimension
    num_warps: int
    num_stages: int
    slices: int = 1  # equal divisions of block_k; more than one for quantised weights


# Tiles of gate and up, and of down, by maximum average pairs per expert. Some experts have three
# times the average, because tokens of one sequence choose similar experts. A second block of pairs
# reads all weights from L2 again, which takes nearly as long as the first.
H200_GROUPS = (
    Case((GroupTiles(16, 64, 128, 4, 3), GroupTiles(16, 128, 128, 8, 3)), (6,)),
    Case((GroupTiles(32, 64, 64, 4, 5), GroupTiles(32, 128, 64, 8, 5)), (12,)),
    Case((GroupTiles(64, 64, 64, 4, 6), GroupTiles(64, 128, 64, 4, 4)), (24,)),
    Case((GroupTiles(64, 64, 128, 4, 4), GroupTiles(64, 128, 128, 4, 4)), (64,)),
)

STORED_GROUPS = (
    Case((GroupTiles(16, 32, 256, 4, 3, 4), GroupTiles(16, 32, 256, 4, 3, 4)), (6,)),
    Case((GroupTiles(32, 16, 256, 4, 3, 4), GroupTiles(32, 16, 256, 4, 3, 4)), (24,)),
)


def choose_group_tiles(
    num_rows: int,
    num_chosen: int,
    num_experts: int,
    itemsize: int,
    room: int = SHARED_MEMORY,
    stored: bool = False,
) -> tuple[GroupTiles, GroupTiles] | None:
    """Return tiles of gate and up, and of down, for T = `num_rows` tokens; None if the path of
    `sorted_triton` is faster. room: bytes of shared memory that a program can use. stored: whether
    the weights are quantised."""
    pairs = num_rows * num_chosen / num_experts
    found = first_fit(STORED_GROUPS if stored else H200_GROUPS, (pairs,))
    if found is None or not 0 < num_rows <= MANY_TOKENS:
        return None
    return _fitted(found[0], 2, itemsize, room), _fitted(found[1], 1, itemsize, room)


def _fitted(tiles: GroupTiles, weights: int, itemsize: int, room: int) -> GroupTiles:
    """Fit tiles for 16-bit weights to `itemsize` and to `room`. weights: the number of weight tiles
    that a program reads per step."""
    if itemsize > 2:
        tiles = tiles._replace(block_k=tiles.block_k // 2)
    if room >= SHARED_MEMORY:
        return tiles
    stage = (tiles.block_m + weights * tiles.block_n) * tiles.block_k * itemsize
    # Without wgmma, a pipeline has one buffer fewer than it has stages.
    return tiles._replace(num_stages=min(tiles.num_stages, (room - SCRATCH) // stage + 1))
