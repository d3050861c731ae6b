"""The device of the kernels: CUDA if there is one, else the CPU with Triton's interpreter."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from interpreter import make_faster
from torch import Tensor


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `-m gpu` run every kernel test on a CUDA machine, since all use the device there.

    The interpreter computes in fp32, and half precision differs in loads and stores alone. So of a
    test's cases in fp16 and in bf16 the first runs there, if it has some in fp32; others are slow.
    """
    seen = set[tuple[str, torch.dtype]]()
    kept = {i.nodeid.split("[")[0] for i in items if _dtype(i) == torch.float32}
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if torch.cuda.is_available():
            if "device" in getattr(item, "fixturenames", ()):
                item.add_marker("gpu")
        elif (dtype := _dtype(item)) in (torch.float16, torch.bfloat16):
            case = item.nodeid.split("[")[0], dtype
            if case in seen and (dtype == torch.float16 or case[0] in kept):
                item.add_marker("slow")
            seen.add(case)


def _dtype(item: pytest.Item) -> torch.dtype | None:
    return item.callspec.params.get("dtype") if hasattr(item, "callspec") else None


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
def faster_interpreter() -> Iterator[None]:
    """Without a device the kernels of these tests run in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            make_faster(patch)
        yield
