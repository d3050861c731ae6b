"""Compiles kernels in parallel before they run. A dry run, which executes no kernel, finds out
which ones are needed."""

import hashlib
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
    """Return True during the dry run of `compile_ahead`, in which launches only compile."""
    return _is_ahead


def compile_ahead(run: Callable[[], object], device: torch.device, num_threads: int) -> None:
    """Compile all kernels that `run` launches and that are not compiled yet, in `num_threads`
    threads. On devices other than CUDA, do nothing.

    `run` is called once, but its launches only request compilation. No kernel executes: tensors
    that `run` allocates contain zeros, and all others keep their values. So code in `run` must not
    depend on the results of kernels.
    """
    if device.type != "cuda":
        return
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.jit import JITFunction
    except ImportError:  # this release of Triton cannot compile ahead
        return
    with ExitStack() as stack:
        compilers = stack.enter_context(_Compilers(device, num_threads))
        # Ignore compilation errors here: the real launch of the kernel raises them again.
        stack.enter_context(AsyncCompileMode(compilers, ignore_errors=True))
        stack.callback(compilers.begin.set)
        stack.enter_context(_launchers_of_own_names())
        stack.enter_context(_launches_that_compile(JITFunction))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        with _ZerosForEmpty():
            run()
    # Release memory that the dry run left cached: other streams and CUDA graphs cannot reuse it.
    torch.cuda.empty_cache()


class _Compilers(ThreadPoolExecutor):
    """Threads that compile and load the kernels that `AsyncCompileMode` submits.

    They wait for `begin`, which is set when the dry run ends. Compilation runs partly in Python,
    and would slow down the dry run several-fold if it ran at the same time. Kernels are also loaded
    here, because this may compile their launchers, which are C modules.
    """

    def __init__(self, device: torch.device, count: int) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(count, initializer=torch.cuda.set_device, initargs=(index,))
        self.begin = Event()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def compiled() -> Any:
            self.begin.wait()
            kernel = fn(*args, **kwargs)
            with suppress(Exception):  # the real launch raises the error again
                kernel.run  # noqa: B018, a property that loads the kernel
            return kernel

        return super().submit(compiled)


@contextmanager
def _launches_that_compile(kernel: Any) -> Iterator[None]:
    """Make kernel launches only request compilation during the block; no kernel executes.

    kernel: Triton's class of kernels, `JITFunction`.
    """
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
    """Give each kernel's launcher, a compiled C module, its own module name during the block.
    Triton loads all launchers under one name, so two threads that load launchers at the same time
    could get each other's functions."""
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
    """A torch mode that fills new uninitialised tensors with zeros. In a dry run no kernel writes
    them, and if their arbitrary contents were used as indices, these could be out of bounds."""

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
