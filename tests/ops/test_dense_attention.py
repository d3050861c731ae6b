import pytest
import torch
from ops_helpers import TOLERANCE, assert_close, needs_cuda
from specdec_kernels.attention.dense_triton import TILES, DenseTiles, dense_attention
from torch import Tensor

SMALL = DenseTiles(32, 16, 4, 2)


def expected(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(group, 0) for x in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    older = k.shape[1] - q.shape[1]
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(older + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(2)
    return (weights @ v).transpose(0, 1)


def check(
    size: tuple[int, int, int, int, int],
    device: torch.device,
    dtype: torch.dtype,
    tiles: DenseTiles,
) -> None:
    """size: queries, context, heads, heads of keys, features."""
    queries, context, heads, kv_heads, dim = size
    generator = torch.Generator().manual_seed(sum(size))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    query = normal(queries, heads, dim)
    key, value = normal(context, kv_heads, dim), normal(context, kv_heads, dim)
    whole = torch.full((queries + 2, heads, dim), float("nan"), device=device).to(dtype)
    dense_attention(query, key, value, dim**-0.5, whole[1:-1], tiles)
    assert whole[0].isnan().all() and whole[-1].isnan().all()
    wanted = expected(query, key, value, dim**-0.5)
    assert_close("out", wanted, whole[1:-1], TOLERANCE[dtype])


SIZES = [
    *((1, 1, 1, 1, 16), (9, 9, 4, 2, 16), (16, 48, 8, 1, 32), (33, 70, 6, 2, 16)),
    *((5, 63, 3, 1, 64), (40, 40, 4, 4, 16)),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernel(device, size):
    check(size, device, torch.float16, SMALL)


@needs_cuda
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("queries", [511, 2047, 2048])
@pytest.mark.parametrize("older", [0, 1, 5853])
def test_real_sizes(device, queries, older, dim):
    check((queries, queries + older, 32, 8, dim), device, torch.bfloat16, TILES)
