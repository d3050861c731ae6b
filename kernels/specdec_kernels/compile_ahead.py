"""Compiling kernels side by side, before they run: code is first run without launches, which only
finds out which kernels it needs."""

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
    """Whether code runs without launches now, to find out which kernels it needs."""
    return _is_ahead


def compile_ahead(run: Callable[[], object], device: torch.device) -> None:
    """Compile the kernels that `run` launches; does nothing where there is nothing to compile.

    On CUDA `run` is called without launches. What they would write is zero if it is allocated
    inside, else unchanged. So `run` must not read on the host what kernels write.
    """
    if device.type != "cuda":
        return
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.jit import JITFunction
    except ImportError:  # a release of Triton that cannot
        return
    with ExitStack() as stack:
        compilers = stack.enter_context(_Compilers(device))
        # The launch that needs a kernel tells why it does not compile.
        stack.enter_context(AsyncCompileMode(compilers, ignore_errors=True))
        stack.callback(compilers.begin.set)
        stack.enter_context(_launchers_of_own_names())
        stack.enter_context(_launches_that_compile(JITFunction))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        with _ZerosForEmpty():
            run()
    torch.cuda.empty_cache()  # for the run's own streams and graphs


class _Compilers(ThreadPoolExecutor):
    """Threads for what `AsyncCompileMode` submits.

    They wait for `begin`: code that is run meanwhile would take several times as long, because most
    of it and some of each compilation is Python. They also load what they have compiled. Its
    launcher may be C code, which Triton compiles then.
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
            with suppress(Exception):  # the launch tells
                kernel.run  # noqa: B018, a property
            return kernel

        return super().submit(compiled)


@contextmanager
def _launches_that_compile(kernel: Any) -> Iterator[None]:
    """Every launch of Triton's class `kernel` only asks for its compilation."""
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
    """Each launcher of C code is loaded under a name of its own, since Python finds all of Triton's
    by one: a thread would give its functions to the module that another has just loaded."""
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
    """Uninitialised tensors are zeros. Garbage would be indices out of bounds."""

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
