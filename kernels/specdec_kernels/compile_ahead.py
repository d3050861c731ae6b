"""Compiling kernels side by side, before they run.

Triton compiles a kernel when it is first launched, and the next launch waits for it. So code that
is about to run is first run without launches, which only finds out which kernels it needs.
"""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def compile_ahead(run: Callable[[], object], device: torch.device) -> None:
    """Compile the kernels that `run` launches; does nothing where there is nothing to compile.

    Calls `run` on CUDA, where its launches do nothing. What they would write is zero if it is
    allocated inside, else unchanged. So `run` must not read on the host what kernels write.
    Functions of `torch.compile` run as they are.
    """
    if device.type != "cuda":
        return
    try:
        from triton.runtime._async_compile import AsyncCompileMode
        from triton.runtime.jit import JITFunction
    except ImportError:  # a release of Triton that cannot
        return
    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(len(os.sched_getaffinity(0))))
        # The launch that needs a kernel tells why it does not compile.
        stack.enter_context(AsyncCompileMode(threads, ignore_errors=True))
        stack.enter_context(_launches_that_compile(JITFunction))
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        with _ZerosForEmpty():
            run()
    torch.cuda.empty_cache()  # for the run's own streams and graphs


@contextmanager
def _launches_that_compile(kernel: Any) -> Iterator[None]:
    """Every launch of Triton's class `kernel` only asks for its compilation."""
    launch = kernel.run

    def ask(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, warmup=True, **kwargs)

    kernel.run = ask
    try:
        yield
    finally:
        kernel.run = launch


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
