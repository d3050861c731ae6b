from dataclasses import replace
from functools import partial

import pytest
import torch
from ops_helpers import TOLERANCE, Problem, Shape, assert_close, make_problem, needs_cuda
from specdec_kernels import ops
from specdec_kernels.attention import chunks, decode_triton
from specdec_kernels.attention.chunks import (
    BOUNDS,
    Bound,
    ChunkPlan,
    attend_chunks,
    bound_of,
    gather_kv,
    merge_parts,
    plan_chunks,
    room_for_queries,
    takes_chunks,
)
from specdec_kernels.attention.chunks_triton import gather_kv_triton, merge_parts_triton
from specdec_kernels.attention.paged_triton import paged_attention_triton
from test_rope_attention import make_layer
from torch import Tensor

CPU = torch.device("cpu")
SMALL = Bound(4, 0)
SHAPES = [
    Shape((9,), (9,), dk=64, dv=64),
    Shape((8,), (8,), heads=8, kv_heads=1, dk=128, dv=128),
    Shape((5,), (19,), heads=4, kv_heads=4, dk=64, dv=64, block_size=5),  # older keys in the square
    Shape((5,), (21,), dk=64, dv=64),  # and none
    Shape((11,), (70,), heads=8, kv_heads=1, dk=64, dv=64, block_size=16),
    Shape((6, 13, 7), (40, 13, 90), heads=8, kv_heads=2, dk=128, dv=128, block_size=3),
    Shape((1, 20, 3, 2, 6, 1), (9, 20, 33, 2, 38, 70), dk=64, dv=64, block_size=7),
]


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SIDE": 8, "WHOLE": 16, "PIECE": 32, "BEFORE": 16, "AFTER": 8}.items():
        monkeypatch.setattr(chunks, name, value)


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """An `Attend` in fp64."""
    group = query.shape[1] // key.shape[1]
    q, k, v = query.double(), *(x.double().repeat_interleave(group, 1) for x in (key, value))
    scores = q @ k.transpose(2, 3) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:]).triu(1).bool(), float("-inf"))
    return (torch.softmax(scores, 3) @ v).to(query.dtype), scores.logsumexp(3).float()


def torch_attention(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """An `Attend` of torch for a CPU, which has no groups."""
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=scale
    )
    return out, lse


def plan_of(shape: Shape, device: torch.device, bound: Bound | None = SMALL) -> ChunkPlan | None:
    return plan_chunks(list(shape.queries), list(shape.contexts), device, bound)


def run(problem: Problem, plan: ChunkPlan, **more: object) -> Tensor:
    query = room_for_queries(*problem.query.shape, problem.query)
    query.copy_(problem.query)
    lengths = problem.block_tables, problem.context_lens
    caches = problem.key_cache, problem.value_cache
    return attend_chunks(query, *caches, *lengths, plan, problem.scale, **more)


def expected(problem: Problem) -> Tensor:
    return ops.paged_attention.reference(**vars(problem.double()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chunks_are_attention(shape, dtype, small_units):
    problem = make_problem(shape, dtype, CPU)
    plan = plan_of(shape, CPU)
    out = run(problem, plan, attend=plain_attention)
    assert out.is_contiguous()
    assert_close("out", expected(problem), out, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("older", [0, 300, 1024, 1100])
def test_chunks_in_the_product_s_units(older, dtype):
    shape = Shape((270,), (270 + older,), heads=4, kv_heads=1, dk=64, dv=64, block_size=16)
    problem = make_problem(shape, dtype, CPU)
    out = run(problem, plan_of(shape, CPU), attend=torch_attention)
    assert_close("out", expected(problem), out, TOLERANCE[dtype])


def test_a_pass_with_nothing_to_merge_copies_nothing(small_units):
    shape = SHAPES[0]
    kept = []

    def attend(*arguments: object) -> tuple[Tensor, Tensor]:
        kept.append(plain_attention(*arguments))
        return kept[-1][0].transpose(1, 2).contiguous().transpose(1, 2), kept[-1][1]

    out = run(make_problem(shape, torch.float32, CPU), plan_of(shape, CPU), attend=attend)
    assert len(kept) == 1 and kept[0][0].shape == (1, 4, 16, 64) and out.shape == (9, 4, 64)


def test_few_shapes_serve_all_lengths(small_units):
    """Each new one costs the host a plan."""
    sides, pieces = set(), set()
    for queries in range(33, 65):
        for context in range(queries, 400):
            plan = plan_chunks([queries], [context], CPU, SMALL)
            sides.add(plan.chunks[0].square.rows)
            pieces |= {(piece.rows, piece.keys) for piece in plan.chunks[0].pieces}
    assert sides == set(range(40, 81, 8))
    assert pieces == {(rows, keys) for rows in range(40, 65, 8) for keys in (16, 32)}


def test_only_chunks_over_the_bound_are_planned():
    bound = Bound(100, 50_000)
    assert plan_chunks([99, 400, 100], [9000, 110, 499], CPU, bound) is None
    assert plan_chunks([99, 400, 100], [9000, 110, 499], CPU, None) is None
    plan = plan_chunks([7, 5, 100, 300, 2], [7, 50, 500, 300, 900], CPU, bound)
    assert [c.sequence for c in plan.chunks] == [2, 3] and plan.longest == 500
    assert [c.first for c in plan.chunks] == [12, 112]
    first, last = plan.runs
    assert (first.sequences, first.tokens, first.max_query_len) == (slice(0, 2), slice(0, 12), 7)
    assert first.query_start.tolist() == [0, 7, 12]
    assert (last.sequences, last.tokens, last.max_query_len) == (slice(4, 5), slice(412, 414), 2)
    assert last.query_start.tolist() == [0, 2] and last.query_start.dtype == torch.int32
    assert bound_of(CPU) is None
    assert all(bound.queries >= 128 for bound in BOUNDS.values())


def test_layers_that_need_more_than_a_causal_mask_are_left_alone():
    plan = plan_of(SHAPES[3], CPU)
    cache = torch.zeros(4, 8, 2, 64, dtype=torch.bfloat16)
    plain = {"sliding_window": 0, "softcap": 0.0, "sinks": None}
    assert takes_chunks(plan, cache, cache, **plain)
    assert takes_chunks(plan, cache, cache, **(plain | {"sliding_window": 21}))
    assert not takes_chunks(plan, cache, cache, **(plain | {"sliding_window": 20}))
    assert not takes_chunks(plan, cache, cache, **(plain | {"softcap": 30.0}))
    assert not takes_chunks(plan, cache, cache, **(plain | {"sinks": torch.zeros(4)}))
    assert not takes_chunks(None, cache, cache, **plain)
    assert not takes_chunks(plan, cache.float(), cache.float(), **plain)
    for dim in (80, 256):
        other = torch.zeros(4, 8, 2, dim, dtype=torch.bfloat16)
        assert not takes_chunks(plan, other, other, **plain)
        assert not takes_chunks(plan, cache, other, **plain)


@pytest.mark.parametrize("norms", [False, True])
def test_a_layer_s_attention_with_chunks(device, norms, small_units, monkeypatch):
    shape = replace(SHAPES[6], queries=(70, 20, 3, 2, 6, 1), contexts=(79, 20, 33, 2, 38, 70))
    layer = make_layer(shape, torch.float16, device, norms)
    attend = (
        attend_chunks if device.type == "cuda" else partial(attend_chunks, attend=plain_attention)
    )
    calls = []

    def counted(*arguments: object) -> Tensor:
        calls.append(arguments)
        return attend(*arguments)

    monkeypatch.setattr(decode_triton, "attend_chunks", counted)
    out = layer.run(chunks=plan_of(shape, device))
    assert len(calls) == 1
    assert_close("out", layer.expected, out, TOLERANCE[torch.float16])
    layer.run(chunks=plan_of(shape, device), softcap=30.0, sliding_window=0)
    assert len(calls) == 1


@pytest.mark.parametrize(("first", "length"), [(0, 40), (0, 72), (13, 51)])
@pytest.mark.parametrize(
    "shape",
    [
        Shape((5,), (61,), heads=3, kv_heads=3, dk=64, dv=64, block_size=7),
        Shape((2, 1), (8, 61), kv_heads=2, dk=16, dv=16, block_size=16),
    ],
    ids=str,
)
def test_gathering_keys_and_values(device, shape, first, length):
    problem = make_problem(shape, torch.float16, device)
    row = len(shape.contexts) - 1
    table = problem.block_tables[row]
    arguments = problem.key_cache, problem.value_cache, table, first, shape.contexts[row], length
    for actual, wanted in zip(
        gather_kv_triton(*arguments), gather_kv.reference(*arguments), strict=True
    ):
        assert torch.equal(actual, wanted) and actual.is_contiguous()


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 64), (5, 4, 128), (7, 6, 80)], ids=str)
def test_merging_two_parts(device, tokens, heads, dim):
    generator = torch.Generator().manual_seed(tokens)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(device)

    def part() -> tuple[Tensor, Tensor]:
        out = normal(tokens + 4, heads, dim).half()[2:-2]
        return out, (30 * normal(heads, tokens + 4)).T[2:-2]

    first, second = part(), part()
    first[1][0, 0] = float("-inf")
    whole = torch.full((tokens + 2, heads, dim), float("nan"), device=device).half()
    wanted = torch.zeros_like(whole)[1:-1]
    exponents = torch.stack((first[1], second[1]), 2).double()
    weights = exponents.softmax(2)
    by_hand = first[0] * weights[..., :1] + second[0] * weights[..., 1:]
    of_kernel, of_reference = first[1].clone(), first[1].clone()
    merge_parts_triton(whole[1:-1], first[0], of_kernel, *second)
    merge_parts.reference(wanted, first[0], of_reference, *second)
    for lse in (of_kernel, of_reference):
        assert_close("log-sum-exp", exponents.logsumexp(2), lse, 1e-6)
    into = first[0].clone()
    merge_parts_triton(into, into, first[1], *second)
    assert torch.equal(into, whole[1:-1])
    assert whole[0].isnan().all() and whole[-1].isnan().all()
    assert_close("kernel", by_hand, whole[1:-1], TOLERANCE[torch.float16])
    assert_close("reference", by_hand, wanted, TOLERANCE[torch.float16])


@needs_cuda
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("queries", [(2047,), (2048,), (1, 1536, 511), (1200, 1800)], ids=str)
@pytest.mark.parametrize("older", [0, 1, 2048, 5853])
def test_cudnn_gives_what_our_kernel_gives(device, queries, older, dim):
    """Both round to bf16, cuDNN once more where two parts are merged."""
    contexts = tuple(q + older for q in queries)
    shape = Shape(queries, contexts, heads=32, kv_heads=8, dk=dim, dv=dim, block_size=16)
    problem = make_problem(shape, torch.bfloat16, device)
    plan = plan_of(shape, device, Bound(1024, 0))
    assert plan is not None and len(plan.chunks) == sum(q >= 1024 for q in queries)
    ours = paged_attention_triton(**vars(problem))
    assert_close("out", ours, run(problem, plan), 6e-3)
