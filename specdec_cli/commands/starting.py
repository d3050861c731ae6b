"""Starts a command's work: imports heavy packages, and starts ranks or joins them. Loading this
module imports nothing heavy."""

import gc
import importlib.util
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

import typer

import specdec_cli
from specdec_cli.core.address_space import address_space
from specdec_cli.errors import SetupError
from specdec_cli.launch.spinning import choose_spins
from specdec_cli.launch.world import Place, World, join
from specdec_cli.signals import postponed
from specdec_cli.stages import begin_stage

T = TypeVar("T")

# Address space that imports need, rounded up from measurements: numpy took 120 MiB, and all imports
# after torch took 470 MiB.
NUMPY_MIB, _TRANSFORMERS_MIB = 256, 512


@contextmanager
def importing(device: str = "cpu") -> Iterator[None]:
    """Wrap the imports of the engine, which load torch and transformers.

    device: `run.device`, or "cpu" if no GPU is to be used yet.

    During the imports, other threads start the GPU driver and compute Triton's hash. This saves
    time, since both release the GIL. The imports create a million objects that live until the
    process ends. The garbage collector would traverse them again and again, so it is off during the
    imports and ignores these objects afterwards.

    Raises `SetupError` if a memory limit leaves too little for the imports.
    """
    if "transformers" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        check_room("torch", NUMPY_MIB + _torch_mib())
        driver = None if device == "cpu" else _driver()
        if driver is not None:  # not a daemon: a process must not end while its driver starts
            Thread(target=_start_driver, args=(driver, device)).start()
        begin_stage("importing torch")
        # `choose_spins` must run before torch is imported. It measures the load of other processes
        # over at least a quarter of a second, so first import modules that do not need torch.
        import specdec_cli.experiment.folders.settings_file  # noqa: F401

        choose_spins()
        with postponed():
            import torch  # noqa: F401

        if driver is not None:
            _begin_hashing()
        check_room("transformers", _TRANSFORMERS_MIB)
        begin_stage("importing transformers and the engine")
        yield
        gc.freeze()
    finally:
        gc.enable()


def _driver() -> Any:
    """Load CUDA's driver. Returns None if there is none. Also returns None if the process has a
    memory limit (ulimit -v), because a CUDA context would exceed it."""
    import ctypes

    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return None
    with suppress(OSError):
        return ctypes.CDLL("libcuda.so.1")
    return None


def _start_driver(driver: Any, device: str) -> None:
    """Start the driver, the CUDA context that torch will use, and NVML. Without a GPU this does
    nothing; code that needs a GPU reports its absence later."""
    import ctypes

    index, handle, context = int(device.partition(":")[2] or 0), ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), index):
        return
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
    with suppress(Exception):  # without NVML, the monitor skips the GPU
        import pynvml

        pynvml.nvmlInit()  # so that the monitor need not start it


def _begin_hashing() -> None:
    """Hash Triton's 500 MB library in a thread. Triton needs the hash for the names of compiled
    kernels, and caches it."""
    with suppress(ImportError):
        from triton.runtime.cache import triton_key

        Thread(target=triton_key, daemon=True).start()


def check_room(package: str, mebibytes: int) -> None:
    """Raise `SetupError` if a memory limit (ulimit -v) leaves too little to import a package.

    Without enough memory, torch and numpy's OpenBLAS abort the process, and scipy's OpenBLAS, which
    transformers imports, retries the allocation forever.
    """
    space = address_space()
    if space is not None and space.left < mebibytes << 20:
        raise SetupError(
            f"{package} needs {mebibytes} MiB of memory, but the limit of {space.limit >> 20} MiB "
            f"leaves {space.left >> 20}",
            "raise the limit (ulimit -v)",
        )


def _torch_mib() -> int:
    """Return the size of torch's shared libraries in MiB. Importing torch maps all of them."""
    found = importlib.util.find_spec("torch")
    folder = Path(found.origin or "").parent / "lib" if found is not None else Path()
    return sum(file.stat().st_size for file in folder.glob("*.so*")) >> 20


@contextmanager
def joined(
    place: Place,
    recipes: "Sequence[specdec_cli.recipe.Recipe]",
    read: Callable[[], T],
    *,
    computes: bool = True,
) -> Iterator[tuple[World, T]]:
    """Join the ranks that run the recipes. Yield this rank's `World` and the result of `read`.

    If this process must start the ranks first, it checks the recipes, starts the ranks, waits for
    them and exits with their exit code, so the block runs only in the ranks.

    recipes: recipes that need the same number of ranks.
    computes: whether models run on this machine's ranks. If servers run them, one process is
    enough.
    """
    from specdec_cli.models.ahead import check_ahead

    run = recipes[0].run
    num_ranks = recipes[0].target.tensor_parallel_size if computes else 1
    if place.must_start(num_ranks):
        inputs = read()
        for recipe in recipes:
            check_ahead(recipe)
        raise typer.Exit(place.start(num_ranks, timeout_s=run.timeout_s, inputs=inputs))
    with join(place, num_ranks, device=run.device, timeout_s=run.timeout_s) as world:
        yield world, world.inputs(read)
