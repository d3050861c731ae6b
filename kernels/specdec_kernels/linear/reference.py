"""The public functions for the matmuls and norms of a decoder layer. Each is implemented in torch
here, and its decorator names the function that computes it with kernels.

They compute RMS norms (Zhang and Sennrich, arXiv 1910.07467) and matmuls, some with a gate
(Shazeer, arXiv 2002.05202) or a residual. Norms round like transformers' LlamaRMSNorm, or like its
GemmaRMSNorm if the weight is fp32.

Legend:
T: the number of packed tokens.
K: the number of input features.
N: the number of output features.
F: the number of features in the MLP.
V: the number of tokens in the vocabulary.
weight: [N, K], from `pack_weight`.
bias: [N].
x: if it is a `Normed`, a result of `embed`, `add_norm` or `linear_add_norm`, or some of its rows.
into: [T, N], contiguous, an optional output buffer; CUDA only.
norm_weight, eps: the weight [N] and epsilon of the norm that follows the matmul: the norm before
    the MLP, the first norm of the next layer, or the final norm.

All tensors have contiguous rows.
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
    """A residual stream and its RMS norm. The norm may be unfinished; the next matmul then finishes
    it."""

    hidden: Tensor
    """[T, K], the residual stream."""
    scaled: Tensor
    """[T, K], the RMS norm of `hidden`. If `squares` is not None, the norm is unfinished, and this
    is only `hidden` times the norm's weight."""
    squares: Tensor | None
    """[T, P] fp32, P partial sums of squares for each row of `hidden`, with which the next matmul
    finishes the norm; None if the norm is finished."""
    eps: float

    def take(self, rows: Tensor) -> "Normed":
        """Select the rows with the indices `rows`, int64 [M], from all fields."""
        squares = None if self.squares is None else self.squares[rows]
        return Normed(self.hidden[rows], self.scaled[rows], squares, self.eps)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `ops.rms_norm` with torch's own norm."""
    if x.dtype in (torch.float32, torch.float64):
        return F.rms_norm(x, weight.shape, weight, eps)
    if weight.dtype == torch.float32:
        return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
    return F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype) * weight


@kernel("specdec_kernels.linear.norm_triton:rms_norm_triton")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide every row of x [..., K] by its root mean square and multiply it by `weight`. The
    result has x's shape and is contiguous.

    weight: [K], in x's dtype, or in fp32 for Gemma, where it holds 1 + the checkpoint's weight. The
        same is true of the norm weights of the other functions here.
    eps: added to the mean of squares, before its root is taken.
    """
    if x.dtype != torch.float32:
        return rms_norm_reference(x, weight, eps)
    # F.rms_norm would call eight torch operations instead of these five, which is slower on a CPU.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    factor = torch.addcmul(_scalar(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x * factor).mul_(weight)


@lru_cache
def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


@kernel("specdec_kernels.linear.norm_triton:gate_triton")
def gate(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Return activation(gate) * up, [T, F].

    gate_up: [T, 2F], the gate's features first. activation: "silu" or "gelu_tanh".
    """
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
    """Look up embeddings [T, K], apply the first norm, and look up rows [T, D] of the rotary
    tables.

    token_ids: [T] int64, less than V. Not checked on CUDA.
    positions: [T] int64, less than L. Not checked on CUDA.
    embedding: [V, K].
    cos_table, sin_table: [L, D], for L positions and D rotary dimensions.
    scale: a factor by which the embeddings are multiplied, as in Gemma.
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
    """Add x to the residual stream, and apply the norm that follows.

    x: [T, N], the output of a projection, already summed over ranks.
    post_norm: [N], the weight of a norm that is applied to x before the addition, as in Gemma 2
        and 3; None for models without it.
    """
    if post_norm is not None:
        x = rms_norm.reference(x, post_norm, eps)
    return normed(residual + x, norm_weight, eps)


@kernel("specdec_kernels.linear.products_triton:linear_triton")
def linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """Return x [T, K] @ weight^T (+ bias), [T, N]. With tensor parallelism, this may be one rank's
    partial sum of a projection."""
    assert into is None
    return product(x, weight, bias)


@kernel("specdec_kernels.linear.products_triton:norm_linear_triton")
def norm_linear(
    x: Normed, weight: Weight, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """Return rms_norm(x) @ weight^T (+ bias), [T, N]. This computes a layer's merged q, k and v, or
    the logits."""
    assert x.squares is None
    return linear.reference(x.scaled, weight, bias, into)


@kernel("specdec_kernels.linear.products_triton:norm_gate_up_triton")
def norm_gate_up(x: Normed, weight: Weight, activation: str = "silu") -> Tensor:
    """Return activation(n @ gate^T) * (n @ up^T), [T, F], with n = rms_norm(x). This is the first
    half of a gated MLP.

    weight: [2F, K], the rows of `gate` before those of `up`. activation: "silu" or "gelu_tanh".
    """
    return gate.reference(norm_linear.reference(x, weight), activation)


@kernel("specdec_kernels.linear.products_triton:linear_add_triton")
def linear_add(x: Tensor, weight: Weight, residual: Tensor) -> Tensor:
    """Return residual [T, N] + x [T, K] @ weight^T."""
    return product_added(x, weight, residual, None)


@kernel("specdec_kernels.linear.products_triton:linear_add_norm_triton")
def linear_add_norm(
    x: Tensor,
    weight: Weight,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> Normed:
    """Compute residual [T, N] + x [T, K] @ weight^T (+ bias), and apply the norm that follows."""
    return normed(product_added(x, weight, residual, bias), norm_weight, eps)


def normed(x: Tensor, norm_weight: Tensor, eps: float) -> Normed:
    """Apply the norm to x [T, K]. Return x with its finished norm."""
    return Normed(x, rms_norm.reference(x, norm_weight, eps), None, eps)


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """Compute `ops.linear` in torch. On CUDA, torch calls cuBLAS."""
    if into is None:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.T, out=into)
    return torch.addmm(bias, x, weight.T, out=into)
