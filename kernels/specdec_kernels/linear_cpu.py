"""The products of a decoder layer with what surrounds them, on a CPU.

Torch hands products in fp32 to MKL, which on AMD's processors takes 2 to 5 times as long for two to
sixteen rows as oneDNN with weights in an order of its own (Zen 4), and on Intel's 0.6 to 0.9 times
(Sapphire Rapids). In bf16 oneDNN has them anyway, and takes 0.4 to 0.8 times as long with its own
order on both. That order is opaque, so a packed weight is not kept as a plain tensor as well,
unless it is small: oneDNN's calls take some 15 us, 60 where nothing of them is in the caches, and a
product of one row with a small weight is done in less.

Legend: T packed tokens, K features read, N features written.
"""

import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from specdec_kernels.linear import Normed, gate_reference, rms_norm_reference

SMALL = 3 << 15  # numbers up to which a weight is not packed: products of 1 to 5 rows are quicker
BOTH = 1 << 19  # numbers up to which a packed one in fp32 is kept plain too, for single rows
_ROWS = 8  # that oneDNN's order is chosen for; from 2 to 64 it chooses the same


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K] of products on a CPU; made by `ops.pack_weight`.

    blocks: in oneDNN's order, opaque. plain: the same as [N, K], or None; see `pack_weight_cpu`.
    """

    blocks: Tensor
    plain: Tensor | None

    @property
    def num_bytes(self) -> int:
        """Of `blocks`, but for what their last ones are filled up with."""
        return self.blocks.numel() * self.blocks.dtype.itemsize


Weight = Tensor | PackedWeight


def pays_to_pack(dtype: torch.dtype) -> bool:
    """Whether products of this dtype are to be oneDNN's on this machine."""
    if vendor() not in ("AuthenticAMD", "GenuineIntel") or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and vendor() != "GenuineIntel"


@lru_cache
def vendor() -> str:
    """The processor's, as x86 has it: "AuthenticAMD", "GenuineIntel"; "" where it is not known."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor().rpartition(", ")[2]  # Windows: "AMD64 Family 25 ..., vendor"
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(found, "")


class Forms(NamedTuple):
    """In which forms a weight is held."""

    packed: bool
    plain: bool


def forms_of(numel: int, dtype: torch.dtype) -> Forms:
    """The forms of a weight of so many numbers on this machine."""
    packed = numel > SMALL and pays_to_pack(dtype)
    return Forms(packed, not packed or (numel <= BOTH and dtype == torch.float32))


@torch.no_grad()
def pack_weight_cpu(weight: Tensor) -> Weight:
    """[N, K] in the form in which products take it: packed, unless it is small.

    The columns of the plain form lie in memory one after the other, by which MKL's products of a
    few rows take up to half the time.
    """
    forms = forms_of(weight.numel(), weight.dtype)
    plain = weight.T.contiguous().T if forms.plain else None
    if not forms.packed:
        assert plain is not None
        return plain
    return PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS), plain)


def linear_cpu(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `ops.linear`."""
    plain = _plain(weight, x)
    if plain is not None:
        return linear(x, plain, bias)
    assert isinstance(weight, PackedWeight)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.blocks, bias, "none", [], "")
    return out


def linear_add_cpu(x: Tensor, weight: Weight, residual: Tensor, bias: Tensor | None) -> Tensor:
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
    """The weight as a tensor where the product is to take that."""
    if isinstance(weight, Tensor):
        return weight
    return weight.plain if x.shape[0] == 1 else None


def rms_norm_cpu(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `ops.rms_norm`: in five operations, of which torch's own takes eight on a CPU."""
    if x.dtype != torch.float32:
        return rms_norm_reference(x, weight, eps)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    factor = torch.addcmul(_scalar(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x * factor).mul_(weight)


@lru_cache
def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def add_norm_cpu(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    post_norm: Tensor | None = None,
) -> Normed:
    """See `ops.add_norm`."""
    if post_norm is not None:
        x = rms_norm_cpu(x, post_norm, eps)
    return norm_cpu(residual + x, norm_weight, eps)


def norm_cpu(x: Tensor, norm_weight: Tensor, eps: float) -> Normed:
    """x [T, K] and its norm, as a product takes them."""
    return Normed(x, rms_norm_cpu(x, norm_weight, eps), None, eps)


def linear_add_norm_cpu(
    x: Tensor,
    weight: Weight,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    bias: Tensor | None = None,
) -> Normed:
    """See `ops.linear_add_norm`."""
    return norm_cpu(linear_add_cpu(x, weight, residual, bias), norm_weight, eps)


def norm_linear_cpu(x: Normed, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """See `ops.norm_linear`."""
    assert x.squares is None
    return linear_cpu(x.scaled, weight, bias)


def norm_gate_up_cpu(x: Normed, weight: Weight, activation: str = "silu") -> Tensor:
    """See `ops.norm_gate_up`."""
    return gate_reference(norm_linear_cpu(x, weight), activation)
