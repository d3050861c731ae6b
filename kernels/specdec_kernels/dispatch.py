"""Public functions with two implementations: torch for any device, Triton for CUDA tensors."""

from collections.abc import Callable
from functools import cached_property, update_wrapper
from importlib import import_module
from typing import Generic, ParamSpec, TypeVar, cast

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")
HAS_CUDA = torch.backends.cuda.is_built()


class Kernel(Generic[P, R]):
    """A public function with two implementations.

    reference: the torch implementation, for any device.
    path: the location of the Triton implementation, as "module:function".
    """

    def __init__(self, reference: Callable[P, R], path: str) -> None:
        self.reference = reference
        self.path = path
        update_wrapper(self, reference)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # This must be fast, because small models call it thousands of times a second. So search
        # all arguments for a tensor only if the first one is not a tensor.
        if not HAS_CUDA:
            return self.reference(*args, **kwargs)
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            inside = first if isinstance(first, tuple) else ()
            values = (*inside, *args, *kwargs.values())
            held = (value for value in values if isinstance(value, Tensor))
            first = next(held, None)
        if first is not None and first.is_cuda:
            return self.on_cuda(*args, **kwargs)
        return self.reference(*args, **kwargs)

    @cached_property
    def on_cuda(self) -> Callable[P, R]:
        """The Triton implementation. Triton is imported only when this is first read."""
        module, _, name = self.path.partition(":")
        return cast(Callable[P, R], getattr(import_module(module), name))


def kernel(path: str) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Decorate a torch function that has a Triton implementation at `path`, "module:function".

    A call uses Triton if its first tensor argument is on CUDA. If the first argument is a tuple,
    the tensors in it are considered before the other arguments.
    """
    return lambda reference: Kernel(reference, path)
