"""Products, norms and gates of a decoder layer: torch references.

A layer of a llama-like decoder is RMSNorm (Zhang and Sennrich, arXiv 1910.07467) and a product,
attention, a product added to the residual, RMSNorm and the gated MLP (Shazeer, 2002.05202), and
another product added to the residual. Norms round as transformers' LlamaRMSNorm does, or as its
GemmaRMSNorm if the weight is fp32.

Does not know layers or models.
Legend: T packed tokens, K features read, N features written, F the MLP's features.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.dispatch import kernel

ACTIVATIONS = ("silu", "gelu_tanh")


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`."""
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    if weight.dtype == torch.float32:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


@kernel("specdec_kernels.linear.norm_triton:gate_triton")
def gate(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up of merged [T, 2F], gate first: [T, F].

    activation: "silu" or "gelu_tanh".
    """
    first, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(first) * up
    assert activation == "gelu_tanh", activation
    return F.gelu(first, approximate="tanh") * up


class Normed(NamedTuple):
    """A residual stream, ready for a norm and a product."""

    hidden: Tensor
    """[T, K], the stream itself."""
    scaled: Tensor
    """[T, K], its RMS norm; with `squares`, only `hidden` times the norm's weight."""
    squares: Tensor | None
    """[T, P] fp32, sums of squares of P parts of each row, by which the next product divides."""
    eps: float

    def take(self, rows: Tensor) -> "Normed":
        """Only these rows, int64 [M]."""
        squares = None if self.squares is None else self.squares[rows]
        return Normed(self.hidden[rows], self.scaled[rows], squares, self.eps)


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """`ops.linear` by torch's library, which on CUDA computes the products of many rows."""
    if into is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.T, out=into)
    return torch.addmm(bias, x, weight.T, out=into)


def norm_linear_reference(
    x: Normed, weight: Tensor, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """`ops.norm_linear` by torch's library."""
    assert x.squares is None
    return linear_reference(x.scaled, weight, bias, into)
