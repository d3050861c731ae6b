"""Calls cuBLAS without the workspace that torch always gives it.

If cuBLAS has a workspace, its kernel for wide matmuls keeps a tile counter there, and every call
resets the counter with a separate memset. With one memset per layer, launching a CUDA graph takes
the host about 0.1 ms longer. Without a workspace, cuBLAS launches no memset.
"""

import ctypes
from ctypes import byref, c_float, c_int, c_size_t, c_void_p
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# Constants from cublas_api.h and library_types.h.
_PLAIN, _TRANSPOSED = 0, 1
_TYPES = {torch.bfloat16: 14, torch.float16: 2}
_FLOAT_SUMS = 68  # accumulate in fp32, for both dtypes
_ANY_KERNEL = -1


def linear_without_workspace(x: Tensor, weight: Tensor) -> Tensor:
    """Return x @ weight^T [T, N] for x [T, K] and weight [N, K], both with contiguous rows.

    Calls cuBLAS directly for 16-bit tensors on a CUDA device. For other tensors, or if cuBLAS
    reports an error, falls back to `F.linear`.
    """
    assert x.stride(1) == weight.stride(1) == 1 and x.dtype == weight.dtype
    library = _library() if x.is_cuda and x.dtype in _TYPES else None
    if library is None:
        return F.linear(x, weight)
    out = x.new_empty(x.shape[0], weight.shape[0])
    # torch binds the handle to the current stream when it returns it. The workspace need not be
    # restored afterwards: torch sets its own again before its next matmul.
    handle = torch.cuda.current_blas_handle()
    failed = library.cublasSetWorkspace_v2(handle, None, 0) or multiply(
        library, handle, x, weight, out
    )
    return F.linear(x, weight) if failed else out


def multiply(library: ctypes.CDLL, handle: int, x: Tensor, weight: Tensor, out: Tensor) -> int:
    """Write x @ weight^T to `out` [T, N], contiguous. Return cuBLAS's status; 0 means success."""
    (num_rows, width), num_features = x.shape, weight.shape[0]
    kind = _TYPES[x.dtype]
    # cuBLAS is column-major and sees row-major `out` as out^T, so compute out^T = weight @ x^T.
    status: int = library.cublasGemmEx(
        *(handle, _TRANSPOSED, _PLAIN, num_features, num_rows, width),
        *(byref(c_float(1.0)), weight.data_ptr(), kind, weight.stride(0)),
        *(x.data_ptr(), kind, x.stride(0)),
        *(byref(c_float(0.0)), out.data_ptr(), kind, out.stride(0)),
        *(_FLOAT_SUMS, _ANY_KERNEL),
    )
    return status


@cache
def _library() -> ctypes.CDLL | None:
    """Return the cuBLAS library that torch has loaded, or None if it has an unusual file name."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}")
    except OSError:
        return None
    matrix: list[Any] = [c_void_p, c_int, c_int]  # address, dtype and stride
    sums = [c_void_p, *matrix, *matrix, c_void_p, *matrix, c_int, c_int]
    library.cublasGemmEx.argtypes = [c_void_p, *5 * [c_int], *sums]
    library.cublasSetWorkspace_v2.argtypes = [c_void_p, c_void_p, c_size_t]
    return library
