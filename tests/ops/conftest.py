"""The device of the kernels: CUDA if there is one, else the CPU with Triton's interpreter."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let `-m gpu` run every kernel test on a CUDA machine, since all use the device there.

    The interpreter computes in fp32, and half precision differs in loads and stores alone. So of a
    test's cases in fp16 the first runs there; the others are slow.
    """
    seen = set[str]()
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        if torch.cuda.is_available():
            if "device" in getattr(item, "fixturenames", ()):
                item.add_marker("gpu")
        elif hasattr(item, "callspec") and item.callspec.params.get("dtype") == torch.float16:
            test = item.nodeid.split("[")[0]
            if test in seen:
                item.add_marker("slow")
            seen.add(test)


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
            # This imports Triton, after `tests/fixtures.py` has chosen how its kernels run.
            from interpreter import make_faster

            make_faster(patch)
        yield
