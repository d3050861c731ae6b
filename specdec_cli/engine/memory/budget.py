"""Computes how many KV blocks fit into each rank's memory, and how many a run can use."""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from specdec_cli.core.address_space import address_space
from specdec_cli.core.control_groups import folders, number
from specdec_cli.core.parallel import local_world_size
from specdec_cli.errors import NoRoomError
from specdec_cli.recipe import CacheSection

CPU_SHARE = 0.5  # the caches' share of available host memory if the recipe sets no cpu_bytes


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """The sizes of a run that determine how many cache blocks it needs.

    longest: the number of tokens of the longest sequence.
    k: the maximum number of tokens that a round proposes per sequence, or one less than the number
    of tokens that a draft pass feeds per sequence, whichever is larger.
    """

    batch_size: int
    longest: int
    k: int
    block_size: int

    @property
    def blocks_per_sequence(self) -> int:
        """The number of blocks that the longest sequence needs, including space for the tokens of
        two more rounds."""
        return -(-(self.longest + 2 * (self.k + 1)) // self.block_size)

    @property
    def num_blocks(self) -> int:
        """The number of blocks that the run can use: `blocks_per_sequence` for each slot, and block
        0, which is used only for padding."""
        return self.batch_size * self.blocks_per_sequence + 1


@dataclass(frozen=True, slots=True)
class RankMemory:
    """One rank's memory in bytes, broken down by use. The draft's sizes are zero on a rank that
    holds no part of the draft.

    activation_bytes: the peak memory of passes.
    graph_bytes: the memory of captured rounds.
    other_bytes: memory that torch does not manage. It is used by other processes, the CUDA context,
        kernels and communication.
    kv_budget_bytes: the memory that is left for both caches.
    target_block_bytes, draft_block_bytes: the size of one block in each cache.
    """

    rank: int
    device: str
    total_bytes: int
    target_weight_bytes: int
    draft_weight_bytes: int
    activation_bytes: int
    graph_bytes: int
    other_bytes: int
    kv_budget_bytes: int
    target_block_bytes: int
    draft_block_bytes: int

    @property
    def block_bytes(self) -> int:
        """The bytes of one block in both caches together."""
        return self.target_block_bytes + self.draft_block_bytes

    @property
    def fits(self) -> int:
        """The number of blocks that would fit on this rank, regardless of other ranks."""
        return self.kv_budget_bytes // self.block_bytes

    @property
    def held_bytes(self) -> int:
        """The bytes in use before the first block is allocated."""
        return (
            self.target_weight_bytes
            + self.draft_weight_bytes
            + self.activation_bytes
            + self.graph_bytes
            + self.other_bytes
        )

    @property
    def free_bytes(self) -> int:
        """The bytes of the device that stay free even if the caches use their whole budget."""
        return max(0, self.total_bytes - self.held_bytes - self.kv_budget_bytes)


@dataclass(frozen=True, slots=True)
class Split:
    """The memory of all ranks. All ranks get the same number of blocks, so the number is limited by
    the rank where the fewest blocks fit.

    is_limit: True if, on a CPU, weights, activations and caches together must fit into the total.
    """

    ranks: tuple[RankMemory, ...]
    is_limit: bool = False

    @property
    def limiting(self) -> RankMemory:
        return min(self.ranks, key=lambda r: (r.fits, r.rank))

    @property
    def num_blocks(self) -> int:
        """The number of blocks on each rank, including block 0, which is used only for padding."""
        return self.limiting.fits

    def stranded_bytes(self, rank: RankMemory) -> int:
        """Return the bytes of its cache budget that `rank` cannot use because fewer blocks fit on
        another rank."""
        return rank.kv_budget_bytes - self.num_blocks * rank.block_bytes

    def check(self, block_size: int) -> None:
        """Raise `NoRoomError` unless at least two blocks fit, the minimum for a cache. The error's
        message states the sizes involved."""
        least = self.limiting
        if least.fits >= 2:
            return
        where = least.device if len(self.ranks) == 1 else f"rank {least.rank} ({least.device})"
        message = (
            f"no room for a KV cache on {where}: {mib(least.kv_budget_bytes)} MiB are left, but "
            f"one block of {block_size} tokens takes {mib(least.block_bytes)} MiB"
        )
        hint = (
            "use smaller models or a smaller dtype, or raise cache.gpu_memory_utilization "
            "(cache.cpu_bytes on CPU)"
        )
        # A CPU's budget does not depend on other memory use, unless all of it has to fit.
        if self.is_limit or not least.device.startswith("cpu"):
            message += (
                f"; of {mib(least.total_bytes)} MiB, weights take "
                f"{mib(least.target_weight_bytes)} (target) and {mib(least.draft_weight_bytes)} "
                f"(draft), activations {mib(least.activation_bytes)}, graphs "
                f"{mib(least.graph_bytes)}, others {mib(least.other_bytes)}"
            )
        else:
            hint += ulimit_hint()
        raise NoRoomError(message, hint)


@dataclass(frozen=True, slots=True)
class Overhead:
    """A rank's memory in bytes, not counting weights and caches. The fields mean the same as in
    `RankMemory`."""

    total_bytes: int
    activation_bytes: int
    graph_bytes: int
    other_bytes: int


def kv_budget(
    cache: CacheSection, device: torch.device, overhead: Overhead, weight_bytes: int
) -> int:
    """Return the bytes that are left for both caches on this rank, once its weights are loaded."""
    if device.type == "cuda":
        return gpu_budget(cache, overhead, weight_bytes)
    return host_budget(cache, available_memory(), local_world_size())


def gpu_budget(cache: CacheSection, overhead: Overhead, weight_bytes: int) -> int:
    """Return the bytes that are left for both caches on a GPU."""
    whole = int(cache.gpu_memory_utilization * overhead.total_bytes)
    held = overhead.activation_bytes + overhead.graph_bytes + overhead.other_bytes
    return max(0, whole - weight_bytes - held)


def host_budget(cache: CacheSection, available: int, num_ranks: int) -> int:
    """Return the bytes for both caches on each of the `num_ranks` ranks that share a host's CPU.
    available: the host's available memory in bytes."""
    whole = int(available * CPU_SHARE) if cache.cpu_bytes is None else cache.cpu_bytes
    return whole // num_ranks


def on_host(activation_bytes: int, weight_bytes: int) -> Overhead:
    """Return the overhead of a rank on a CPU. The host's memory is divided equally among its ranks.
    The result includes activations only so that they can be shown: the budget for the caches on a
    CPU does not depend on them."""
    ranks = local_world_size()
    total = total_memory() // ranks
    taken = (total_memory() - available_memory()) // ranks
    return Overhead(total, activation_bytes, 0, max(0, taken - weight_bytes))


def room_now(device: torch.device, cache: CacheSection) -> int:
    """Return how many bytes of GPU memory the run may still allocate: what is free now, minus what
    `gpu_memory_utilization` reserves for others. The result may be negative."""
    free, total = torch.cuda.mem_get_info(device)
    return int(free - (1.0 - cache.gpu_memory_utilization) * total)


def total_memory() -> int:
    """Return the smallest of three sizes in bytes: the host's memory, the memory limits of this
    process's control groups, and the virtual memory (ulimit -v) that this host's ranks may use
    together."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [group.limit for group in _groups()]
    if (space := address_space()) is not None:
        limits.append(space.limit * local_world_size())
    return min([whole, *(limit for limit in limits if limit is not None)])


def available_memory() -> int:
    """Return the available host memory in bytes. This is the estimate in /proc/meminfo, or half of
    the host's memory if /proc/meminfo has no estimate. If control groups of this process have
    memory limits, or its virtual memory is limited (ulimit -v), the result is at most what each
    limit leaves. Each of this host's ranks has its own limit on virtual memory."""
    space = address_space()
    found = _unlimited_memory()
    return found if space is None else min(found, space.left * local_world_size())


def ulimit_hint() -> str:
    """Return the end of a hint if the limit on virtual memory (ulimit -v) is the tightest limit;
    otherwise return ""."""
    space = address_space()
    is_bound = space is not None and space.left * local_world_size() < _unlimited_memory()
    return ", or raise the limit on memory (ulimit -v)" if is_bound else ""


def _unlimited_memory() -> int:
    """Return what `available_memory` would return without a limit on virtual memory."""
    found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) * 1024
    for group in _groups():
        if group.limit is not None and group.used is not None:
            found = min(found, group.limit - group.used + group.inactive)
    return max(0, found)


class _Group(NamedTuple):
    """The memory of a control group in bytes.

    limit, used: None if unknown.
    inactive: the part of `used` that holds files and can be freed.
    """

    limit: int | None
    used: int | None
    inactive: int


def _groups() -> Iterator[_Group]:
    """Yield this process's control groups of versions 1 and 2, and all groups above them."""
    for path in folders():
        yield _group(path, "max", "current", "inactive_file")
    for path in folders("memory"):
        yield _group(path, "limit_in_bytes", "usage_in_bytes", "total_inactive_file")


def _group(path: str, limit: str, used: str, inactive: str) -> _Group:
    most, now = (number(path, f"memory.{name}") for name in (limit, used))
    return _Group(most, now, number(path, "memory.stat", inactive) or 0)


def mib(count: int) -> str:
    """Format bytes as MiB, for messages."""
    return f"{count / 2**20:,.1f}"
