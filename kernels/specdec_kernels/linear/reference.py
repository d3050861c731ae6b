"""The public functions for matmuls of a decoder layer: torch implementations, and the names of
their kernels.

RMSNorm (Zhang and Sennrich, arXiv 1910.07467) and products, some gated (Shazeer, 2002.05202) or
added to the residual. Norms round as transformers' LlamaRMSNorm does, or as its GemmaRMSNorm if the
weight is fp32.

Legend: T packed tokens, K features read, N features written, F the MLP's features, V vocabulary.
Rows of a tensor are contiguous. A weight [N, K] comes from `pack_weight`; a bias is [N]. A `Normed`
x has all rows as `embed`, `add_norm` or `linear_add_norm` returned them. `into` [T, N], contiguous,
is an output buffer, on CUDA only. `norm_weight` [N] and `eps` belong to the norm that follows: the
MLP's, the next layer's, or the last one.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.dispatch import kernel
from specdec_kernels.linear.cpu import Weight, product, product_added

ACTIVATIONS = ("silu", "gelu_tanh")


class Normed(NamedTuple):
    """A residual stream, ready for a norm and a matmul."""

    hidden: Tensor
    """[T, K], the stream itself."""
    scaled: Tensor
    """[T, K], its RMS norm; with `squares`, only `hidden` times the norm's weight."""
    squares: Tensor | None
    """[T, P] fp32, sums of squares of P parts of each row, from which the next matmul computes the
    norm."""
    eps: float

    def take(self, rows: Tensor) -> "Normed":
        """The rows at the indices `rows`, int64 [M]."""
        squares = None if self.squares is None else self.squares[rows]
        return Normed(self.hidden[rows], self.scaled[rows], squares, self.eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`."""
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    if weight.dtype == torch.float32:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


@kernel("specdec_kernels.linear.norm_triton:rms_norm_triton")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of every row of x [..., K] times `weight`, of the same shape,
    contiguous.

    weight: [K], in x's dtype, or in fp32 like Gemma's 1 + g; this holds for all norm weights here.
    eps: added to the mean of squares.
    """
    if x.dtype != torch.float32:
        return rms_norm_reference(x, weight, eps)
    # Five operations; torch's own norm takes eight on a CPU.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    factor = torch.addcmul(_scalar(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x * factor).mul_(weight)


@lru_cache
def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


@kernel("specdec_kernels.linear.norm_triton:gate_triton")
def gate(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """activation(gate) * up, [T, F]. gate_up: [T, 2F], the gate first. activation: "silu" or
    "gelu_tanh"."""
    first, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return F.silu(first) * up
    assert activation == "gelu_tanh", activation
    return F.gelu(first, approximate="tanh") * up


@kernel("specdec_kernels.linear.embed_triton:embed_triton")
def embed(
    token_ids: Tensor,
    positions: Tensor,
    embedding: Tensor,
    cos_table: Tensor,
    sin_table: Tensor,
    norm_weight: Tensor,
    eps: float,
    scale: float = 1.0,
) -> tuple[Normed, Tensor, Tensor]:
    """Embeddings [T, K], their first norm, and the rotary tables' rows [T, D].

    token_ids, positions: [T] int64, less than V and L; not checked on CUDA. embedding: [V, K].
    cos_table, sin_table: [L, D]. scale: a factor of the embeddings, as in Gemma.
    """
    hidden = F.embedding(token_ids, embedding)
    if scale != 1.0:
        hidden = hidden * scale
    cos, sin = (table.index_select(0, positions) for table in (cos_table, sin_table))
    return normed(hidden, norm_weight, eps), cos, sin


@kernel("specdec_kernels.linear.norm_triton:add_norm_triton")
def add_norm(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    post_norm: Tensor | None = None,
) -> Normed:
    """The sum residual + x, prepared for the norm that follows. x is a complete projection [T, N].

    post_norm: [N], weight of a norm of x before it is added, as in Gemma 2 and 3.
    """
    if post_norm is not None:
        x = rms_norm.reference(x, post_norm, eps)
    return normed(residual + x, norm_weight, eps)


@kernel("specdec_kernels.linear.products_triton:linear_triton")
def linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """x [T, K] @ weight^T (+ bias): [T, N], such as one rank's part of a projection."""
    assert into is None
    return product(x, weight, bias)


@kernel("specdec_kernels.linear.products_triton:norm_linear_triton")
def norm_linear(
    x: Normed, weight: Weight, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """rms_norm(x) @ weight^T (+ bias): [T, N], a layer's merged q, k and v, or the logits."""
    assert x.squares is None
    return linear.reference(x.scaled, weight, bias, into)


@kernel("specdec_kernels.linear.products_triton:norm_gate_up_triton")
def norm_gate_up(x: Normed, weight: Weight, activation: str = "silu") -> Tensor:
    """activation(n @ gate^T) * (n @ up^T) with n = rms_norm(x): [T, F], half of a gated MLP.

    weight: [2F, K], the gate's rows first. activation: "silu" or "gelu_tanh".
    """
    return gate.reference(norm_linear.reference(x, weight), activation)


@kernel("specdec_kernels.linear.products_triton:linear_add_norm_triton")
def linear_add_norm(
    x: Tensor,
    weight: Weight,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> Normed:
    """residual [T, N] + x [T, K] @ weight^T (+ bias), in `hidden`, and the input of the next
    matmul."""
    return normed(product_added(x, weight, residual, bias), norm_weight, eps)


def normed(x: Tensor, norm_weight: Tensor, eps: float) -> Normed:
    """x [T, K] with its norm, as the input of a matmul."""
    return Normed(x, rms_norm.reference(x, norm_weight, eps), None, eps)


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """`ops.linear` by torch's library, which on CUDA computes matmuls of many rows."""
    if into is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.T, out=into)
    return torch.addmm(bias, x, weight.T, out=into)
