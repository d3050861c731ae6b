"""What of the GPU at hand bounds how kernels are cut."""

import torch

from specdec_kernels.hopper import MULTIPROCESSORS, SHARED_MEMORY


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have; an H100's where there is no GPU.

    An A100 has 163 KiB, most GPUs of workstations and the L40S 99, an H100 and a B200 227.
    """
    if device.type != "cuda":
        return SHARED_MEMORY
    found = torch.cuda.get_device_properties(device)
    return int(getattr(found, "shared_memory_per_block_optin", found.shared_memory_per_block))


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the GPU; an H100's where there is none."""
    if device.type != "cuda":
        return MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
