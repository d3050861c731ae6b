"""Checks the operands of the matmul kernels for few rows, and allocates their results."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec_kernels.comm.peers import SUM_COLUMNS, Inbox
from specdec_kernels.gpu import power_of_2_from
from specdec_kernels.launch_triton import dependence
from specdec_kernels.linear.reference import ACTIVATIONS
from specdec_kernels.linear.stored import Stored


class Fused(NamedTuple):
    """Operands of the steps (norm, bias, activation, residual) that a kernel fuses with a matmul.

    The matmul multiplies x [T, K] by a weight [N, K], or [2N, K] with an activation.
    """

    squares: Tensor | None = None
    """[T, P] fp32, P partial sums of squares for each row of x. The kernel computes each row's root
    mean square from them, and divides the matmul's result by it, which completes the norm of x.
    None if no norm is left to complete."""
    eps: float = 0.0
    """Added to the mean of squares, before its root is taken."""
    bias: Tensor | None = None
    """[N], added to the result."""
    activation: str = ""
    """The activation of a gated MLP, one of ACTIVATIONS; "" for a matmul without a gate."""
    residual: Tensor | None = None
    """[T, N] with contiguous rows, added to the result."""
    norm_weight: Tensor | None = None
    """[N], the weight of the norm that follows; None if no norm follows."""
    into: Tensor | None = None
    """[T, N], contiguous, the output buffer; None to allocate one."""
    inbox: Inbox | None = None
    """The words to which the result is sent. The output buffer then stays unwritten. None to store
    the result."""


class Launch(NamedTuple):
    """The launch arguments that all matmul kernels for few rows share, and the tensors for their
    results."""

    operands: tuple[Tensor | None, ...]
    """x, squares, weight, bias, residual, norm_weight, and the results. Absent tensors are None."""
    inbox: tuple[Tensor | None, Tensor | None, int]
    """The fields of `Fused.inbox`; None, None and 0 without one."""
    numbers: tuple[int, float]
    """The row stride of the residual, and eps."""
    constants: dict[str, Any]
    """The kernel's compile-time constants, and options for Triton."""
    results: tuple[Tensor, Tensor, Tensor]
    """The output [T, N]; the output times `norm_weight`, [T, N]; and partial sums of the output's
    squares, fp32 [T, ceil(N / block_n)]. Without `norm_weight`, all three are the same tensor, the
    output."""


def prepared(x: Tensor, weight: Tensor | Stored, block_n: int, fused: Fused) -> Launch:
    """Check the operands of a matmul and allocate its results.

    Args:
        x: [T, K] with contiguous rows.
        weight: [N, K], contiguous; with an activation [2N, K], with the gate's rows first. If it is
            quantised, the kernel's operand is its codes, viewed as bytes.
        block_n: The number of features that each program computes.
        fused: The operands of the fused steps.
    """
    squares, eps, bias, activation, residual, norm_weight, out, inbox = fused
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
    assert inbox is None or (block_n % 2 == num_features % 2 == 0 and x.element_size() == 2)
    assert inbox is None or (norm_weight is None and SUM_COLUMNS % block_n == 0)
    scaled = out_squares = None
    if norm_weight is not None:
        blocks = -(-num_features // block_n)
        scaled = torch.empty_like(out)
        out_squares = torch.empty((num_rows, blocks), dtype=torch.float32, device=x.device)
    parts = 0 if squares is None else squares.shape[1]
    ranks = 0 if inbox is None else len(inbox.pushed)
    constants = {"K": width, "PARTS": parts, "BLOCK_P": power_of_2_from(max(parts, 1))}
    return Launch(
        (x, squares, held, bias, residual, norm_weight, out, scaled, out_squares),
        inbox or (None, None, 0),
        (0 if residual is None else residual.stride(0), float(eps)),
        constants | {"ACTIVATION": activation, "SIZE": ranks} | dependence(x),
        (out, out if scaled is None else scaled, out if out_squares is None else out_squares),
    )
