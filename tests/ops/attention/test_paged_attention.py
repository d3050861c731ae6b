from dataclasses import replace

import pytest
import torch
from ops_helpers import (
    DTYPES,
    TOLERANCE,
    Problem,
    Shape,
    assert_close,
    expected_of,
    make_problem,
    needs_cuda,
)
from specdec_kernels.attention.call import LayerCache
from specdec_kernels.attention.cpu import View, gather_attention, gather_plan
from specdec_kernels.attention.paged_triton import paged_attention_triton
from specdec_kernels.attention.tiles import paged_splits
from torch import Tensor

SHAPES = [
    Shape((1,), (1,), heads=1, kv_heads=1),
    Shape((1, 1, 1), (9, 33, 70), block_size=4),
    Shape((5, 3, 4), (21, 40, 4), dk=64, dv=64, block_size=16),
    Shape((2, 1, 0, 6), (70, 1, 5, 6), heads=6, kv_heads=2, dk=80, dv=80, block_size=5),
    Shape((1, 2), (30, 11), heads=7, kv_heads=1, dk=96, dv=32, block_size=1),
    Shape((3,), (140,), heads=2, kv_heads=2, dk=256, dv=128, block_size=64),
    Shape((37,), (37,), dk=32, dv=32, block_size=16),
    Shape((20, 1, 17), (20, 90, 50), heads=3, kv_heads=3, dk=24, dv=40, block_size=7),
    Shape((1, 3), (80, 33), window=9),
    Shape((19, 2), (60, 70), window=16, block_size=4),
    Shape((1, 4), (40, 8), softcap=2.0),
    Shape((18, 1), (30, 67), softcap=1.5, window=12),
    Shape((1, 3), (70, 5), sinks=True),
    Shape((17, 2), (17, 33), sinks=True, window=7, heads=8, kv_heads=2),
    Shape((2, 1), (12, 7), padding=3),
    Shape((18,), (25,), padding=2),
    Shape((1, 5), (40, 8), padding=150),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(shape, dtype, device):
    problem = make_problem(shape, dtype, device)
    out = paged_attention_triton(**vars(problem))
    assert out.dtype == dtype and out.is_contiguous()
    assert_close("out", expected_of(problem), out, TOLERANCE[dtype])


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize(
    "shape",
    [
        Shape((1, 4), (150, 3)),
        Shape((2, 1), (70, 140), window=20),
        Shape((3, 1), (100, 1), sinks=True, softcap=3.0, padding=1),
        Shape((20,), (80,)),
    ],
    ids=str,
)
def test_splits_do_not_change_the_result(shape, splits, device):
    problem = make_problem(shape, torch.float32, device)
    out = paged_attention_triton(**vars(problem), splits=splits)
    assert_close(f"out with {splits} splits", expected_of(problem), out, 1e-5)


def test_max_query_len_may_be_larger_than_any(device):
    problem = make_problem(Shape((2, 3), (20, 9)), torch.float32, device)
    out = paged_attention_triton(**vars(replace(problem, max_query_len=40)))
    assert_close("out", expected_of(problem), out, 1e-5)


@pytest.mark.parametrize("lens", [(40, 1, 0, 17, 32), (1, 1, 1, 1, 90), (0, 0, 33, 0)], ids=str)
def test_tiles_by_packed_token(lens, device):
    """A pass that may be one long sequence holds several short ones, and rows without any."""
    contexts = tuple(n + 30 if n else 0 for n in lens)
    problem = make_problem(Shape(lens, contexts, padding=7), torch.float32, device)
    wide = replace(problem, max_query_len=len(problem.query))
    assert_close("out", expected_of(problem), paged_attention_triton(**vars(wide)), 1e-5)


def test_query_may_be_a_transposed_view(device):
    problem = make_problem(Shape((2, 3), (20, 9)), torch.float32, device)
    view = problem.query.transpose(0, 1).contiguous().transpose(0, 1)
    out = paged_attention_triton(**vars(replace(problem, query=view)))
    assert_close("out", expected_of(problem), out, 1e-5)


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("shape", [Shape((4, 3), (31, 70)), Shape((20,), (25,))], ids=str)
def test_padding_that_was_never_written_leaves_its_neighbours_alone(shape, splits, device):
    """A padded pass counts its padding as context and writes its keys and values elsewhere."""
    problem = make_problem(shape, torch.float32, device)
    want = expected_of(problem)
    block_size = problem.cache.keys.shape[1]
    ends = problem.query_start[1:].tolist()
    for row, context in enumerate(problem.context_lens.tolist()):
        for position in (context - 2, context - 1):
            block = problem.block_tables[row, position // block_size]
            for cache in problem.cache[:2]:
                cache[block, position % block_size] = torch.nan
    out = paged_attention_triton(**vars(problem), splits=splits)
    live = [place for place in range(ends[-1]) if place + 1 not in ends and place + 2 not in ends]
    assert_close("out", want[live], out[live], 1e-5)


def test_sequence_without_context_gives_zeros(device):
    problem = make_problem(Shape((1, 1), (20, 9)), torch.float32, device)
    context_lens = torch.tensor([20, 0], dtype=torch.int32, device=device)
    for splits in (1, 4):
        arguments = vars(replace(problem, context_lens=context_lens))
        out = paged_attention_triton(**arguments, splits=splits)
        assert_close("out", expected_of(problem)[:1], out[:1], 1e-5)
        assert not out[1].any()


def test_number_of_splits_fills_the_device():
    assert paged_splits(programs=8, max_context=4096, block_n=64) == 32
    assert paged_splits(programs=8, max_context=300, block_n=64) == 4
    assert paged_splits(programs=100, max_context=4096, block_n=64) == 2
    assert paged_splits(programs=1000, max_context=4096, block_n=64) == 1
    assert paged_splits(programs=1, max_context=10, block_n=64) == 1


def gathered(problem: Problem) -> Tensor:
    p = problem
    plan = gather_plan(p.block_tables, p.query_start, p.context_lens, p.cache.keys.shape[1])
    return gather_attention(p.query, p.cache, plan, p.call)


# Softcap and sinks are computed in fp32, so fp64 would show no more there.
GATHER_CASES = [
    (shape, dtype)
    for shape in SHAPES
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
    if dtype != torch.float64 or not (shape.softcap or shape.sinks)
]


@pytest.mark.parametrize(("shape", "dtype"), GATHER_CASES, ids=str)
def test_gather(shape, dtype):
    problem = make_problem(shape, dtype, torch.device("cpu"))
    out = gathered(problem)
    assert out.dtype == dtype and out.is_contiguous()
    assert_close("out", expected_of(problem), out, TOLERANCE[dtype])


@pytest.mark.parametrize("window", [0, 1, 7, 40])
@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (5, 33), (5, 5), (20, 64), (40, 40)], ids=str)
def test_a_sequence_in_one_piece_of_the_cache(shape, window):
    """Its keys need no gathering; other blocks hold NaN."""
    queries, context = shape
    problem = make_problem(
        Shape((queries,), (context,), window=window), torch.float64, torch.device("cpu")
    )
    used = problem.block_tables[0, : -(-context // 8)].long()
    run = torch.arange(1, 1 + len(used))
    caches = []
    for cache in problem.cache[:2]:
        laid = torch.full_like(cache[:1], torch.nan).repeat(len(used) + 2, 1, 1, 1)
        laid[run] = cache[used]
        caches.append(laid)
    tables = run.to(torch.int32)[None]
    moved = replace(problem, cache=LayerCache(*caches), block_tables=tables)
    plan = gather_plan(tables, problem.query_start, problem.context_lens, 8)
    assert all(isinstance(part.slots, slice) for part in plan.parts(View(window)))
    assert_close("out", expected_of(problem), gathered(moved), 1e-12)


@pytest.mark.parametrize(
    ("contexts", "window", "counts"),
    [
        ((300, 20, 25, 900, 18), 0, [1, 2, 1, 1]),
        ((300, 20, 25, 900, 18), 50, [5]),
        ((900,) * 6, 0, [4, 2]),  # 4096 keys at most
    ],
    ids=str,
)
def test_contexts_of_unlike_lengths_are_attended_apart(contexts, window, counts):
    """Padded to the longest of all, they would read many times their keys."""
    lens = (1, 3, 2, 1, 1, 2)[: len(contexts)]
    problem = make_problem(Shape(lens, contexts, window=window), torch.float64, torch.device("cpu"))
    p = problem
    plan = gather_plan(p.block_tables, p.query_start, p.context_lens, p.cache.keys.shape[1])
    assert [part.num_sequences for part in plan.parts(View(window))] == counts
    out = gather_attention(p.query, p.cache, plan, p.call)
    assert_close("out", expected_of(problem), out, 1e-12)


def test_one_plan_serves_layers_of_several_kinds():
    problem = make_problem(Shape((2, 1), (40, 33)), torch.float32, torch.device("cpu"))
    p = problem
    plan = gather_plan(p.block_tables, p.query_start, p.context_lens, p.cache.keys.shape[1])
    for window, heads in [(0, 4), (7, 4), (0, 2), (7, 4)]:
        call = p.call._replace(sliding_window=window)
        layer = replace(problem, call=call, query=p.query[:, :heads])
        out = gather_attention(layer.query, p.cache, plan, call)
        assert_close(f"window {window}, {heads} heads", expected_of(layer), out, 1e-5)


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        Shape((1,), (4096,), 32, 8, 128, 128, 16),
        Shape((6, 6), (4096, 2801), 32, 8, 128, 128, 16),
        Shape((6, 1), (4096, 77), 8, 4, 256, 256, 16, window=1024, softcap=50.0),
        Shape((160, 1), (1200, 4096), 8, 2, 128, 128, 16),
        Shape((130,), (130,), 8, 4, 256, 256, 32),
        Shape((3, 3), (4000, 500), 16, 2, 64, 64, 64, window=128, sinks=True),
        Shape((3,), (2000,), 16, 1, 192, 128, 16),
    ],
    ids=str,
)
def test_large(shape, dtype, device):
    problem = make_problem(shape, dtype, device)
    out = paged_attention_triton(**vars(problem))
    assert_close("out", expected_of(problem), out, TOLERANCE[dtype])


@needs_cuda
def test_cache_past_two_to_the_31_elements(device):
    problem = make_problem(Shape((2,), (40,), 2, 1, 128, 128, 16), torch.bfloat16, device)
    blocks = 2**31 // (16 * 128) + 9
    far = torch.full((blocks, 16, 1, 128), float("nan"), dtype=torch.bfloat16, device=device)
    used = problem.block_tables[0, :3].long()
    moved = torch.arange(blocks - 3, blocks, device=device)
    caches = []
    for cache in problem.cache[:2]:
        pool = far.clone()
        pool[moved] = cache[used]
        caches.append(pool)
    tables = problem.block_tables.clone()
    tables[0, :3] = moved.int()
    out = paged_attention_triton(
        **vars(replace(problem, cache=LayerCache(*caches), block_tables=tables))
    )
    assert_close("out", expected_of(problem), out, 1e-2)
