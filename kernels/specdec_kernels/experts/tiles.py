"""Launch configurations of the experts' matmuls, measured on an H200."""

from typing import NamedTuple

from torch import Tensor

from specdec_kernels.gpu import SHARED_MEMORY
from specdec_kernels.linear.stored import BLOCK, Stored
from specdec_kernels.linear.tiles import SCRATCH, is_tiled, slices_for
from specdec_kernels.tiles import Case, first_fit

# Maximum tokens for `grouped_triton`, by the way in which weights are read (see `way_of`). For more
# tokens, quantised weights are dequantised, and `sorted_triton` multiplies.
MANY_TOKENS = {"plain": 512, "stored": 1024, "sliced": 512, "tiled": 4096}


class ExpertTiles(NamedTuple):
    """Launch configuration of the kernels of `gate_up_triton` and `down_triton`."""

    block_m: int  # at least the number of tokens; if below 16, tokens are the matmul's columns
    block_n: int  # features per program
    block_k: int  # step along the reduction dimension
    slices: int  # block_k is divided into this many slices, each handled by some of the warps
    # Number of programs among which chosen experts, or their parts, are divided; 1 for gate and up.
    splits: int
    # Number of experts whose weights a program prefetches before it waits for the preceding kernel.
    # It is 0 for gate and up.
    ahead: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None  # maximum registers per thread, or None for no limit
    parts: int = 1  # number of parts of each expert's columns; above 1 only for tiled weights


# Each case holds the tiles for the gate and up projections, those for the down projection, and the
# maximum number of tokens for which they are used. They were measured with scripts/bench/experts.py
# on experts of 2048 x 768. The down projection is faster if the chosen experts are divided among
# several programs, although the last of these must then add up the partial sums of the others.
H200 = (
    Case((ExpertTiles(8, 64, 128, 1, 1, 0, 4, 4), ExpertTiles(8, 16, 256, 4, 4, 2, 4, 5)), (2,)),
    Case((ExpertTiles(8, 16, 512, 4, 1, 0, 4, 3), ExpertTiles(8, 16, 256, 4, 4, 2, 4, 5)), (8,)),
    Case((ExpertTiles(16, 32, 256, 1, 1, 0, 4, 3), ExpertTiles(16, 32, 128, 1, 8, 2, 4, 5)), (16,)),
)
# `STORED` has the cases for quantised weights. These are always the matmul's left operand, whereas
# other weights are the right operand if block_m is 16. The tiles are used for all inputs of up to
# 16 tokens, even if every expert is chosen, because `SLICED_GROUPS` was not measured for so few
# tokens.
STORED = (
    Case((ExpertTiles(8, 16, 512, 4, 1, 0, 4, 3), ExpertTiles(8, 16, 256, 4, 4, 2, 4, 4)), (2,)),
    Case((ExpertTiles(8, 16, 256, 4, 1, 0, 4, 4), ExpertTiles(8, 16, 256, 4, 8, 2, 4, 4)), (8,)),
    Case((ExpertTiles(16, 16, 512, 4, 1, 0, 4, 3), ExpertTiles(16, 16, 256, 4, 8, 2, 4, 4)), (16,)),
)
# `TILED` has the cases for weights in the order of `Stored.tiled`, measured on gpt-oss's experts of
# 2880 x 2880 and 2880 x 1440. A tile has 64 rows of the weight, which are 32 features of gate and
# up, or 64 of down. For one or two tokens, halves of an expert's columns were faster than whole
# ones. Prefetching weights of down took longer.
_GATE_UP = ExpertTiles(8, 32, 256, 1, 1, 0, 4, 3, 96)
_DOWN = ExpertTiles(8, 64, 256, 1, 16, 0, 4, 3, 96)
TILED = (
    Case((_GATE_UP, _DOWN._replace(splits=8, maxnreg=None, parts=2)), (1,)),
    Case((_GATE_UP, _DOWN._replace(parts=2)), (2,)),
    Case((_GATE_UP._replace(maxnreg=80), _DOWN), (4,)),
    Case((_GATE_UP._replace(maxnreg=80), _DOWN._replace(splits=32)), (8,)),
)
EXPERTS = {"plain": H200, "stored": STORED, "sliced": STORED, "tiled": TILED}
PARTIAL_SUMS = max(down.splits for cases in EXPERTS.values() for (_, down), *_ in cases)


def way_of(gate_up: Tensor | Stored, down: Tensor | Stored) -> str:
    """Return the way in which kernels read the two weights of experts.

    "tiled" is for weights in the order of `Stored.tiled`, "stored" for quantised weights in which
    128 columns of a row share a scale, "sliced" for other quantised weights, and "plain" for
    weights that are not quantised.
    """
    if isinstance(gate_up, Tensor):
        return "plain"
    if is_tiled(gate_up):
        return "tiled"
    held = [weight for weight in (gate_up, down) if isinstance(weight, Stored)]
    return "stored" if all(slices_for(weight, BLOCK, 1) == 1 for weight in held) else "sliced"


def choose_expert_tiles(
    num_rows: int, itemsize: int, way: str = "plain"
) -> tuple[ExpertTiles, ExpertTiles]:
    """Return the tiles for the gate and up projections, and those for the down projection, for
    T = `num_rows` tokens.

    itemsize: bytes per value of the activations.
    way: how the weights are read, a result of `way_of`.
    """
    found = first_fit(EXPERTS[way], (num_rows,))
    assert found is not None
    gate_up, down = found
    if itemsize > 2:
        gate_up = gate_up._replace(block_k=gate_up.block_k // 2)
        down = down._replace(block_k=down.block_k // 2)
    return gate_up, down


def most_tokens(way: str) -> int:
    """Return for how many tokens there are `ExpertTiles`."""
    return int(EXPERTS[way][-1].most[0])


class RouterTiles(NamedTuple):
    """Launch configuration of the kernels of `route_triton` and `group_triton`."""

    block_m: int  # tokens per program, the columns of its matmul
    block_e: int  # experts per program, the rows of its matmul
    depth: int  # step along the reduction dimension
    slices: int  # `depth` is divided into this many slices, one per warp
    early: int  # values of each router row to load before waiting for the preceding kernel


def router_tiles(width: int, itemsize: int) -> RouterTiles:
    """Return tiles for a router whose rows have `width` values of `itemsize` bytes."""
    return RouterTiles(8, 16, 2048 // itemsize, 8, min(width, 8192 // itemsize))


class GroupTiles(NamedTuple):
    """Launch configuration of the kernel of `grouped_triton`."""

    block_m: int  # (token, expert) pairs that a program computes at a time
    block_n: int  # features per program
    block_k: int  # step along the reduction dimension
    num_warps: int
    num_stages: int
    slices: int = 1  # block_k is divided into this many slices; above 1 for quantised weights
    maxnreg: int | None = None  # maximum registers per thread, or None for no limit


# Each case holds the tiles for the gate and up projections, those for the down projection, and the
# maximum average number of pairs per expert for which they are used. Most block_m are far above
# this average: tokens of a sequence choose similar experts, so some experts have three times as
# many pairs. If these did not fit into one block, a second block would read all weights from L2
# again, which takes nearly as long as the first.
H200_GROUPS = (
    Case((GroupTiles(16, 64, 128, 4, 3), GroupTiles(16, 128, 128, 8, 3)), (6,)),
    Case((GroupTiles(32, 64, 64, 4, 5), GroupTiles(32, 128, 64, 8, 5)), (12,)),
    Case((GroupTiles(64, 64, 64, 4, 6), GroupTiles(64, 128, 64, 4, 4)), (24,)),
    Case((GroupTiles(64, 64, 128, 4, 4), GroupTiles(64, 128, 128, 4, 4)), (64,)),
)

SLICED_GROUPS = (
    Case((GroupTiles(16, 32, 256, 4, 3, 4), GroupTiles(16, 32, 256, 4, 3, 4)), (6,)),
    Case((GroupTiles(32, 16, 256, 4, 3, 4), GroupTiles(32, 16, 256, 4, 3, 4)), (24,)),
)
# `STORED_GROUPS` was measured on experts of 2048 x 768, in fp8 and int4.
STORED_GROUPS = (
    SLICED_GROUPS[0],
    Case((GroupTiles(64, 64, 128, 4, 3), GroupTiles(64, 64, 128, 4, 4)), (48,)),
    Case((GroupTiles(64, 64, 128, 4, 3), GroupTiles(128, 64, 128, 4, 3)), (1024,)),
)
# With more registers than these, fewer programs of gate and up run side by side.
TILED_GROUPS = (
    Case((GroupTiles(8, 32, 256, 4, 3, 1, 80), GroupTiles(8, 64, 256, 4, 3, 1, 96)), (5,)),
    Case((GroupTiles(16, 32, 256, 4, 3, 1, 128), GroupTiles(16, 64, 256, 4, 3)), (10,)),
    Case((GroupTiles(32, 32, 128, 4, 4, 1, 128), GroupTiles(32, 64, 256, 4, 3)), (24,)),
    Case((GroupTiles(64, 32, 256, 4, 3), GroupTiles(64, 64, 256, 4, 3)), (48,)),
    Case((GroupTiles(64, 32, 256, 4, 3), GroupTiles(128, 64, 128, 4, 3)), (160,)),
    Case((GroupTiles(128, 64, 128, 8, 3), GroupTiles(128, 64, 128, 4, 3)), (1024,)),
)
GROUPS = {
    "plain": H200_GROUPS,
    "stored": STORED_GROUPS,
    "sliced": SLICED_GROUPS,
    "tiled": TILED_GROUPS,
}


def choose_group_tiles(
    num_rows: int,
    num_chosen: int,
    num_experts: int,
    itemsize: int,
    room: int = SHARED_MEMORY,
    way: str = "plain",
) -> tuple[GroupTiles, GroupTiles] | None:
    """Return the tiles for the gate and up projections, and those for the down projection, for
    T = `num_rows` tokens. Return None if `sorted_triton` is faster.

    itemsize: bytes per value of the activations.
    room: bytes of shared memory that a program can use.
    way: how the weights are read, a result of `way_of`.
    """
    if way == "stored" and itemsize > 2:
        way = "sliced"  # the larger tiles would not fit
    pairs = num_rows * num_chosen / num_experts
    found = first_fit(GROUPS[way], (pairs,))
    if found is None or not 0 < num_rows <= MANY_TOKENS[way]:
        return None
    return _fitted(found[0], 2, itemsize, room), _fitted(found[1], 1, itemsize, room)


def _fitted(tiles: GroupTiles, weights: int, itemsize: int, room: int) -> GroupTiles:
    """Adapt tiles that were chosen for 16-bit values on an H200.

    weights: the number of weight tiles that a program reads per step.
    itemsize: bytes per value. If it is above 2, `block_k` is halved.
    room: bytes of shared memory that a program can use. If it is less than an H200's, `num_stages`
        is reduced to fit.
    """
    if itemsize > 2:
        tiles = tiles._replace(block_k=tiles.block_k // 2)
    if room >= SHARED_MEMORY:
        return tiles
    stage = (tiles.block_m + weights * tiles.block_n) * tiles.block_k * itemsize
    # Without wgmma, a pipeline has one buffer fewer than it has stages.
    return tiles._replace(num_stages=min(tiles.num_stages, (room - SCRATCH) // stage + 1))
