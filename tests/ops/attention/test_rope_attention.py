from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
import triton
import triton.language as tl
from ops_helpers import (
    DTYPES,
    TOLERANCE,
    Shape,
    assert_close,
    in_fp8,
    make_problem,
    needs_cuda,
    paged_attention_reference,
    rounded,
    with_meaning,
)
from specdec_kernels import ops
from specdec_kernels.attention.call import LayerCache
from specdec_kernels.attention.decode_triton import rope_attention_triton
from specdec_kernels.attention.reference import Rotation, split_heads_reference
from specdec_kernels.attention.split_triton import part_of
from specdec_kernels.attention.tiles import choose_cut, num_splits
from specdec_kernels.launch_triton import epochs
from torch import Tensor

EPS = 1e-6


@dataclass(frozen=True)
class Layer:
    """Arguments of `ops.rope_attention`, by name, and the expected results."""

    arguments: dict[str, object]
    compared: Tensor
    """bool [T], as from `with_meaning`."""
    expected: Tensor
    expected_cache: LayerCache
    query: Tensor
    """[T, H, D] fp64, rotated."""

    def run(self, **overrides: object) -> Tensor:
        """Run on fresh copies of the caches, and check these too; returns the result."""
        given = self.arguments["cache"]
        cache = given._replace(keys=given.keys.clone(), values=given.values.clone())
        out = rope_attention_triton(**{**self.arguments, "cache": cache, **overrides})
        for name in ("keys", "values"):
            expected = getattr(self.expected_cache, name)[1:].double()
            actual = getattr(cache, name)[1:].double()
            assert torch.equal(actual.isnan(), expected.isnan()), f"{name}: other slots than ours"
            tolerance = TOLERANCE[self.arguments["qkv"].dtype]
            assert_close(name, expected.nan_to_num(), actual.nan_to_num(), tolerance)
        return out


def make_layer(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    norms: bool = False,
    fp8: bool = False,
) -> Layer:
    """A problem with NaN in the slots of new tokens; padding tokens write to the trash block."""
    problem = make_problem(shape, dtype, device)
    generator = torch.Generator().manual_seed(sum(shape.contexts) + shape.dk)
    heads, dim = shape.heads + 2 * shape.kv_heads, shape.dk
    tokens = sum(shape.queries) + shape.padding

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device, dtype)

    slots = problem.slots
    positions = torch.zeros(tokens)
    done = 0
    for queries, context in zip(shape.queries, shape.contexts, strict=True):
        positions[done : done + queries] = torch.arange(context - queries, context).float()
        done += queries
    for cache in problem.cache[:2]:
        cache.view(-1, *cache.shape[2:])[slots] = float("nan")
    if fp8:
        problem = replace(problem, cache=in_fp8(problem.cache))
    angles = positions[:, None] * 100 ** -(torch.arange(dim // 2) * 2 / dim)
    angles = torch.cat([angles, angles], 1).to(device)
    qkv = normal(tokens, heads * dim)
    query_norm, key_norm = (normal(dim), normal(dim)) if norms else (None, None)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    wide = problem.double()
    doubled = [None if t is None else t.double() for t in (query_norm, key_norm)]
    query, key, value = split_heads_reference(
        qkv.double(),
        Rotation.of(cos.double(), sin.double()),
        shape.kv_heads,
        dim,
        *doubled,
        EPS,
    )
    if problem.cache.scales is not None:
        key, value = map(rounded, (key, value), problem.cache.scales)
    ops.write_kv.reference(key, value, wide.cache, slots)
    expected = paged_attention_reference(
        query,
        wide.cache,
        wide.block_tables,
        wide.query_start,
        wide.context_lens,
        wide.call,
        slots,
    )
    arguments = {**vars(problem), "qkv": qkv, "cos": cos, "sin": sin, "eps": EPS}
    arguments |= {"query_norm": query_norm, "key_norm": key_norm}
    del arguments["query"]
    expected = expected.view(tokens, -1)
    return Layer(arguments, with_meaning(problem), expected, wide.cache, query)


SHAPES = [
    Shape((1,), (1,), heads=1, kv_heads=1),
    Shape((1, 1, 1), (9, 33, 70), block_size=4),
    Shape((5, 3, 4), (21, 40, 4), dk=64, dv=64, block_size=16),
    Shape((2, 1, 0, 6), (70, 1, 5, 6), heads=6, kv_heads=2, dk=80, dv=80, block_size=5),
    Shape((1, 2), (300, 11), heads=7, kv_heads=1, dk=96, dv=96, block_size=1),
    Shape((3,), (140,), heads=2, kv_heads=2, dk=256, dv=256, block_size=64),
    Shape((1, 3), (80, 33), window=9),
    Shape((6, 2), (160, 70), window=3, block_size=4),
    Shape((2, 1), (60, 33), window=11, block_size=5),
    Shape((1, 4), (40, 8), softcap=2.0),
    Shape((1, 3), (70, 5), sinks=True),
    Shape((1, 2), (170, 33), sinks=True, softcap=1.5, window=140, heads=16, kv_heads=1),
    Shape((2, 1), (12, 7), padding=3),
    # Too many rows for one tile, so rotation and attention are separate kernels.
    Shape((37,), (37,), heads=8, kv_heads=1, dk=32, dv=32, block_size=16),
    Shape((40, 1, 17), (40, 90, 50), heads=6, kv_heads=1, dk=24, dv=24, block_size=7, padding=2),
]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape, norms, dtype, device):
    layer = make_layer(shape, dtype, device, norms)
    out = layer.run()
    assert out.dtype == dtype and out.is_contiguous()
    assert_close("out", layer.expected, out, TOLERANCE[dtype])


@pytest.mark.each_value
@pytest.mark.parametrize(
    "splits", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 8)), 33]
)
@pytest.mark.parametrize(
    "shape",
    [
        Shape((1, 4), (150, 4)),
        Shape((2, 1), (70, 140), window=40),
        Shape((3, 1), (300, 131), heads=6, kv_heads=2, dk=24, dv=24),
        Shape((3, 1), (100, 1), sinks=True, softcap=3.0, padding=1),
    ],
    ids=str,
)
def test_splits_do_not_change_the_result(shape, splits, device):
    layer = make_layer(shape, torch.float32, device)
    for alone in (0, 80):
        out = layer.run(splits=splits, alone=alone, min_keys=16, block_n=16)
        assert_close(f"out with {splits} splits", layer.expected, out, 1e-5)
        arrived, before = epochs(device).unbind(1)
        assert torch.equal(arrived, before)


def test_sequence_without_context_stays_finite(device):
    layer = make_layer(Shape((1, 2), (20, 9)), torch.float32, device)
    context_lens = torch.tensor([20, 0], dtype=torch.int32, device=device)
    out = layer.run(context_lens=context_lens)
    assert_close("out", layer.expected[:1], out[:1], 1e-5)
    assert out.isfinite().all()


@pytest.mark.parametrize("splits", [1, 2])
def test_queries_before_the_first_token_are_padding(splits, device):
    """A prompt of one token is fed as two tokens, of which the first is padding."""
    layer = make_layer(Shape((1, 2), (1, 2), sinks=True), torch.float32, device)
    order = torch.tensor([0, 0, 0, 0, 1, 2], device=device)  # three padding tokens in all
    given = {name: layer.arguments[name][order] for name in ("qkv", "cos", "sin", "slots")}
    padding = torch.tensor([True, True, False, True, False, False], device=device)
    given["qkv"][padding] = 3.0
    given["slots"][padding] = 1  # in the trash block
    query_start = torch.tensor([0, 3, 6], dtype=torch.int32, device=device)
    out = layer.run(**given, query_start=query_start, max_query_len=3, splits=splits)
    assert_close("out", layer.expected, out[~padding], 1e-5)
    assert out.isfinite().all()


def test_wide_tables_and_strided_rows(device):
    layer = make_layer(Shape((2, 3), (20, 9)), torch.float32, device)
    table = layer.arguments["block_tables"]
    wide = torch.full((2, 9000), 2**30, dtype=torch.int32, device=device)
    wide[:, : table.shape[1]] = table
    qkv = layer.arguments["qkv"]
    apart = torch.full((5, 2 * qkv.shape[1]), float("nan"), device=device)
    apart[:, : qkv.shape[1]] = qkv
    out = layer.run(block_tables=wide, qkv=apart[:, : qkv.shape[1]], max_query_len=7)
    assert_close("out", layer.expected, out, 1e-5)


@triton.jit
def parts_kernel(out_ptr, keys, alone, min_keys, CUT: tl.constexpr):
    part = tl.program_id(0)
    parts, first, high = part_of(keys, part, alone, min_keys, 16, CUT)
    tl.store(out_ptr + 3 * part, parts)
    tl.store(out_ptr + 3 * part + 1, first)
    tl.store(out_ptr + 3 * part + 2, high)


@pytest.mark.parametrize("splits", [3, 4, 33])
def test_parts_are_few_even_and_whole(splits, device):
    tile = 128
    cut = choose_cut(1, 4, 2, 64, 2, 1, 4096, splits=splits, block_n=tile)
    for keys in (0, 1, 128, 129, 299, 383, 384, 1000, 4095, 4096, 4224, 16383):
        found = torch.full((splits, 3), -1, dtype=torch.int32, device=device)
        parts_kernel[(splits,)](found, keys, 128, 128, CUT=cut)
        number = int(found[0, 0])
        assert (found[:, 0] == number).all() and 1 <= number <= splits
        bounds = found[:number, 1:].tolist()
        assert bounds[0][0] == 0 and bounds[-1][1] == keys
        assert all(end == begin for (_, end), (begin, _) in pairwise(bounds))
        assert all(begin < end for begin, end in bounds[1:])
        least = max(1, -(-keys // (splits * tile)))
        assert max(-(-(end - begin) // tile) for begin, end in bounds) <= least, "a tile too many"
        if keys <= 128:
            assert number == 1


def test_number_of_splits_fills_the_device_once():
    assert num_splits(programs=8, max_context=2**17, at_once=264) == 33
    assert num_splits(programs=8, max_context=2**17, at_once=132) == 16
    assert num_splits(programs=8, max_context=300, at_once=264) == 4
    assert num_splits(programs=64, max_context=4096, at_once=264) == 4
    assert num_splits(programs=100, max_context=4096, at_once=264) == 1
    assert num_splits(programs=500, max_context=4096, at_once=264) == 1


@pytest.mark.parametrize("shape", SHAPES[:6], ids=str)
def test_reference(shape):
    layer = make_layer(shape, torch.float64, torch.device("cpu"), norms=True)
    out = ops.rope_attention.reference(**layer.arguments)
    assert_close("out", layer.expected, out, 1e-12)


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        Shape((1,), (4096,), 32, 8, 128, 128, 16),
        Shape((6, 6), (4096, 2801), 32, 8, 128, 128, 16),
        Shape((6, 1) * 16, (700, 77) * 16, 32, 8, 64, 64, 16),
        Shape((6, 1), (4096, 77), 8, 4, 256, 256, 16, window=1024, softcap=50.0),
        Shape((3, 3), (4000, 500), 16, 2, 64, 64, 64, window=128, sinks=True),
        Shape((8,), (2000,), 16, 1, 192, 192, 16),
        Shape((9,), (2000,), 16, 1, 128, 128, 16),
    ],
    ids=str,
)
def test_large(shape, dtype, device):
    layer = make_layer(shape, dtype, device)
    for _ in range(3):
        assert_close("out", layer.expected, layer.run(), TOLERANCE[dtype])
