"""Measures the peak bytes of live tensors in a piece of code, on any device, including meta."""

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """A context manager that measures the peak memory of the tensors that are created inside it.

    peak: the largest number of bytes that were alive at the same time. Tensors that existed before
    do not count.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._known: dict[int, Any] = {}  # weak references to storages by their keys

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        # Skip packed MKL-DNN weights: they have no storage, and no result is a view of them.
        old = {t.untyped_storage()._cdata for t in before if not t.is_mkldnn}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), old)
        return result

    def _note(self, storage: torch.UntypedStorage, old: set[int]) -> None:
        key = storage._cdata
        if key in self._known or key in old:  # counted already, or older than the context
            return
        size = storage.nbytes()
        self._now += size
        self.peak = max(self.peak, self._now)

        def gone(_: object) -> None:
            self._now -= size
            self._known.pop(key, None)

        self._known[key] = weakref.ref(storage, gone)
