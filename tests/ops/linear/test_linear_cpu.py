"""Products on a CPU, in every form that a weight can have, against fp64."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ops_helpers import TOLERANCE, assert_close
from specdec_kernels import ops
from specdec_kernels.linear import cpu
from specdec_kernels.linear.cpu import BOTH, SMALL, PackedWeight, forms_of, pays_to_pack
from specdec_kernels.linear.reference import rms_norm_reference
from torch import Tensor

EPS = 1e-5
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
# N, K: not packed; packed and kept plain; only packed. Odd sizes leave the last blocks not full.
SIZES = {"small": (75, 130), "both": (701, 257), "packed": (1031, 515)}
packs = pytest.mark.skipif(
    not pays_to_pack(F32), reason="weights in fp32 are packed on AMD processors alone"
)


def normal(*size: int, dtype: torch.dtype = F32, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return (torch.randn(size, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize(
    "vendor, packed", [("AuthenticAMD", True), ("GenuineIntel", False), ("", False)]
)
def test_fp32_is_packed_where_mkl_is_slow(
    vendor: str, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "vendor", lambda: vendor)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    assert forms_of(BOTH + 1, F32) == (packed, not packed)
    assert forms_of(SMALL, F32) == forms_of(BOTH + 1, F64) == (False, True)


def test_the_vendor_is_that_of_the_machine() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        found = cpu.vendor()
        assert (f"vendor_id\t: {found}\n" in cpuinfo.read_text()) == (found != "")


@packs
def test_the_sizes_have_all_forms() -> None:
    numels = {name: n * k for name, (n, k) in SIZES.items()}
    assert numels["small"] <= SMALL < numels["both"] <= BOTH < numels["packed"]
    assert [tuple(forms_of(n, F32)) for n in numels.values()] == [
        (False, True),
        (True, True),
        (True, False),
    ]


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 17, 70])
@pytest.mark.parametrize("size", SIZES)
def test_products_match_fp64(size: str, rows: int, dtype: torch.dtype) -> None:
    features, width = SIZES[size]
    plain = normal(features, width, dtype=dtype, scale=width**-0.5)
    weight = ops.pack_weight(plain)
    assert isinstance(weight, PackedWeight) == forms_of(plain.numel(), dtype).packed
    # Rows that lie apart, as in a slice of a wider tensor.
    x = normal(rows, 2 * width, dtype=dtype)[:, :width]
    residual = normal(rows, 3 * features, dtype=dtype)[:, features : 2 * features]
    before = residual.clone()
    bias, norm = normal(features, dtype=dtype), 1 + normal(features, dtype=dtype, scale=0.3)
    product = F.linear(x.double(), plain.double())
    tolerance = TOLERANCE[dtype]
    added = ops.linear_add(x, weight, residual)
    assert_close("added", residual.double() + product, added, tolerance)
    for b in (None, bias):
        expected = product if b is None else product + b.double()
        assert_close("linear", expected, ops.linear(x, weight, b), tolerance)
        summed = ops.linear_add_norm(x, weight, residual, norm, EPS, b)
        assert_close("hidden", residual.double() + expected, summed.hidden, tolerance)
        normed = rms_norm_reference(summed.hidden.double(), norm.double(), EPS)
        assert_close("scaled", normed, summed.scaled, tolerance)
        assert torch.equal(residual, before), "the residual stream is read, not written"


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("size", SIZES)
def test_gated_mlp_matches_fp64(size: str, rows: int) -> None:
    features, width = SIZES[size]
    features -= features % 2
    plain = normal(features, width, scale=width**-0.5)
    hidden, norm = normal(rows, width), 1 + normal(width, scale=0.3)
    x = ops.Normed(hidden, ops.rms_norm(hidden, norm, EPS), None, EPS)
    normed = rms_norm_reference(hidden.double(), norm.double(), EPS)
    for activation in ("silu", "gelu_tanh"):
        expected = ops.gate.reference(F.linear(normed, plain.double()), activation)
        out = ops.norm_gate_up(x, ops.pack_weight(plain), activation)
        assert_close(activation, expected, out, 1e-5)


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 100), (2, 3, 24)], ids=str)
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype)
    x[..., 0, :] *= 1e-4  # so small that the epsilon matters
    expected = rms_norm_reference(x.double(), weight.double(), EPS)
    before = x.clone()
    assert_close("out", expected, ops.rms_norm(x, weight, EPS), TOLERANCE[dtype])
    assert torch.equal(x, before)


@packs
def test_bytes_are_those_of_the_numbers() -> None:
    weight = ops.pack_weight(normal(1031, 515))
    assert isinstance(weight, PackedWeight) and weight.num_bytes == 1031 * 515 * 4
