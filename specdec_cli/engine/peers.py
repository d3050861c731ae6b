"""Memory that the GPUs of a group read from each other, for all-reduces of a few rows.

NCCL takes 20 us for what one read over NVLink does in 6 (measured on two H200). Whether a group
has such memory is agreed, since all of its ranks have to reduce in the same way.
"""

import logging

import torch
from specdec_kernels.peers import MAX_ROWS, Peers, num_flags

from specdec_cli.engine.parallel import TensorParallel

_log = logging.getLogger("specdec")


def shared_memory(parallel: TensorParallel, width: int, dtype: torch.dtype) -> Peers | None:
    """Room for MAX_ROWS rows of `width` on every rank; None where the GPUs cannot read each other.

    Every rank of the group has to call this.
    """
    if parallel.size == 1 or parallel.device.type != "cuda":
        return None
    try:
        found, problem = _allocate(parallel, width, dtype), None
    except (RuntimeError, ImportError, AttributeError, OSError) as error:
        found, problem = None, str(error).partition("\n")[0]
    problems = [p for p in parallel.gather_objects(problem) if p is not None]
    if problems:
        _log.info("no memory shared between GPUs, small sums go through NCCL: %s", problems[0])
        return None
    return found


def _allocate(parallel: TensorParallel, width: int, dtype: torch.dtype) -> Peers:
    import torch.distributed._symmetric_memory as symmetric

    assert parallel.group is not None
    device, size = parallel.device, parallel.size
    flags = num_flags(width)
    num_parts = 2 * MAX_ROWS * width
    part_bytes = -(-num_parts * dtype.itemsize // 128) * 128
    num_bytes = part_bytes + flags * size * 4
    held = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    handle = symmetric.rendezvous(held, parallel.group)
    held.zero_()
    torch.cuda.synchronize(device)
    parallel.gather_objects(0)  # nobody announces anything before all flags are zero
    starts = [handle.get_buffer(rank, (1,), torch.uint8).data_ptr() for rank in range(size)]
    addresses = torch.tensor(starts, dtype=torch.int64, device=device)
    return Peers(
        rank=parallel.rank,
        size=size,
        # The view keeps the allocation, which peers read, alive.
        parts=held[: num_parts * dtype.itemsize].view(dtype).view(2, MAX_ROWS, width),
        addresses=addresses,
        flags=addresses + part_bytes,
        epochs=torch.zeros(flags, dtype=torch.int32, device=device),
    )
