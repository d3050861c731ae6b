"""Hardware limits of GPUs, on which launch configurations depend, and helpers that round to powers
of two. Without a GPU, the limits of an H100 are used."""

from functools import cache
from typing import NamedTuple

import torch

# The limits of an H100 or H200, for which the launch configurations are tuned.
CAPABILITY = (9, 0)
MULTIPROCESSORS = 132
SHARED_MEMORY = 227 * 1024
CACHE_LINE = 128  # bytes


class Gpu(NamedTuple):
    """Limits of a device.

    shared_memory: bytes that one program can use. This is 163 KiB on an A100, 99 KiB on an L40S and
    most workstation GPUs, and 227 KiB on an H100 or B200.
    """

    capability: tuple[int, int] = CAPABILITY
    multiprocessors: int = MULTIPROCESSORS
    shared_memory: int = SHARED_MEMORY


H100 = Gpu()


@cache
def gpu_of(device: torch.device) -> Gpu:
    """Return the limits of a device, or those of an H100 if it is not a CUDA device."""
    if device.type != "cuda":
        return H100
    found = torch.cuda.get_device_properties(device)
    room = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    capability = torch.cuda.get_device_capability(device)
    return Gpu(capability, int(found.multi_processor_count), int(room))


def power_of_2_from(number: int) -> int:
    """Return the smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()


def power_of_2_to(number: int) -> int:
    """Return the largest power of 2 that is at most `number`, or 1 for numbers below 1."""
    return 1 << max(number, 1).bit_length() - 1
