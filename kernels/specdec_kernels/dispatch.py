"""One name for two implementations: torch for any device, Triton for CUDA tensors."""

from collections.abc import Callable, Iterable
from functools import cached_property, update_wrapper
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar, cast

from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Kernel(Generic[P, R]):
    """A public function. `reference` is its torch implementation, on whatever device."""

    def __init__(self, reference: Callable[P, R], path: str) -> None:
        self.reference = reference
        self.path = path
        update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if _is_cuda(args) or _is_cuda(kwargs.values()):
            return self.on_cuda(*args, **kwargs)
        return self.reference(*args, **kwargs)

    @cached_property
    def on_cuda(self) -> Callable[P, R]:
        """The Triton implementation; Triton is imported when it is first asked for."""
        module, _, name = self.path.partition(":")
        return cast(Callable[P, R], getattr(import_module(module), name))


def kernel(path: str) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Make a torch function public, with a Triton implementation for CUDA tensors.

    path: "module:function" of the Triton implementation, which takes the same arguments. The first
    tensor among the arguments decides which of the two runs.
    """
    return lambda reference: Kernel(reference, path)


def _is_cuda(values: Iterable[object]) -> bool:
    for value in values:
        if isinstance(value, Tensor):
            return value.is_cuda
    return False
