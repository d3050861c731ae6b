"""GPU limits that determine launch configurations, and powers of two, which tile sizes are.

Where there is no GPU, the limits are an H100's.
"""

from functools import cache

import torch

# An H100 or H200, for which the launch configurations are tuned.
CAPABILITY = (9, 0)
MULTIPROCESSORS = 132
SHARED_MEMORY = 227 * 1024  # bytes that one program can have
CACHE_LINE = 128  # bytes


@cache
def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability, by which tables of launch configurations are found."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else CAPABILITY


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program can have.

    An A100 has 163 KiB, most workstation GPUs and the L40S 99, an H100 and a B200 227.
    """
    if device.type != "cuda":
        return SHARED_MEMORY
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block))


@cache
def multiprocessors(device: torch.device) -> int:
    """Number of multiprocessors."""
    if device.type != "cuda":
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def power_of_2_from(number: int) -> int:
    """The smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()


def power_of_2_to(number: int) -> int:
    """The largest power of 2 that is at most `number`; 1 for numbers below 1."""
    return 1 << max(number, 1).bit_length() - 1
