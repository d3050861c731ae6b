from dataclasses import replace

import pytest
import torch
from ops_helpers import TOLERANCE, Problem, Shape, assert_close, make_problem, needs_cuda
from specdec_kernels import ops
from specdec_kernels.attention import chunks, decode_triton
from specdec_kernels.attention.call import AttentionCall, LayerCache
from specdec_kernels.attention.chunks import (
    BOUNDS,
    Bound,
    ChunkPlan,
    bound_of,
    plan_chunks,
)
from specdec_kernels.attention.chunks_triton import attend_chunks, gather_kv_triton, takes_chunks
from specdec_kernels.attention.dense_triton import DenseTiles, dense_attention_triton
from specdec_kernels.attention.paged_triton import paged_attention_triton
from specdec_kernels.attention.reference import dense_attention, gather_kv
from test_rope_attention import make_layer
from torch import Tensor

CPU = torch.device("cpu")
SMALL = Bound(4, 0)
TILES = DenseTiles(32, 16, 4, 2)
SHAPES = [
    Shape((9,), (9,), dk=64, dv=64),
    Shape((8,), (8,), heads=8, kv_heads=1, dk=128, dv=128),
    Shape((5,), (19,), heads=4, kv_heads=4, dk=64, dv=64, block_size=5),
    Shape((5,), (21,), dk=64, dv=64),
    Shape((11,), (70,), heads=8, kv_heads=1, dk=64, dv=64, block_size=16),
    Shape((6, 13, 7), (40, 13, 90), heads=8, kv_heads=2, dk=128, dv=128, block_size=3),
    Shape((1, 20, 3, 2, 6, 1), (9, 20, 33, 2, 38, 70), dk=64, dv=64, block_size=7),
]


def plan_of(shape: Shape, device: torch.device, bound: Bound | None = SMALL) -> ChunkPlan | None:
    return plan_chunks(list(shape.queries), list(shape.contexts), device, bound)


def run(problem: Problem, plan: ChunkPlan) -> Tensor:
    lengths = problem.block_tables, problem.context_lens
    return attend_chunks(problem.query, problem.cache, *lengths, plan, problem.call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_are_attention(shape, dtype):
    problem = make_problem(shape, dtype, CPU)
    out = run(problem, plan_of(shape, CPU))
    assert out.is_contiguous()
    expected = ops.paged_attention.reference(**vars(problem.double()))
    assert_close("out", expected, out, TOLERANCE[dtype])


def test_only_chunks_over_the_bound_are_planned():
    bound = Bound(100, 50_000)
    assert plan_chunks([99, 400, 100], [9000, 110, 499], CPU, bound) is None
    assert plan_chunks([99, 400, 100], [9000, 110, 499], CPU, None) is None
    assert plan_chunks([400], [chunks.LONGEST + 1], CPU, bound) is None
    assert plan_chunks([400], [chunks.LONGEST], CPU, bound) is not None
    plan = plan_chunks([7, 5, 100, 300, 2], [7, 50, 500, 300, 900], CPU, bound)
    assert [c.sequence for c in plan.chunks] == [2, 3] and plan.longest == 500
    assert [c.tokens for c in plan.chunks] == [slice(12, 112), slice(112, 412)]
    first, last = plan.runs
    assert (first.sequences, first.tokens, first.max_query_len) == (slice(0, 2), slice(0, 12), 7)
    assert first.query_start.tolist() == [0, 7, 12]
    assert (last.sequences, last.tokens, last.max_query_len) == (slice(4, 5), slice(412, 414), 2)
    assert last.query_start.tolist() == [0, 2] and last.query_start.dtype == torch.int32
    assert bound_of(CPU) is None
    assert all(bound.queries >= 128 for bound in BOUNDS.values())


def cache_of(dim: int) -> LayerCache:
    return LayerCache(*torch.zeros(2, 4, 8, 2, dim, dtype=torch.bfloat16))


def test_layers_that_need_more_than_a_causal_mask_are_left_alone():
    plan = plan_of(SHAPES[3], CPU)
    cache = cache_of(64)
    plain, kind = AttentionCall(1.0), torch.bfloat16
    assert takes_chunks(plan, cache, plain, kind)
    assert takes_chunks(plan, cache, plain._replace(sliding_window=21), kind)
    assert not takes_chunks(plan, cache, plain._replace(sliding_window=20), kind)
    assert not takes_chunks(plan, cache, plain._replace(softcap=30.0), kind)
    assert not takes_chunks(plan, cache, plain._replace(sinks=torch.zeros(4)), kind)
    assert not takes_chunks(None, cache, plain, kind)
    assert not takes_chunks(plan, cache, plain, torch.float32)
    for dim in (80, 256):
        other = cache_of(dim)
        assert not takes_chunks(plan, other, plain, kind)
        assert not takes_chunks(plan, cache._replace(values=other.values), plain, kind)


@pytest.mark.parametrize("norms", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_layer_s_attention_with_chunks(device, norms, monkeypatch):
    shape = replace(SHAPES[6], queries=(70, 20, 3, 2, 6, 1), contexts=(79, 20, 33, 2, 38, 70))
    layer = make_layer(shape, torch.float16, device, norms)
    calls = []

    def counted(*arguments: object) -> Tensor:
        calls.append(arguments)
        return attend_chunks(*arguments)

    monkeypatch.setattr(decode_triton, "attend_chunks", counted)
    out = layer.run(chunks=plan_of(shape, device))
    assert len(calls) == 1
    assert_close("out", layer.expected, out, TOLERANCE[torch.float16])
    capped = layer.arguments["call"]._replace(softcap=30.0)
    layer.run(chunks=plan_of(shape, device), call=capped)
    assert len(calls) == 1


@pytest.mark.parametrize(
    "shape",
    [
        Shape((5,), (61,), heads=3, kv_heads=3, dk=64, dv=64, block_size=7),
        Shape((2, 1), (8, 48), kv_heads=2, dk=16, dv=16, block_size=16),
    ],
    ids=str,
)
def test_gathering_keys_and_values(device, shape):
    problem = make_problem(shape, torch.float16, device)
    row = len(shape.contexts) - 1
    arguments = problem.cache, problem.block_tables[row], shape.contexts[row], torch.float16
    found = gather_kv_triton(*arguments)
    for actual, wanted in zip(found, gather_kv.reference(*arguments), strict=True):
        assert torch.equal(actual, wanted) and actual.is_contiguous()


# Queries, context, heads, heads of keys, features.
SIZES = [
    *((1, 1, 1, 1, 16), (9, 9, 4, 2, 16), (16, 48, 8, 1, 32), (33, 70, 6, 2, 16)),
    *((5, 63, 3, 1, 64), (40, 40, 4, 4, 16)),
]


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_dense_attention(device, size):
    queries, context, heads, kv_heads, dim = size
    generator = torch.Generator().manual_seed(sum(size))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device).half()

    query = normal(queries, heads, dim)
    kv = normal(context, kv_heads, dim), normal(context, kv_heads, dim)
    whole = torch.full((queries + 2, heads, dim), float("nan"), device=device).half()
    wanted = torch.zeros_like(query)
    dense_attention_triton(query, *kv, dim**-0.5, whole[1:-1], TILES)
    dense_attention.reference(query, *kv, dim**-0.5, wanted)
    assert whole[0].isnan().all() and whole[-1].isnan().all()
    assert_close("out", wanted, whole[1:-1], TOLERANCE[torch.float16])


@needs_cuda
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("queries", [(2047,), (2048,), (1, 1536, 511), (1200, 1800)], ids=str)
@pytest.mark.parametrize("older", [0, 1, 2048, 5853])
def test_chunks_give_what_paged_attention_gives(device, queries, older, dim):
    contexts = tuple(q + older for q in queries)
    shape = Shape(queries, contexts, heads=32, kv_heads=8, dk=dim, dv=dim, block_size=16)
    problem = make_problem(shape, torch.bfloat16, device)
    plan = plan_of(shape, device, Bound(1024, 0))
    assert plan is not None and len(plan.chunks) == sum(q >= 1024 for q in queries)
    assert_close("out", paged_attention_triton(**vars(problem)), run(problem, plan), 6e-3)
