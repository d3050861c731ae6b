import pytest
import torch
import torch.nn.functional as F
from ops_helpers import DTYPES, TOLERANCE, assert_close, needs_cuda
from specdec_kernels import ops
from specdec_kernels.linear.embed_triton import embed_triton
from torch import Tensor

EPS = 1e-5


def make(
    tokens: int, width: int, dim: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Tables of 50 tokens and 90 positions, with NaN in rows that are not asked for."""
    generator = torch.Generator().manual_seed(tokens + width)
    ids = torch.randint(50, (tokens,), generator=generator)
    positions = torch.randint(90, (tokens,), generator=generator)
    ids[-1], positions[-1] = 49, 89
    tables = {"embedding": (50, width, ids), "cos_table": (90, dim, positions)}
    tables["sin_table"] = tables["cos_table"]
    arguments = {"token_ids": ids.to(device), "positions": positions.to(device)}
    for name, (length, columns, used) in tables.items():
        table = torch.full((length, columns), float("nan"))
        table[used] = torch.randn(length, columns, generator=generator)[used]
        arguments[name] = table.to(device, dtype)
    arguments["norm_weight"] = 1 + 0.3 * torch.randn(width, generator=generator)
    arguments["norm_weight"] = arguments["norm_weight"].to(device, dtype)
    return arguments


def check(arguments: dict[str, Tensor], scale: float = 1.0) -> None:
    ids, positions = arguments["token_ids"], arguments["positions"]
    x, cos, sin = embed_triton(**arguments, eps=EPS, scale=scale)
    hidden = arguments["embedding"][ids] * scale
    assert torch.equal(x.hidden, hidden) and x.squares is None and x.eps == EPS
    assert torch.equal(cos, arguments["cos_table"][positions])
    assert torch.equal(sin, arguments["sin_table"][positions])
    weight = arguments["norm_weight"].double()
    expected = F.rms_norm(hidden.double(), weight.shape, weight, EPS)
    assert_close("scaled", expected, x.scaled, TOLERANCE[hidden.dtype])
    assert all(t.is_contiguous() for t in (x.hidden, x.scaled, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 32, 16), (5, 200, 24), (3, 1030, 128), (9, 7, 2)], ids=str)
def test_kernel(size, dtype, device):
    check(make(*size, dtype, device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scaled(dtype, device):
    """Gemma scales by a value of the dtype, and has the norm's weight in fp32."""
    arguments = make(5, 200, 24, dtype, device)
    arguments["norm_weight"] = arguments["norm_weight"].float() + 1e-4
    scale = torch.tensor(200**0.5, dtype=dtype).item()
    check(arguments, scale)
    x, _, _ = ops.embed(**{k: v.cpu() for k, v in arguments.items()}, eps=EPS, scale=scale)
    triton, _, _ = embed_triton(**arguments, eps=EPS, scale=scale)
    assert torch.equal(x.hidden, triton.hidden.cpu()) and x.scaled.dtype == dtype
    assert_close("scaled", x.scaled, triton.scaled.cpu(), TOLERANCE[dtype])


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 4096, 128), (48, 2048, 64), (3000, 8192, 128)], ids=str)
def test_large(size, dtype, device):
    check(make(*size, dtype, device))


def test_cpu_tensors_go_to_the_reference():
    arguments = make(5, 24, 6, torch.float64, torch.device("cpu"))
    x, cos, sin = ops.embed(**arguments, eps=EPS)
    hidden = arguments["embedding"][arguments["token_ids"]]
    normed = F.rms_norm(hidden, (24,), arguments["norm_weight"], EPS)
    assert torch.equal(x.hidden, hidden)
    assert_close("scaled", normed, x.scaled, 1e-12)
    assert torch.equal(cos, arguments["cos_table"][arguments["positions"]])
    assert torch.equal(sin, arguments["sin_table"][arguments["positions"]])
