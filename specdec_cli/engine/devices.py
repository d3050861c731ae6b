"""Checks the number of processes of a run, and chooses the device and the number of CPU threads,
before anything is loaded."""

import torch

from specdec_cli.core.parallel import local_rank, world_size
from specdec_cli.errors import Notice, SetupError, UsageError
from specdec_cli.launch import spinning
from specdec_cli.launch.rank import num_cores
from specdec_cli.recipe import Recipe

# Models smaller than this run on one CPU thread. Their matmuls take microseconds, so more threads
# gain little. More threads can even cost a lot: if another process occupies a core, all threads
# wait for the thread on that core (measured: 80 times slower).
_ONE_THREAD_BYTES = 256 * 2**20


def check_world(recipe: Recipe) -> None:
    """Raise `UsageError` unless there is one process for each rank of the target, and a separate
    device for each process."""
    wanted, found = recipe.target.tensor_parallel_size, world_size()
    if wanted != found:
        raise UsageError(
            f"target.tensor_parallel_size is {wanted}, but {found} "
            f"{'process is' if found == 1 else 'processes are'} running",
            "start specdec without torchrun, and it starts all ranks itself; or run torchrun "
            f"--nproc-per-node {wanted}",
        )
    if wanted > 1 and ":" in recipe.run.device:
        raise UsageError(
            f"run.device: {recipe.run.device} is a single device, but each of the {wanted} ranks "
            "needs its own",
            "use run.device: cuda",
        )


def resolve_device(wanted: str) -> torch.device:
    """Return the device of this process. `auto` means a GPU if the host has one. Each process on a
    host gets the GPU with its local rank, unless `wanted` names an index. Raises `SetupError` if
    the device is missing."""
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise SetupError(f"no CUDA device for run.device: {wanted}", "use --device cpu or auto")
        index = local_rank() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise SetupError(
                f"no device cuda:{index}: this machine has {torch.cuda.device_count()} GPUs",
                "GPUs are numbered from 0, and CUDA_VISIBLE_DEVICES may hide some",
            )
        return torch.device("cuda", index)
    return device


def use_few_threads(device: torch.device, weight_bytes: int) -> Notice | None:
    """Set the number of threads that torch uses on a CPU, unless the user has chosen it.

    A small model gets one thread. A larger model gets a thread for each processor that `num_cores`
    counts, or fewer if other programs keep some processors busy. In the latter case return a notice
    that says so; otherwise return None.
    """
    if device.type != "cpu" or spinning.chosen_threads() is not None:
        return None
    if weight_bytes < _ONE_THREAD_BYTES:
        torch.set_num_threads(1)
        return None
    if world_size() > 1:
        return None  # each rank already has its share of processors
    cores, use = num_cores(), spinning.others() or 0.0
    few = spinning.threads_beside(use, cores)
    if few < cores or cores < torch.get_num_threads():  # torch does not know CPU quotas
        torch.set_num_threads(few)
    if few == cores:
        return None
    threads = "one thread runs" if few == 1 else f"{few} threads run"
    told = (
        f"other work used {use:.1f} of {cores} processors when this command began, so {threads}: "
        f"end that work and start again to measure, or pass --threads {cores} to use all"
    )
    return Notice("few_threads", told, {"threads": few, "processors": cores, "others": use})
