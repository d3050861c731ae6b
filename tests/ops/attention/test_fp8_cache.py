"""Caches in fp8: every op that writes or reads one, with scales of every order."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from ops_helpers import (
    DTYPES,
    TOLERANCE,
    Shape,
    assert_close,
    in_fp8,
    make_problem,
    paged_attention_reference,
    plain,
    rounded,
)
from specdec_kernels import ops
from specdec_kernels.attention.cache_triton import write_kv_triton
from specdec_kernels.attention.call import FP8, LayerCache
from specdec_kernels.attention.chunks import Bound, plan_chunks
from specdec_kernels.attention.chunks_triton import attend_chunks, gather_kv_triton
from specdec_kernels.attention.decode_triton import rope_attention_triton
from specdec_kernels.attention.paged_triton import paged_attention_triton
from specdec_kernels.attention.reference import gather_kv
from test_paged_attention import expected_of
from test_rope_attention import Layer, make_layer
from torch import Tensor

CPU = torch.device("cpu")
LAYERS = [
    Shape((1, 1, 1), (9, 33, 70), block_size=4),
    Shape((2, 1, 0, 6), (70, 1, 5, 6), heads=6, kv_heads=2, dk=80, dv=80, block_size=5),
    Shape((1, 4), (170, 33), sinks=True, softcap=1.5, window=140, heads=8, kv_heads=2),
    Shape((5, 3), (40, 9), window=4, causal=False, dead=(0, 1)),
    Shape((40, 1, 17), (40, 90, 50), heads=6, kv_heads=2, dk=24, dv=24, block_size=7, padding=2),
    # Too many rows for one tile, so rotation and attention are separate kernels.
    Shape((44, 1, 17), (44, 90, 50), heads=6, kv_heads=2, dk=24, dv=24, block_size=7, padding=2),
]


def check(layer: Layer, attention: Callable[..., Tensor], **overrides: object) -> None:
    """Check the cache's contents after a call, and the result of attention over them.

    A number that lies nearly between two codes may have become the other one.
    """
    given, dtype = layer.arguments["cache"], layer.arguments["qkv"].dtype
    cache = given._replace(keys=given.keys.clone(), values=given.values.clone())
    out = attention(**{**layer.arguments, "cache": cache, **overrides})
    held = plain(cache)
    for actual, expected in zip(held[:2], layer.expected_cache[:2], strict=True):
        actual, expected = actual[1:], expected[1:]
        assert torch.equal(actual.isnan(), expected.isnan()), "other slots than ours"
        error = (actual - expected).nan_to_num().abs()
        least = 2**-9 * given.scales.max()  # a step near 0
        assert (error <= expected.nan_to_num().abs() / 8 + least).all()
        others = (error > 0) & expected.isfinite()
        assert others.double().mean() < (1e-3 if dtype == torch.float32 else 0.1)
    where = (layer.arguments[n] for n in ("block_tables", "query_start", "context_lens"))
    call, slots = layer.arguments["call"], layer.arguments["slots"]
    expected = paged_attention_reference(layer.query, held, *where, call, slots).flatten(1)
    assert_close("out", expected[layer.compared], out[layer.compared], TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_layer(shape, dtype, device):
    """New keys and values count as the cache holds them, so texts do not depend on k."""
    layer = make_layer(shape, dtype, device, norms=dtype == torch.float32, fp8=True)
    check(layer, rope_attention_triton)
    more = {"max_query_len": sum(shape.queries)}
    check(layer, rope_attention_triton, **more, splits=3, min_keys=16, alone=0)


@pytest.mark.parametrize("shape", [LAYERS[1], LAYERS[4]], ids=str)
def test_layer_on_a_cpu(shape):
    layer = make_layer(shape, torch.float32, CPU, norms=True, fp8=True)
    check(layer, ops.rope_attention.reference)


PAGED = [
    Shape((1, 2), (30, 11), heads=7, kv_heads=1, dk=96, dv=32, block_size=1),
    Shape((20, 1, 17), (20, 90, 50), heads=3, kv_heads=3, dk=24, dv=40, block_size=7),
    Shape((1, 4), (150, 8), softcap=2.0, sinks=True, window=90, padding=3),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", PAGED, ids=str)
def test_paged(shape, dtype, device):
    problem = make_problem(shape, dtype, device)
    problem = replace(problem, cache=in_fp8(problem.cache))
    expected = expected_of(problem)
    for splits in (1, 4):
        out = paged_attention_triton(**vars(problem), splits=splits)
        assert out.dtype == dtype
        assert_close("out", expected, out, TOLERANCE[dtype])
    out = ops.paged_attention.reference(**vars(problem))
    assert_close("reference", expected, out, TOLERANCE[dtype])


def test_sequence_in_one_piece_of_the_cache():
    """Its keys need no gathering."""
    problem = make_problem(Shape((3,), (21,), kv_heads=2), torch.float32, CPU)
    used = problem.block_tables[0, :3].long()
    keys, values = (pool[torch.tensor([0, *used])] for pool in problem.cache[:2])
    tables = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    moved = replace(problem, cache=in_fp8(LayerCache(keys, values)), block_tables=tables)
    out = ops.paged_attention.reference(**vars(moved))
    assert_close("out", expected_of(moved), out, 1e-5)


def test_long_chunks(device):
    shape = Shape((6, 13, 7), (40, 13, 90), heads=8, kv_heads=2, dk=64, dv=64, block_size=3)
    problem = make_problem(shape, torch.float16, device)
    problem = replace(problem, cache=in_fp8(problem.cache))
    row = problem.cache, problem.block_tables[2], 90, torch.float16
    for wanted, found in zip(gather_kv.reference(*row), gather_kv_triton(*row), strict=True):
        assert found.dtype == torch.float16 and torch.equal(wanted, found)
    kept = plain(problem.cache).keys[problem.block_tables[2, 4].long(), 1]
    assert_close("keys", kept, gather_kv.reference(*row)[0][13], 1e-3)
    plan = plan_chunks([6, 13, 7], [40, 13, 90], CPU, Bound(4, 0))
    where = problem.block_tables.cpu(), problem.context_lens.cpu(), plan, problem.call
    cache = LayerCache(*(tensor.cpu() for tensor in problem.cache))
    out = attend_chunks(problem.query.cpu(), cache, *where)
    assert_close("out", expected_of(problem).cpu(), out, TOLERANCE[torch.float16])


def coded_by(write: str, key: Tensor, value: Tensor, cache: LayerCache) -> None:
    """Write key and value [T, Hkv, D] into the slots from the second block on."""
    slots = torch.arange(len(key), device=key.device) + cache.keys.shape[1]
    if write == "write_kv":
        ops.write_kv.reference(key, value, cache, slots)
    elif write == "write_kv_triton":
        write_kv_triton(key, value, cache, slots)
    else:
        op = ops.write_kv_turned
        run = op.on_cuda if write == "write_kv_turned_triton" else op.reference
        one = torch.ones(len(key), key.shape[2], device=key.device)
        kv = torch.cat([key.flatten(1), value.flatten(1)], 1)
        run(kv, one, torch.zeros_like(one), cache, slots)


@pytest.mark.parametrize(
    "write", ["write_kv", "write_kv_triton", "write_kv_turned", "write_kv_turned_triton"]
)
def test_written_numbers(write, device):
    """Every order of magnitude, ties, numbers beyond the range, which are clamped, and NaN."""
    tokens, heads, dim = 5, 3, 24
    scales = torch.tensor([[0.01, 1.0, 0.37], [3.0, 0.25, 1.0]], device=device)
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(2, tokens, heads, dim, generator=generator)
    parts *= 10 ** (torch.rand(parts.shape, generator=generator) * 9 - 5)
    parts[:, 0, :, :4] = torch.tensor([1e30, -1e30, 3e38, -500.0])
    parts[:, 1, :, :3] = torch.tensor([1.0625, 1.1875, -448.0])  # ties where the scale is 1
    parts[:, 2, 1, 5::12] = float("nan")  # both halves of a head, which rotation mixes
    parts = parts.to(device)
    pools = [torch.full((4, 4, heads, dim), 7.0, device=device).to(FP8) for _ in range(2)]
    cache = LayerCache(*pools, scales)
    coded_by(write, *parts, cache)
    for kept, part, scale in zip(plain(cache)[:2], parts, scales, strict=True):
        kept, wanted = kept.flatten(0, 1), rounded(part.float(), scale)
        assert torch.equal(kept[4:9].nan_to_num(7e9), wanted.nan_to_num(7e9))
        assert kept[4, 1, 2] == 448 * scale[1] and kept[4, 1, 1] == -448 * scale[1]
        untouched = torch.cat([kept[:4], kept[9:]]) / scale.double()[:, None]
        assert (untouched - 7).abs().max() < 1e-6


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache._replace(scales=None),
        lambda cache: cache._replace(scales=cache.scales[:, :1]),
        lambda cache: cache._replace(scales=cache.scales.half()),
        lambda cache: cache._replace(keys=cache.keys.float(), values=cache.values.float()),
        lambda cache: cache._replace(values=cache.values.float()),
    ],
)
def test_caches_that_are_not_sound(change):
    cache = LayerCache(*torch.zeros(2, 3, 4, 2, 8).to(FP8), torch.ones(2, 2))
    assert cache.is_sound and not change(cache).is_sound
