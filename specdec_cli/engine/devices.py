"""The processes and the device of a run, before anything is placed on them."""

import os

import torch

from specdec_cli.core.parallel import local_rank, world_size
from specdec_cli.errors import SetupError, UsageError
from specdec_cli.recipe import Recipe

# Models smaller than this run on one CPU thread. Their products take microseconds, so threads gain
# little. If another process holds a core, they wait for each other (measured: 80 times slower).
_ONE_THREAD_BYTES = 256 * 2**20


def check_world(recipe: Recipe) -> None:
    """Raise `UsageError` unless there is one process for each of the target's ranks, and each can
    have a device to itself."""
    wanted, found = recipe.target.tensor_parallel_size, world_size()
    if wanted != found:
        raise UsageError(
            f"target.tensor_parallel_size is {wanted}, and {found} "
            f"{'process runs' if found == 1 else 'processes run'}",
            "start specdec by itself, which starts its ranks, or under torchrun "
            f"--nproc-per-node {wanted}",
        )
    if wanted > 1 and ":" in recipe.run.device:
        raise UsageError(
            f"run.device: {recipe.run.device} is one device, and {wanted} ranks need their own",
            "use run.device: cuda",
        )


def resolve_device(wanted: str) -> torch.device:
    """The device of this process. `auto` is a GPU if there is one, else the CPU.

    Each process of a host takes another GPU. Raises `SetupError` for a device that is missing.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SetupError(f"no CUDA device for run.device: {wanted}", "use --device cpu or auto")
        index = local_rank() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise SetupError(
                f"no device cuda:{index}: this machine has {torch.cuda.device_count()} GPUs"
            )
        return torch.device("cuda", index)
    return device


def use_few_threads(device: torch.device, weight_bytes: int) -> None:
    """Run torch on one thread for small models on a CPU, unless the user has chosen a number."""
    is_small = device.type == "cpu" and weight_bytes < _ONE_THREAD_BYTES
    if is_small and not {"OMP_NUM_THREADS", "MKL_NUM_THREADS"} & os.environ.keys():
        torch.set_num_threads(1)
