"""Separate kernels for RMS norms and gates. They serve matmuls that cannot include these steps:
those that cuBLAS computes, and those whose results must first be summed over ranks."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec_kernels.launch_triton import after_predecessor, dependence
from specdec_kernels.linear.reference import ACTIVATIONS, Normed


@triton.jit
def activate(gate, ACTIVATION: tl.constexpr):
    """Apply SiLU, or the tanh approximation of GELU. The tanh is computed as 2 sigmoid(2x) - 1,
    which cannot overflow."""
    if ACTIVATION == "silu":
        slope = 1.0
    else:
        slope = 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)
    return gate * tl.sigmoid(slope * gate)


@triton.jit
def normed_row(x, norm, eps, K: tl.constexpr):
    """Return the RMS norm of a row of K values. x holds the row, padded with zeros."""
    wide = x.to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide) / K + eps)
    return (wide * norm.to(tl.float32)).to(x.dtype)


@triton.jit
def rms_norm_kernel(
    x_ptr,  # [T, K]
    residual_ptr,  # [T, K], or None
    post_ptr,  # [K], weight of a norm applied to x before the residual is added, or None
    norm_ptr,  # [K], weight of the norm
    hidden_ptr,  # [T, K], output: x + residual; used only with a residual
    out_ptr,  # [T, K], output: the norm
    x_stride,
    residual_stride,
    eps,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    eps = tl.full([], eps, tl.float32)
    norm = tl.load(norm_ptr + k, mask=k < K, other=0.0)
    if post_ptr is not None:
        post = tl.load(post_ptr + k, mask=k < K, other=0.0)
    after_predecessor(DEPENDENT)
    x = tl.load(x_ptr + row * x_stride + k, mask=k < K, other=0.0)
    if post_ptr is not None:
        x = normed_row(x, post, eps, K)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + k, mask=k < K, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(x.dtype)
        tl.store(hidden_ptr + row * K + k, x, mask=k < K)
    tl.store(out_ptr + row * K + k, normed_row(x, norm, eps, K), mask=k < K)


@triton.jit
def gate_kernel(
    gate_up_ptr,  # [T, 2 F], the gate's features first
    out_ptr,  # [T, F], output
    num_features,
    gate_up_stride,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    feature = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    after_predecessor(DEPENDENT)
    at = gate_up_ptr + row * gate_up_stride + feature
    gate = tl.load(at, mask=feature < num_features, other=0.0).to(tl.float32)
    up = tl.load(at + num_features, mask=feature < num_features, other=0.0).to(tl.float32)
    out = (activate(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * num_features + feature, out, mask=feature < num_features)


def add_norm_triton(
    x: Tensor,
    residual: Tensor | None,
    norm_weight: Tensor,
    eps: float,
    post_norm: Tensor | None = None,
) -> Normed:
    """Compute `ops.add_norm` in one kernel. If `residual` is None, only compute the norm of x."""
    num_rows, width = x.shape
    assert x.stride(1) == 1 and norm_weight.shape == (width,)
    assert post_norm is None or post_norm.shape == (width,)
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1)
    out = torch.empty((num_rows, width), dtype=x.dtype, device=x.device)
    hidden = x if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(width)
    rms_norm_kernel[(num_rows,)](
        *(x, residual, post_norm, norm_weight, hidden, out, x.stride(0)),
        0 if residual is None else residual.stride(0),
        float(eps),
        K=width,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
        **dependence(x),
    )
    return Normed(hidden, out, None, eps)


def rms_norm_triton(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `ops.rms_norm` in one kernel."""
    return add_norm_triton(x.reshape(-1, x.shape[-1]), None, weight, eps).scaled.view(x.shape)


def gate_triton(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Compute `ops.gate` in one kernel."""
    num_rows, num_features = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1 and activation in ACTIVATIONS
    out = torch.empty((num_rows, num_features), dtype=gate_up.dtype, device=gate_up.device)
    gate_kernel[(num_rows, triton.cdiv(num_features, 1024))](
        gate_up,
        out,
        num_features,
        gate_up.stride(0),
        ACTIVATION=activation,
        BLOCK=1024,
        **dependence(gate_up),
    )
    return out
