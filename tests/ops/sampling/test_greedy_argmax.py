import pytest
import torch
from ops_helpers import DTYPES, needs_cuda
from specdec_kernels import ops
from specdec_kernels.launch_triton import counters
from specdec_kernels.sampling.argmax_triton import greedy_argmax_triton
from specdec_kernels.sampling.reference import to_probs
from torch import Tensor

ARGMAX = [
    pytest.param(ops.greedy_argmax.reference, id="reference"),
    pytest.param(greedy_argmax_triton, id="kernel"),
]


def logits_of(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(vocabulary)
    # Few distinct values, so most maxima occur several times.
    values = torch.randint(0, 50, (rows, vocabulary), generator=generator)
    return (values.float() / 8).to(device, dtype)


def first_maximum(logits: Tensor) -> Tensor:
    rows = logits.double().tolist()
    return torch.tensor([row.index(max(row)) for row in rows], device=logits.device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("argmax", ARGMAX)
@pytest.mark.parametrize("size", [(1, 1), (3, 50), (2, 4097), (5, 1000)], ids=str)
def test_first_maximum(size, argmax, dtype, device):
    logits = logits_of(*size, dtype, device)
    for _ in range(2):
        out = argmax(logits)
        assert out.dtype == torch.int64 and torch.equal(out, first_maximum(logits))
        assert not counters(device).any()


@pytest.mark.parametrize("argmax", ARGMAX)
def test_special_values(argmax, device):
    """A maximum that is not finite gives -1, as its row's one-hot distribution has NaNs."""
    logits = logits_of(8, 9000, torch.float32, device)
    logits[0, 8999] = float("nan")
    logits[1, 0] = float("nan")
    logits[1, 1] = float("inf")
    logits[2, 5000] = float("inf")
    logits[3] = float("-inf")
    logits[4] = float("-inf")
    logits[4, 4500] = -3e38
    logits[5] = -logits[5].abs() - 1
    logits[6] = float("nan")
    logits[7, 8999] = 3e38
    expected = first_maximum(logits)
    assert expected[[4, 7]].tolist() == [4500, 8999]
    expected[[0, 1, 2, 3, 6]] = -1
    assert torch.equal(argmax(logits), expected)
    assert torch.equal(expected < 0, to_probs(logits, 0.0, 0, 1.0).sum(1).isnan())


@pytest.mark.parametrize("argmax", ARGMAX)
def test_rows_may_lie_apart(argmax, device):
    logits = logits_of(4, 600, torch.float32, device)
    assert torch.equal(argmax(logits[::2, 100:]), first_maximum(logits[::2, 100:]))


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
def test_large(dtype, device):
    logits = torch.randn(48, 128256, device=device).to(dtype)
    logits[3, 128255] = float("nan")
    for _ in range(3):
        out = greedy_argmax_triton(logits)
        assert torch.equal(out, ops.greedy_argmax.reference(logits)) and out[3] == -1
