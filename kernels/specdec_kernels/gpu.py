"""Limits of a GPU that determine launch configurations (an H100's if there is no GPU), and powers
of two."""

from functools import cache
from typing import NamedTuple

import torch

# An H100 or H200, for which the launch configurations are tuned.
CAPABILITY = (9, 0)
MULTIPROCESSORS = 132
SHARED_MEMORY = 227 * 1024
CACHE_LINE = 128  # bytes


class Gpu(NamedTuple):
    """Limits of a device. shared_memory: bytes that one program can have; an A100 has 163 KiB, most
    workstation GPUs and the L40S 99, an H100 and a B200 227."""

    capability: tuple[int, int] = CAPABILITY
    multiprocessors: int = MULTIPROCESSORS
    shared_memory: int = SHARED_MEMORY


H100 = Gpu()


@cache
def gpu_of(device: torch.device) -> Gpu:
    """The limits of a device."""
    if device.type != "cuda":
        return H100
    found = torch.cuda.get_device_properties(device)
    room = getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block)
    capability = torch.cuda.get_device_capability(device)
    return Gpu(capability, int(found.multi_processor_count), int(room))


def power_of_2_from(number: int) -> int:
    """The smallest power of 2 that is at least `number`."""
    return 1 << (number - 1).bit_length()


def power_of_2_to(number: int) -> int:
    """The largest power of 2 that is at most `number`; 1 for numbers below 1."""
    return 1 << max(number, 1).bit_length() - 1
