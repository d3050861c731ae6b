"""Checks the operands, and allocates the results, of the matmul kernels for few rows."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.gpu import power_of_2_from
from specdec_kernels.launch_triton import dependence
from specdec_kernels.linear.reference import ACTIVATIONS
from specdec_kernels.linear.stored import Stored


class Fused(NamedTuple):
    """Steps fused into a matmul of x [T, K] and a weight [N, K], or [2N, K] with an activation."""

    squares: Tensor | None = None
    """[T, P] fp32, P partial sums of squares of each row of x. With them, the result is divided by
    each row's root mean square, which completes the norm of x."""
    eps: float = 0.0
    """Added to the mean of squares."""
    bias: Tensor | None = None
    """[N], added to the result."""
    activation: str = ""
    """One of ACTIVATIONS, for a gate; "" for a plain matmul."""
    residual: Tensor | None = None
    """[T, N], rows contiguous, added to the result."""
    norm_weight: Tensor | None = None
    """[N], the weight of the norm that follows."""
    into: Tensor | None = None
    """[T, N], contiguous, the output buffer."""


class Launch(NamedTuple):
    """Launch arguments that all these kernels share, and their results."""

    operands: tuple[Tensor | None, ...]
    """x, squares, weight, bias, residual, norm_weight, and the results; None for absent ones."""
    numbers: tuple[int, float]
    """The stride of the residual's rows, and eps."""
    constants: dict[str, Any]
    """The kernel's constants, and Triton's options."""
    results: tuple[Tensor, Tensor, Tensor]
    """The output [T, N]; the output times `norm_weight`, [T, N]; and partial sums of its squares,
    fp32 [T, ceil(N / block_n)]. Without `norm_weight` all three are the output."""


def prepared(x: Tensor, weight: Tensor | Stored, block_n: int, fused: Fused) -> Launch:
    """Check the operands of a matmul and allocate its results.

    Args:
        x: [T, K], rows contiguous.
        weight: [N, K], contiguous; [2N, K] with an activation, the gate's rows first. For a
            quantised weight, the operand is its codes, as bytes.
        block_n: The number of features that a program computes.
    """
    squares, eps, bias, activation, residual, norm_weight, out = fused
    num_rows, width = x.shape
    num_features = weight.shape[0] // (2 if activation else 1)
    held = weight if isinstance(weight, Tensor) else weight.codes.view(torch.uint8)
    assert weight.shape[1] == width and held.is_contiguous() and x.stride(1) == 1
    assert activation in ("", *ACTIVATIONS)
    assert squares is None or (squares.shape[0] == num_rows and squares.is_contiguous())
    assert bias is None or bias.shape == (num_features,)
    assert norm_weight is None or norm_weight.shape == (num_features,)
    if out is None:
        out = torch.empty((num_rows, num_features), dtype=x.dtype, device=x.device)
    assert out.shape == (num_rows, num_features) and out.is_contiguous()
    assert residual is None or (residual.shape == out.shape and residual.stride(1) == 1)
    scaled = out_squares = None
    if norm_weight is not None:
        blocks = -(-num_features // block_n)
        scaled = torch.empty_like(out)
        out_squares = torch.empty((num_rows, blocks), dtype=torch.float32, device=x.device)
    parts = 0 if squares is None else squares.shape[1]
    constants = {"K": width, "PARTS": parts, "BLOCK_P": power_of_2_from(max(parts, 1))}
    return Launch(
        (x, squares, held, bias, residual, norm_weight, out, scaled, out_squares),
        (0 if residual is None else residual.stride(0), float(eps)),
        constants | {"ACTIVATION": activation} | dependence(x),
        (out, out if scaled is None else scaled, out if out_squares is None else out_squares),
    )
