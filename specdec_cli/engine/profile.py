"""How many KV blocks to allocate: what fits, and never more than the run can use."""

import os
from dataclasses import dataclass

import torch

from specdec_cli.engine.parallel import ALONE, TensorParallel, local_world_size
from specdec_cli.errors import SetupError

_CPU_SHARE = 0.5  # of the host's available memory, when the recipe sets no cpu_bytes


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """What a run asks of the cache.

    longest: tokens of its longest sequence. k: largest proposal length.
    """

    batch_size: int
    longest: int
    k: int
    block_size: int

    @property
    def num_blocks(self) -> int:
        """Blocks the run can use: two rounds' room for each slot, and the trash block."""
        per_sequence = -(-(self.longest + 2 * (self.k + 1)) // self.block_size)
        return self.batch_size * per_sequence + 1

    @property
    def least_blocks(self) -> int:
        """Blocks without which the longest sequence cannot run alone."""
        return -(-(self.longest - 1) // self.block_size) + 1


def choose_num_blocks(
    need: CacheNeed,
    bytes_per_block: int,
    device: torch.device,
    *,
    gpu_memory_utilization: float,
    cpu_bytes: int | None,
    parallel: TensorParallel = ALONE,
) -> int:
    """Blocks to allocate now that the weights are loaded: what fits on the rank with least room.

    bytes_per_block: of both models together, on this rank. Raises `SetupError` with the numbers
    when not even the smallest cache fits.
    """
    budget = _budget(device, gpu_memory_utilization, cpu_bytes)
    found = parallel.gather_objects((budget // bytes_per_block, budget, bytes_per_block))
    fits, budget, bytes_per_block = least = min(found)
    if fits < 2:
        where = str(device) if parallel.size == 1 else f"rank {found.index(least)}"
        raise SetupError(
            f"no room for a KV cache on {where}: {_mib(budget)} MiB are left for it and one block "
            f"of {need.block_size} tokens takes {_mib(bytes_per_block)} MiB",
            "use smaller models or a smaller dtype, or raise cache.gpu_memory_utilization "
            "(cache.cpu_bytes on CPU)",
        )
    return min(fits, need.num_blocks)


def _budget(device: torch.device, utilization: float, cpu_bytes: int | None) -> int:
    """Bytes that the caches may take."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1.0 - utilization) * total))
    whole = int(_available_memory() * _CPU_SHARE) if cpu_bytes is None else cpu_bytes
    return whole // local_world_size()


def _available_memory() -> int:
    """Available host memory in bytes: Linux' own estimate, else the free pages."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f}"
