"""The all-reduce of one rank, beside others that have already written their parts."""

import pytest
import torch
import torch.nn.functional as F
from ops_helpers import DTYPES, TOLERANCE, assert_close
from specdec_kernels.peers import MAX_ROWS, Peers, num_flags
from specdec_kernels.reduce_triton import reduce_add_norm_triton

EPS = 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (6, 600), (33, 256)])
def test_sums_of_ranks(rows, width, size, dtype, device):
    generator = torch.Generator().manual_seed(width)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    wide = 2**31 - 2  # counters wrap around
    parts = normal(size, 2, MAX_ROWS, width)
    parts[:, :, rows:] = float("nan")
    flags = torch.full((size, num_flags(width), size), wide, dtype=torch.int32, device=device)
    rank = size - 1
    epochs = torch.full((num_flags(width),), wide, dtype=torch.int32, device=device)
    norm, residual = normal(width), normal(rows, 2 * width)[:, :width]
    peers = Peers(
        rank,
        size,
        parts[rank],
        torch.tensor([p.data_ptr() for p in parts], device=device),
        torch.tensor([f.data_ptr() for f in flags], device=device),
        epochs,
    )
    assert peers.take(0, MAX_ROWS + 1, width) is None
    for call, place in enumerate((0, 1, 0, 1), start=1):
        flags[rank, :, :rank] += 1  # what the others announce
        before = flags.clone()
        out = reduce_add_norm_triton(peers, place, residual, norm, EPS)
        before[:, :, rank] += 1
        assert torch.equal(flags, before)
        assert ((epochs.long() - wide - call) % 2**32 == 0).all()
        expected = residual.double() + parts[:, place, :rows].double().sum(0)
        assert_close("hidden", expected, out.hidden, 2 * TOLERANCE[dtype])
        assert_close("scaled", out.hidden.double() * norm.double(), out.scaled, TOLERANCE[dtype])
        assert_close("squares", out.hidden.double().square().sum(1), out.squares.sum(1), 1e-5)
        normed = F.rms_norm(out.hidden.double(), (width,), norm.double(), EPS)
        factor = (out.squares.double().sum(1, keepdim=True) / width + EPS).rsqrt()
        assert_close("norm", normed, out.scaled.double() * factor, TOLERANCE[dtype])
