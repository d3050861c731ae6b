"""Launch configurations of attention: functions of the shapes, tuned on an H200."""

import math
from typing import NamedTuple

from specdec_kernels.gpu import (
    H100,
    MULTIPROCESSORS,
    SHARED_MEMORY,
    Gpu,
    power_of_2_from,
    power_of_2_to,
)
from specdec_kernels.tiles import Case, first_fit, table_for

MAX_SPLITS = 33
MAX_PAGED_SPLITS = 32
FEW_SPLITS = 9
MIN_KEYS = 128  # minimum keys in a part; the new keys cost about as much as this many older keys
COMBINED = 64  # partial values that a thread holds at a time when it combines parts
ALONE = 128  # a context of at most this many older keys is not split, so nothing is combined
SCRATCH = 8192  # bytes of shared memory for exchanges between warps
SHORT_CONTEXT = 2048  # up to this context length, fewer programs with more registers are faster


class Cut(NamedTuple):
    """Launch configuration of `decode_triton.rope_attention_kernel`."""

    splits: int  # maximum number of parts into which a context is split
    few_parts: int  # `few_parts` combines up to this many parts, and `many_parts` more than that
    few_rows: int  # rows that a program combines at a time if there are up to `few_parts` parts
    many_rows: int  # rows that a program combines at a time if there are more parts
    block_m: int  # rows of a tile: query tokens times query heads per key head
    block_new: int  # size of the tile of new keys
    block_n: int  # size of a tile of older keys
    block_d: int  # head dimension, padded
    num_warps: int
    num_stages: int
    maxnreg: int | None  # maximum registers per thread, or None for no limit


# The number of pipeline stages if contexts are not split. Each case has three upper limits: bytes
# of a padded head, rows of a tile, and programs per multiprocessor. A program that is alone on a
# multiprocessor, or has small heads, must load further ahead. `H200[0]` has 7 stages so that a
# multiprocessor runs two programs at a time: with fewer stages, a third program would fit.
H200 = (
    Case(7, (128, 16, math.inf)),
    Case(5, (128, 32, math.inf)),
    Case(5, (256, 32, 1)),
    Case(2, (256, 16, math.inf)),
)
DEPTHS = {(9, 0): H200}  # by compute capability
SHALLOW = 3  # pipeline stages if no case applies, or if contexts are split


def depth_of(device: tuple[int, int], head_bytes: int, block_m: int, crowding: float) -> int:
    """Return the number of pipeline stages from the table for `device`, or SHALLOW."""
    return first_fit(table_for(DEPTHS, device), (head_bytes, block_m, crowding)) or SHALLOW


def num_splits(programs: int, max_context: int, at_once: int) -> int:
    """Return the maximum number of parts of a context.

    The programs for the parts of a context wait for each other, so all must run at the same time.
    Hence `programs` times the number of parts may be at most `at_once`.

    programs: the number of programs if contexts are not split.
    at_once: the number of programs that the GPU can run at the same time.

    Returns 1 if fewer than 3 parts per context fit. With 2 parts, one would be busy with the new
    keys, so splitting would save less time than combining costs.
    """
    fitting = at_once // programs
    if fitting < 3:
        return 1
    return min(fitting, -(-max_context // MIN_KEYS) + 1, MAX_SPLITS)


def choose_cut(
    max_query_len: int,
    group: int,
    kv_heads: int,
    head_dim: int,
    itemsize: int,
    num_sequences: int,
    max_context: int,
    splits: int | None = None,
    block_n: int | None = None,
    gpu: Gpu = H100,
) -> Cut:
    """Choose the launch configuration for block tables with space for `max_context` tokens."""
    device, multiprocessors, room = gpu
    block_m = max(16, power_of_2_from(max_query_len * group))
    block_d = max(32, power_of_2_from(head_dim))
    programs = num_sequences * kv_heads
    block_n = block_n or max(16, min(128, 2**15 // (block_d * itemsize)))
    while block_n > 16 and stages_within(room, block_m, block_n, block_d, itemsize) < 3:
        block_n //= 2
    num_warps = 8 if block_m * max(block_d, block_n) > 64 * 128 else 4
    # `each` is the number of programs that fit into a multiprocessor's registers and shared memory.
    each = 2 if block_m <= 32 else 1
    crowded = (
        block_d * itemsize <= 128
        and block_m * block_d <= 32 * 64
        and programs * MAX_SPLITS > 2 * multiprocessors
        and max_context > SHORT_CONTEXT
    )
    if crowded:
        each = 3
    splits = splits or num_splits(programs, max_context, each * multiprocessors)
    few_parts = min(splits, FEW_SPLITS)
    crowding = programs / multiprocessors
    depth = depth_of(device, block_d * itemsize, block_m, crowding) if splits == 1 else SHALLOW
    num_stages = min(depth, stages_within(room, block_m, block_n, block_d, itemsize))
    return Cut(
        splits=splits,
        few_parts=few_parts,
        few_rows=rows_combined(few_parts, block_m, block_d, num_warps),
        many_rows=rows_combined(splits, block_m, block_d, num_warps),
        block_m=block_m,
        block_new=max(16, power_of_2_from(max_query_len)),
        block_n=block_n,
        block_d=block_d,
        num_warps=num_warps,
        num_stages=num_stages,
        maxnreg=168 if crowded and splits > 1 else None,
    )


def stages_within(room: int, block_m: int, block_n: int, block_d: int, itemsize: int) -> int:
    """Return the number of pipeline stages that fit into `room` bytes of shared memory.

    The memory also holds queries, weights, SCRATCH bytes and, in fp32, one more tile. A pipeline of
    n stages needs space for n - 1 tiles, each of keys or of values. A tile of keys and a tile of
    values therefore fit only if there are at least 3 stages.
    """
    tile = block_n * block_d * itemsize
    others = block_m * (block_d + block_n) * itemsize + (tile if itemsize == 4 else 0) + SCRATCH
    return max(0, room - others) // tile + 1


def rows_combined(parts: int, block_m: int, block_d: int, num_warps: int) -> int:
    """Return the number of rows that a program combines at a time.

    The `parts` partial results of these rows must fit into the program's registers. The number is
    at most a quarter of a tile's rows, because several programs share the rows of a tile.
    """
    fitting = COMBINED * 32 * num_warps // (parts * block_d)
    return min(block_m // 4, power_of_2_to(fitting))


class PagedTiles(NamedTuple):
    """Launch configuration of `paged_triton.paged_attention_kernel`."""

    block_m: int  # rows of a tile: query tokens times query heads per key head
    block_n: int  # keys per step
    block_dk: int  # features of a key, padded
    block_dv: int  # features of a value, padded
    splits: int  # number of parts into which a context is split
    packed: bool  # whether tiles of queries are numbered by packed token
    num_warps: int
    num_stages: int = 3


def paged_tiles(
    max_query_len: int, group: int, head_bytes: int, room: int = SHARED_MEMORY
) -> tuple[int, int]:
    """Choose the number of rows and the number of keys of a tile for `paged_attention`.

    A tile of queries and two tiles each of keys and values must fit into `room` bytes of shared
    memory. The tile of queries has at most 32 KiB, unless the heads of one query token need more.

    max_query_len: the number of queries in the longest sequence.
    group: the number of query heads per key head.
    head_bytes: the size of a padded head.
    """
    rows = power_of_2_from(max_query_len * group)
    block_m = max(16, min(rows, 128, 2**15 // head_bytes), power_of_2_from(group))
    block_n = 64 if head_bytes <= 256 else 32
    if block_m * head_bytes + 4 * block_n * head_bytes > room:
        block_n //= 2
    return block_m, block_n


def paged_splits(programs: int, max_context: int, block_n: int) -> int:
    """Return the number of parts of a context. It is a power of two, so that only few variants of
    the kernel are compiled.

    Splitting yields at most two programs per multiprocessor, which are enough.

    programs: the number of programs if contexts are not split.
    """
    wanted = min(2 * MULTIPROCESSORS // programs, -(-max_context // block_n), MAX_PAGED_SPLITS)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1
