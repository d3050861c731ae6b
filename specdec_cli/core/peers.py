"""Memory that all GPUs of a group can read, for all-reduces and gathers of a few rows.

It is faster than NCCL for small tensors. For example, NCCL takes 8 to 16 us to add 64 or fewer rows
on two H200s, but reading the other GPU's rows over NVLink takes only 4 to 7 us. Either all ranks
use this memory or none does, because all ranks must run the same collective.
"""

import logging
from math import prod
from typing import NamedTuple

import torch
from specdec_kernels.comm.peers import (
    MAX_ROWS,
    Peers,
    num_gather_flags,
    num_pushed_words,
    num_sum_flags,
)

from specdec_cli.core.parallel import TensorParallel
from specdec_cli.text import first_line

_log = logging.getLogger("specdec")

# The groups in which this process has connected to others through shared memory. torch counts
# these connections internally, and ranks with different counts wait for each other forever. So this
# module counts too, and compares the ranks' counts before they connect.
_meetings: list[str] = []


class Shared(NamedTuple):
    """Memory that the ranks of a model share. Collectives over at most MAX_ROWS rows are faster
    through this memory than through NCCL.

    sums: memory for `ops.reduce_add_norm`.
    logits: memory for `ops.gather_columns`; None if the number of ranks does not divide the
    vocabulary.
    """

    sums: Peers
    logits: Peers | None


def shared_memory(
    parallel: TensorParallel, width: int, vocab_size: int, dtype: torch.dtype
) -> Shared | None:
    """Allocate shared memory for MAX_ROWS rows on every rank. Every rank of the group must call
    this. width: the width of the residual stream.

    Returns None if there is only one rank or no GPU, if the GPUs cannot read each other's memory,
    or if some ranks have connected through shared memory more often than others (see
    `compare_meetings`).
    """
    if parallel.size == 1 or parallel.device.type != "cuda":
        return None
    try:
        compare_meetings(parallel)
        found, problem = _shared(parallel, width, vocab_size, dtype), None
    except (RuntimeError, ImportError, AttributeError, OSError) as error:
        found, problem = None, first_line(error)
    problems = [p for p in parallel.gather_objects(problem) if p is not None]
    if problems:
        _log.info("GPUs share no memory, so small sums go through NCCL: %s", problems[0])
        return None
    return found


def compare_meetings(parallel: TensorParallel) -> None:
    """Raise RuntimeError on all ranks if some have connected through shared memory more often than
    others, because they would then wait for each other forever."""
    if len(set(parallel.gather_objects(len(_meetings)))) > 1:
        raise RuntimeError("some ranks have connected through shared memory more often than others")


def _shared(parallel: TensorParallel, width: int, vocab_size: int, dtype: torch.dtype) -> Shared:
    words = num_pushed_words(parallel.size, width, dtype.itemsize)
    sums = _allocate(parallel, (2, MAX_ROWS, width), dtype, num_sum_flags(width), words)
    share, rest = divmod(vocab_size, parallel.size)
    if rest:
        return Shared(sums, None)
    flags = num_gather_flags(share)
    return Shared(sums, _allocate(parallel, (1, MAX_ROWS, share), dtype, flags))


def _allocate(
    parallel: TensorParallel,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    flags: int,
    words: int = 0,
) -> Peers:
    import torch.distributed._symmetric_memory as symmetric

    assert parallel.group is not None
    device, size = parallel.device, parallel.size
    num_parts = prod(shape)
    part_bytes = -(-num_parts * dtype.itemsize // 128) * 128
    flag_bytes = -(-flags * size * 4 // 128) * 128
    num_bytes = part_bytes + flag_bytes + words * 8
    held = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    _meetings.append(parallel.group.group_name)
    handle = symmetric.rendezvous(held, parallel.group)
    held.zero_()
    torch.cuda.synchronize(device)
    parallel.gather_objects(0)  # no rank may set a flag before every rank has zeroed its flags
    starts = [handle.get_buffer(rank, (1,), torch.uint8).data_ptr() for rank in range(size)]
    addresses = torch.tensor(starts, dtype=torch.int64, device=device)
    return Peers(
        rank=parallel.rank,
        size=size,
        # This view keeps the allocation alive, which other ranks read by its address.
        parts=held[: num_parts * dtype.itemsize].view(dtype).view(shape),
        addresses=addresses,
        flags=addresses + part_bytes,
        epochs=torch.zeros(flags, size, dtype=torch.int32, device=device),
        pushed=addresses + part_bytes + flag_bytes if words else None,
        pushes=torch.zeros(flags, dtype=torch.int32, device=device),
    )
