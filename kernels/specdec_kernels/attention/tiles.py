"""Launch configurations of attention, chosen from shapes and measured on an H200."""

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
MIN_KEYS = 128  # minimum keys in a part; new keys count as this many older ones
COMBINED = 64  # values combined per thread at a time
ALONE = 128  # up to this many older keys form one part with the new keys, so nothing is combined
SCRATCH = 8192  # bytes of shared memory for exchanges between warps
SHORT_CONTEXT = 2048  # up to this length fewer parts with more registers each are faster


class Cut(NamedTuple):
    """Launch configuration of `decode_triton.rope_attention_kernel`."""

    splits: int  # maximum parts of the context
    few_parts: int  # up to this many parts, rows are combined `few_rows` at a time
    few_rows: int
    many_rows: int
    block_m: int  # rows of a tile: query tokens times query heads per key head
    block_new: int  # new keys
    block_n: int  # older keys per step
    block_d: int  # head dimension, padded
    num_warps: int
    num_stages: int
    maxnreg: int | None  # registers per thread


# Pipeline stages of programs with a whole context, by maximum bytes of a padded head, rows of a
# tile, and programs per multiprocessor. A program alone on a multiprocessor, or with small heads,
# must load further ahead. Fewer than 7 stages would leave room for a third program where two are
# intended.
H200 = (
    Case(7, (128, 16, math.inf)),
    Case(5, (128, 32, math.inf)),
    Case(5, (256, 32, 1)),
    Case(2, (256, 16, math.inf)),
)
DEPTHS = {(9, 0): H200}  # by compute capability
SHALLOW = 3  # pipeline stages of programs that no case fits


def depth_of(device: tuple[int, int], head_bytes: int, block_m: int, crowding: float) -> int:
    """The pipeline stages in the table of `device`."""
    return first_fit(table_for(DEPTHS, device), (head_bytes, block_m, crowding)) or SHALLOW


def num_splits(programs: int, max_context: int, at_once: int) -> int:
    """Return the maximum number of parts of a context. The parts of all `programs` must be at most
    `at_once`, since they wait for each other. One part has the new keys; two parts save less than
    combining them costs."""
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
    """Launch configuration of attention over block tables for `max_context` tokens."""
    device, multiprocessors, room = gpu
    block_m = max(16, power_of_2_from(max_query_len * group))
    block_d = max(32, power_of_2_from(head_dim))
    programs = num_sequences * kv_heads
    block_n = block_n or max(16, min(128, 2**15 // (block_d * itemsize)))
    while block_n > 16 and stages_within(room, block_m, block_n, block_d, itemsize) < 3:
        block_n //= 2
    num_warps = 8 if block_m * max(block_d, block_n) > 64 * 128 else 4
    # Programs that fit on a multiprocessor, by their registers and shared memory.
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
    """Return the number of pipeline stages over tiles of keys that fit into `room` bytes of shared
    memory beside queries, weights and, in fp32, one more tile. Fewer than 3 have no room for keys
    and values."""
    tile = block_n * block_d * itemsize
    others = block_m * (block_d + block_n) * itemsize + (tile if itemsize == 4 else 0) + SCRATCH
    return max(0, room - others) // tile + 1


def rows_combined(parts: int, block_m: int, block_d: int, num_warps: int) -> int:
    """Return the number of rows whose `parts` parts fit into a program's registers. Programs share
    BLOCK_M rows."""
    fitting = COMBINED * 32 * num_warps // (parts * block_d)
    return min(block_m // 4, power_of_2_to(fitting))


class PagedTiles(NamedTuple):
    """Launch configuration of `paged_triton.paged_attention_kernel`."""

    block_m: int  # rows of a tile: query tokens times query heads per key head
    block_n: int  # keys per step
    block_dk: int  # features of a key, padded
    block_dv: int  # features of a value, padded
    splits: int  # parts of the context
    packed: bool  # whether tiles of queries are numbered by packed token
    num_warps: int
    num_stages: int = 3


def paged_tiles(
    max_query_len: int, group: int, head_bytes: int, room: int = SHARED_MEMORY
) -> tuple[int, int]:
    """Return the rows and keys of a tile of `paged_attention`. Shared memory of `room` bytes holds
    a tile of queries, of at most 32 KiB unless one group is larger, and two tiles each of keys and
    values. max_query_len: that of the longest sequence. group: query heads of a key head.
    head_bytes: bytes of a padded head.
    """
    rows = power_of_2_from(max_query_len * group)
    block_m = max(16, min(rows, 128, 2**15 // head_bytes), power_of_2_from(group))
    block_n = 64 if head_bytes <= 256 else 32
    if block_m * head_bytes + 4 * block_n * head_bytes > room:
        block_n //= 2
    return block_m, block_n


def paged_splits(programs: int, max_context: int, block_n: int) -> int:
    """The number of parts of a context. It is a power of two, so that few variants are compiled.
    Two programs per multiprocessor are enough."""
    wanted = min(2 * MULTIPROCESSORS // programs, -(-max_context // block_n), MAX_PAGED_SPLITS)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1
