"""The device of the kernels: CUDA if there is one, else the CPU with Triton's interpreter."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `-m gpu` run every kernel test on a CUDA machine, since all use the device there."""
    for item in items:
        here = Path(__file__).parent in item.path.parents
        if here and torch.cuda.is_available() and "device" in getattr(item, "fixturenames", ()):
            item.add_marker("gpu")


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def poison(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return tensor.fill_(float("nan"))
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(torch.iinfo(tensor.dtype).max // 2)


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialised memory with NaN or absurd integers, so an unwritten output cannot pass."""

    def poisoned(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda *args, **kwargs: poison(make(*args, **kwargs))

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(Tensor, "new_empty", poisoned(Tensor.new_empty))


@pytest.fixture(scope="session", autouse=True)
def language_patched_once_a_launch() -> Iterator[None]:
    """Patch triton.language once a launch. The interpreter does it at the launch and again at each
    call of a device function, which takes a third of the time of these tests."""
    if not hasattr(interpreter, "_LangPatchScope"):  # another release of triton
        yield
        return
    patch_lang = interpreter._patch_lang
    patched: set[tuple[bool, bool]] = set()

    def patch_once(fn: Callable[..., Any]) -> Any:
        names = fn.__globals__.values()
        which = (any(v is tl for v in names), any(v is tl.core for v in names))
        if which in patched:
            return None  # only a launch, which comes first, reads it
        patched.add(which)
        scope = patch_lang(fn)
        restore = scope.restore

        def restore_all() -> None:
            patched.clear()
            restore()

        scope.restore = restore_all
        return scope

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang", patch_once)
        yield
