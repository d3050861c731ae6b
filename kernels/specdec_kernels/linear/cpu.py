"""Products and norms of a decoder layer: the public functions and their CPU path.

Torch runs fp32 products on MKL. For 2 to 16 rows MKL takes 2 to 5 times as long as oneDNN with
packed weights on AMD (Zen 4), and 0.6 to 0.9 times as long on Intel (Sapphire Rapids). In bf16
torch uses oneDNN anyway; packing makes it take 0.4 to 0.8 times as long on both. The packed order
is opaque, so a weight is kept in one form, except small ones: a oneDNN call costs 15 us, or 60 us
with cold caches, and a product of one row with a small weight takes less.

Legend: T packed tokens, K features read, N features written.
"""

import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.dispatch import kernel
from specdec_kernels.linear.reference import Normed, gate, rms_norm_reference
from specdec_kernels.linear.stored import Stored

SMALL = 3 << 15  # weights of at most this many numbers are not packed: faster for 1 to 5 rows
BOTH = 1 << 19  # fp32 weights of at most this many numbers are kept plain too, for single rows
_ROWS = 8  # rows for which oneDNN chooses its order; it chooses the same for 2 to 64


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K] for products on a CPU; made by `ops.pack_weight`.

    blocks: in oneDNN's opaque order. plain: the same as [N, K], kept for small weights, or None.
    """

    blocks: Tensor
    plain: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Bytes of `blocks`, without the padding of the last ones."""
        return self.blocks.numel() * self.blocks.dtype.itemsize


Weight = Tensor | PackedWeight | Stored


def pays_to_pack(dtype: torch.dtype) -> bool:
    """True if packed oneDNN products of this dtype are faster on this machine."""
    if vendor() not in ("AuthenticAMD", "GenuineIntel") or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and vendor() != "GenuineIntel"


@lru_cache
def vendor() -> str:
    """The processor's vendor: "AuthenticAMD" or "GenuineIntel" on x86; "" if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor().rpartition(", ")[2]  # Windows: "AMD64 Family 25 ..., vendor"
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(found, "")


class Forms(NamedTuple):
    """The forms in which a weight is held."""

    packed: bool
    plain: bool


def forms_of(numel: int, dtype: torch.dtype) -> Forms:
    """The forms of a weight with `numel` numbers on this machine."""
    packed = numel > SMALL and pays_to_pack(dtype)
    return Forms(packed, not packed or (numel <= BOTH and dtype == torch.float32))


def pack_weight(weight: Tensor) -> Tensor | PackedWeight:
    """The form in which products take a weight [N, K]; call it once, at load.

    On CUDA this is the contiguous tensor. A CPU has orders of its own, see `PackedWeight`.
    """
    return weight.contiguous() if weight.is_cuda else _packed(weight)


@torch.no_grad()
def _packed(weight: Tensor) -> Tensor | PackedWeight:
    """A weight [N, K] on a CPU: packed, unless it is small.

    The plain form's columns are contiguous, which makes MKL's products of few rows up to twice as
    fast.
    """
    forms = forms_of(weight.numel(), weight.dtype)
    plain = weight.T.contiguous().T if forms.plain else None
    if not forms.packed:
        assert plain is not None
        return plain
    return PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS), plain)


@kernel("specdec_kernels.linear.norm_triton:rms_norm_triton")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm of every row times `weight`.

    Args:
        x: [..., K], rows contiguous.
        weight: [K], of x's dtype or, as Gemma's 1 + g, fp32. So are all norm weights here.
        eps: Added to the mean of squares.

    Returns:
        As x, contiguous.
    """
    if x.dtype != torch.float32:
        return rms_norm_reference(x, weight, eps)
    # Five operations; torch's own norm takes eight on a CPU.
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    factor = torch.addcmul(_scalar(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x * factor).mul_(weight)


@kernel("specdec_kernels.linear.norm_triton:add_norm_triton")
def add_norm(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    post_norm: Tensor | None = None,
) -> Normed:
    """residual + x, prepared for the norm that follows; x is a complete projection.

    For projections that were summed over ranks, or that have a norm of their own.

    Args:
        x, residual: [T, N], rows contiguous.
        norm_weight: [N].
        eps: Of both norms.
        post_norm: [N], weight of a norm of x before it is added, as in Gemma 2 and 3.
    """
    if post_norm is not None:
        x = rms_norm.reference(x, post_norm, eps)
    return normed(residual + x, norm_weight, eps)


@kernel("specdec_kernels.linear.products_triton:linear_triton")
def linear(
    x: Tensor, weight: Weight, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """x @ weight^T (+ bias): a plain product, such as one rank's part of a projection.

    Args:
        x: [T, K], rows contiguous.
        weight: [N, K] of `pack_weight`.
        bias: [N].
        into: [T, N], contiguous, where to write it; CUDA only.

    Returns:
        [T, N], contiguous.
    """
    assert into is None
    plain = _plain(weight, x)
    if plain is not None:
        return F.linear(x, plain, bias)
    assert isinstance(weight, PackedWeight)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.blocks, bias, "none", [], "")
    return out


@kernel("specdec_kernels.linear.products_triton:norm_linear_triton")
def norm_linear(
    x: Normed, weight: Weight, bias: Tensor | None = None, into: Tensor | None = None
) -> Tensor:
    """rms_norm(x) @ weight^T (+ bias): a layer's merged q, k and v, or the logits.

    Args:
        x: [T, K], all rows as `embed`, `add_norm` or `linear_add_norm` returned them.
        weight: [N, K] of `pack_weight`.
        bias: [N].
        into: [T, N], contiguous, where to write it; CUDA only.

    Returns:
        [T, N] of x's dtype, contiguous.
    """
    assert x.squares is None
    return linear.reference(x.scaled, weight, bias, into)


@kernel("specdec_kernels.linear.products_triton:norm_gate_up_triton")
def norm_gate_up(x: Normed, weight: Weight, activation: str = "silu") -> Tensor:
    """activation(n @ gate^T) * (n @ up^T) with n = rms_norm(x): the first half of a gated MLP.

    Args:
        x: [T, K], all rows as `embed`, `add_norm` or `linear_add_norm` returned them.
        weight: [2F, K] of `pack_weight`, the gate's rows first.
        activation: "silu" or "gelu_tanh".

    Returns:
        [T, F], contiguous.
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
    """residual + x @ weight^T (+ bias), prepared for the norm that follows: a layer's output and
    down projections.

    Args:
        x: [T, K], rows contiguous.
        weight: [N, K] of `pack_weight`.
        residual: [T, N], rows contiguous.
        bias: [N].
        norm_weight: [N], of the next norm: the MLP's, the next layer's, or the last one.
        eps: Of that norm.

    Returns:
        The new residual stream, in `hidden`, and the input of the next product.
    """
    return normed(_linear_add(x, weight, residual, bias), norm_weight, eps)


def normed(x: Tensor, norm_weight: Tensor, eps: float) -> Normed:
    """x [T, K] and its norm, as the input of a product."""
    return Normed(x, rms_norm.reference(x, norm_weight, eps), None, eps)


def _linear_add(x: Tensor, weight: Weight, residual: Tensor, bias: Tensor | None) -> Tensor:
    """residual + x @ weight^T (+ bias): [T, N]."""
    plain = _plain(weight, x)
    if plain is not None:
        out = torch.addmm(residual, x, plain.T)
        return out if bias is None else out.add_(bias)
    assert isinstance(weight, PackedWeight)
    fused = torch.ops.mkldnn._linear_pointwise.binary
    summed: Tensor = fused(x, residual, weight.blocks, bias, "add")
    return summed


def _plain(weight: Weight, x: Tensor) -> Tensor | None:
    """The weight as a plain tensor if the product with x uses that form, else None."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, Stored):
        return weight.plain(x.dtype)
    return weight.plain if x.shape[0] == 1 else None


@lru_cache
def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)
