"""The product without a workspace: its call on a CPU by a stand-in, itself on the GPU."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ops_helpers import TOLERANCE, assert_close, needs_cuda
from specdec_kernels.linear import cublas
from torch import Tensor

# T, K, N
SIZES = [(1, 8, 1), (3, 24, 7), (65, 40, 34), (130, 129, 17)]


def operands(
    size: tuple[int, int, int], dtype: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x with rows that lie apart, a weight, and memory for the result between poisoned rows."""
    rows, width, features = size
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width + 3, generator=generator)[:, 1 : width + 1]
    weight = torch.randn(features, width, generator=generator) * width**-0.5
    wide = x.new_full((rows, width + 3), float("nan"))
    wide[:, 1 : width + 1] = x
    out = torch.full((rows + 2, features), float("nan"))
    moved = [t.to(device, dtype) for t in (wide, weight, out)]
    return moved[0][:, 1 : width + 1], moved[1], moved[2]


def by_columns(address: int, num_rows: int, num_columns: int, stride: int) -> Any:
    """The fp16 matrix at an address, with each column's numbers side by side."""
    count = stride * (num_columns - 1) + num_rows
    numbers = np.frombuffer((ctypes.c_uint16 * count).from_address(address), np.float16)
    return np.lib.stride_tricks.as_strided(numbers, (num_rows, num_columns), (2, 2 * stride))


def gemm_ex(handle: int, *args: Any) -> int:
    """A stand-in for cuBLAS' function, as its manual describes it, for fp16."""
    (turn_a, turn_b, m, n, k), (alpha, *of_a), rest = args[:5], args[5:9], args[9:]
    of_b, beta, of_c, (compute, algorithm) = rest[:3], rest[3], rest[4:7], rest[7:]
    assert (handle, turn_a, turn_b, compute, algorithm) == (7, 1, 0, 68, -1)
    assert [of_a[1], of_b[1], of_c[1]] == [2, 2, 2], "all are fp16"
    assert (alpha._obj.value, beta._obj.value) == (1.0, 0.0)
    a, b = by_columns(of_a[0], k, m, of_a[2]), by_columns(of_b[0], k, n, of_b[2])
    product = a.T.astype(np.float32) @ b.astype(np.float32)
    by_columns(of_c[0], m, n, of_c[2])[:] = product.astype(np.float16)
    return 0


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_call_says_which_matrices(size: tuple[int, int, int]) -> None:
    x, weight, out = operands(size, torch.float16, "cpu")
    library: Any = SimpleNamespace(cublasGemmEx=gemm_ex)
    assert cublas.multiply(library, 7, x, weight, out[1:-1]) == 0
    assert_close("out", F.linear(x.double(), weight.double()), out[1:-1], 2e-3)
    assert out[[0, -1]].isnan().all()


def test_on_a_cpu_torch_multiplies() -> None:
    x, weight, _ = operands((3, 24, 7), torch.float32, "cpu")
    assert torch.equal(cublas.linear_without_workspace(x, weight), F.linear(x, weight))


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [*SIZES, (384, 512, 1024), (1000, 1536, 4096)], ids=str)
def test_products_on_the_gpu(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, weight, _ = operands(size, dtype, "cuda")
    out = cublas.linear_without_workspace(x, weight)
    assert out.dtype == dtype and out.is_contiguous()
    assert_close("out", F.linear(x.double(), weight.double()), out, TOLERANCE[dtype])
    ones = torch.ones(1000, device="cuda")
    assert float(ones.dot(ones)) == 1000, "the dot product needs a workspace, and has it"


@needs_cuda
def test_nothing_is_filled_before_a_wide_product() -> None:
    x, weight, _ = operands((1024, 4096, 28672), torch.bfloat16, "cuda")
    x = x.contiguous()
    assert cublas._library() is not None
    cublas.linear_without_workspace(x, weight)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        cublas.linear_without_workspace(x, weight)
        torch.cuda.synchronize()
    names = [event.name for event in found.events() if "cuda" in str(event.device_type).lower()]
    assert names and not any("Memset" in name for name in names), names


@needs_cuda
def test_what_cublas_refuses_torch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, _ = operands((70, 64, 33), torch.float16, "cuda")
    refuses = SimpleNamespace(cublasSetWorkspace_v2=lambda *_: 0, cublasGemmEx=lambda *_: 15)
    monkeypatch.setattr(cublas, "_library", lambda: refuses)
    assert torch.equal(cublas.linear_without_workspace(x, weight), F.linear(x, weight))
