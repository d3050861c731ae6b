"""What the kernels of products have in common: operands that fit, and memory for their results."""

import torch
from torch import Tensor

from specdec_kernels.linear import ACTIVATIONS


def linear_outputs(
    x: Tensor,
    weight: Tensor,
    block_n: int,
    *,
    squares: Tensor | None,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    norm_weight: Tensor | None,
    into: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for a product's results, whose operands are checked first.

    Args:
        x: [T, K], rows contiguous.
        weight: [N, K], contiguous; [2N, K] with an activation.
        block_n: Features of a program.
        squares: [T, P] fp32, of x.
        bias: [N].
        activation: "" or one of ACTIVATIONS.
        residual: [T, N], rows contiguous.
        norm_weight: [N], of the norm that follows.
        into: [T, N], contiguous, where to write the first result.

    Returns:
        [T, N], which is `into` where given; and with `norm_weight` the same times it, and squares
        of that of each program, [T, ceil(N / block_n)] fp32. Without, the first in their place.
    """
    num_rows, width = x.shape
    num_features = weight.shape[0] // (2 if activation else 1)
    assert weight.shape[1] == width and weight.is_contiguous() and x.stride(1) == 1
    assert activation in ("", *ACTIVATIONS)
    assert squares is None or (squares.shape[0] == num_rows and squares.is_contiguous())
    assert bias is None or bias.shape == (num_features,)
    assert norm_weight is None or norm_weight.shape == (num_features,)
    out = into
    if out is None:
        out = torch.empty((num_rows, num_features), dtype=x.dtype, device=x.device)
    assert out.shape == (num_rows, num_features) and out.is_contiguous()
    assert residual is None or (residual.shape == out.shape and residual.stride(1) == 1)
    if norm_weight is None:
        return out, out, out
    blocks = -(-num_features // block_n)
    out_squares = torch.empty((num_rows, blocks), dtype=torch.float32, device=x.device)
    return out, torch.empty_like(out), out_squares
