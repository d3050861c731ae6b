"""Matmuls on a CPU, and the layouts of their weights.

For 2 to 16 rows of fp32, torch's MKL takes 2 to 5 times as long as oneDNN with packed weights on
AMD (Zen 4), but only 0.6 to 0.9 times as long on Intel (Sapphire Rapids). In bf16 oneDNN is faster
on both.

Small fp32 weights are kept both plain and packed. Matmuls of a single row avoid oneDNN, because a
call has an overhead of 15 us, or 60 us with cold caches. They need the plain copy, because only
oneDNN can read its packed layout.

In shapes, T is the number of packed tokens, K the number of input features and N the number of
output features.
"""

import platform
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.linear.stored import Stored

SMALL = 3 << 15  # weights of up to this many elements stay plain, which is faster for 1 to 5 rows
BOTH = 1 << 19  # fp32 weights of up to this many elements also have a plain copy, for single rows
_ROWS = 8  # the row count given to oneDNN; it chooses the same layout for 2 to 64 rows


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K] for matmuls on a CPU, made by `ops.pack_weight`.

    blocks: the weight in oneDNN's opaque layout.
    plain: a copy in the usual layout, [N, K], if the weight is small; otherwise None.
    """

    blocks: Tensor
    plain: Tensor | None

    @property
    def num_bytes(self) -> int:
        """The size of `blocks` in bytes, without the padding at its end."""
        return self.blocks.numel() * self.blocks.dtype.itemsize


Weight = Tensor | PackedWeight | Stored


def pays_to_pack(dtype: torch.dtype) -> bool:
    """Return whether packing weights for oneDNN makes matmuls of this dtype faster on this CPU."""
    if vendor() not in ("AuthenticAMD", "GenuineIntel") or not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 and vendor() != "GenuineIntel"


@lru_cache
def vendor() -> str:
    """Return the processor's vendor, "AuthenticAMD" or "GenuineIntel" on x86; "" if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor().rpartition(", ")[2]  # Windows: "AMD64 Family 25 ..., vendor"
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(found, "")


class Forms(NamedTuple):
    """The layouts in which a weight is kept: packed for oneDNN, plain, or both."""

    packed: bool
    plain: bool


def forms_of(numel: int, dtype: torch.dtype) -> Forms:
    """Return the layouts in which to keep a weight with `numel` elements on this CPU."""
    packed = numel > SMALL and pays_to_pack(dtype)
    return Forms(packed, not packed or (numel <= BOTH and dtype == torch.float32))


def pack_weight(weight: Tensor) -> Tensor | PackedWeight:
    """Convert a weight [N, K] to the layout that its matmuls read. On CUDA, only make it
    contiguous. Call this once, when loading."""
    return weight.contiguous() if weight.is_cuda else _packed(weight)


@torch.no_grad()
def _packed(weight: Tensor) -> Tensor | PackedWeight:
    """Pack a weight [N, K] on a CPU, unless it is small or packing does not make matmuls faster. A
    plain weight is stored with contiguous columns, which makes MKL's matmuls of few rows up to
    twice as fast."""
    forms = forms_of(weight.numel(), weight.dtype)
    plain = weight.T.contiguous().T if forms.plain else None
    if not forms.packed:
        assert plain is not None
        return plain
    return PackedWeight(torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS), plain)


def product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Return x @ weight^T (+ bias): [T, N]."""
    plain = _plain(weight, x)
    if plain is not None:
        return F.linear(x, plain, bias)
    assert isinstance(weight, PackedWeight)
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight.blocks, bias, "none", [], "")
    return out


def product_added(x: Tensor, weight: Weight, residual: Tensor, bias: Tensor | None) -> Tensor:
    """Return residual + x @ weight^T (+ bias): [T, N]."""
    plain = _plain(weight, x)
    if plain is not None:
        out = torch.addmm(residual, x, plain.T)
        return out if bias is None else out.add_(bias)
    assert isinstance(weight, PackedWeight)
    fused = torch.ops.mkldnn._linear_pointwise.binary
    summed: Tensor = fused(x, residual, weight.blocks, bias, "add")
    return summed


def _plain(weight: Weight, x: Tensor) -> Tensor | None:
    """Return the weight as a plain tensor [N, K], dequantised if needed, or None if the matmul with
    x should use the packed weight."""
    if isinstance(weight, Tensor):
        return weight
    if isinstance(weight, Stored):
        return weight.plain(x.dtype)
    return weight.plain if x.shape[0] == 1 else None
