"""Compiles kernels in parallel before they run. The code first runs without launches, only to find
out which kernels it needs."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from threading import Event
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_is_ahead = False


def is_ahead() -> bool:
    """True during a run without launches, which finds out which kernels code needs."""
    return _is_ahead


def compile_ahead(run: Callable[[], object], device: torch.device) -> None:
    """Compile the kernels that `run` launches, if any need it.

    On CUDA `run` is called without launches. Tensors that kernels would write are zero if `run`
    allocates them, and otherwise unchanged. So `run` must not read results of kernels on the host.
    """
    if device.type != "cuda":
        return
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.jit import JITFunction
    except ImportError:  # this release of Triton cannot compile ahead
        return
    with ExitStack() as stack:
        compilers = stack.enter_context(_Compilers(device))
        # If a kernel does not compile, its launch reports the reason later.
        stack.enter_context(AsyncCompileMode(compilers, ignore_errors=True))
        stack.callback(compilers.begin.set)
        stack.enter_context(_launchers_of_own_names())
        stack.enter_context(_launches_that_compile(JITFunction))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        with _ZerosForEmpty():
            run()
    torch.cuda.empty_cache()  # needed for the run's own streams and graphs


class _Compilers(ThreadPoolExecutor):
    """Threads that compile and load the kernels that `AsyncCompileMode` submits. They wait for
    `begin`, the end of the run without launches: compilation is partly Python and would slow that
    run several-fold. Loading a kernel may also compile its launcher in C.
    """

    def __init__(self, device: torch.device) -> None:
        count = len(os.sched_getaffinity(0))
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(count, initializer=torch.cuda.set_device, initargs=(index,))
        self.begin = Event()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compiled() -> Any:
            self.begin.wait()
            kernel = fn(*args, **kwargs)
            with suppress(Exception):  # the launch reports it
                kernel.run  # noqa: B018, a property
            return kernel

        return super().submit(compiled)


@contextmanager
def _launches_that_compile(kernel: Any) -> Iterator[None]:
    """During the block, launches of Triton's class `kernel` only request compilation."""
    launch = kernel.run

    def ask(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, warmup=True, **kwargs)

    global _is_ahead
    kernel.run, _is_ahead = ask, True
    try:
        yield
    finally:
        kernel.run, _is_ahead = launch, False


@contextmanager
def _launchers_of_own_names() -> Iterator[None]:
    """During the block, each launcher in C gets its own name. Triton loads all launchers under one
    name, so two threads that load at once would mix up the functions of their modules."""
    driver: Any = sys.modules.get("triton.backends.nvidia.driver")
    load = getattr(driver, "compile_module_from_src", None)
    if load is None:
        yield
        return

    def load_apart(src: str, name: str, *args: Any, **kwargs: Any) -> Any:
        package = f"of_{hashlib.sha256(src.encode()).hexdigest()}"
        return load(src, f"{package}.{name}", *args, **kwargs)

    driver.compile_module_from_src = load_apart
    try:
        yield
    finally:
        driver.compile_module_from_src = load


class _ZerosForEmpty(TorchFunctionMode):
    """During the block, uninitialised tensors are zeros. Garbage could be indices out of bounds."""

    _MAKERS = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in self._MAKERS else made
