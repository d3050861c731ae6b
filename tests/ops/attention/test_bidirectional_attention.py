"""Rows of one pass that see each other (`causal=False`), on every path, against dense attention."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from ops_helpers import (
    DTYPES,
    TOLERANCE,
    Problem,
    Shape,
    assert_close,
    expected_of,
    make_problem,
    needs_cuda,
    with_meaning,
)
from specdec_kernels import ops
from specdec_kernels.attention import chunks
from specdec_kernels.attention.call import LayerCache
from specdec_kernels.attention.chunks import ChunkPlan
from specdec_kernels.attention.chunks_triton import takes_chunks
from specdec_kernels.attention.cpu import View, gather_attention, gather_plan
from specdec_kernels.attention.decode_triton import rope_attention_triton
from specdec_kernels.attention.paged_triton import paged_attention_triton
from test_rope_attention import Layer, make_layer
from torch import Tensor

CPU = torch.device("cpu")


def block(
    queries: tuple[int, ...], contexts: tuple[int, ...], dim: int = 16, **more: object
) -> Shape:
    return Shape(queries, contexts, dk=dim, dv=dim, causal=False, **more)


SHAPES = [
    block((1,), (1,), heads=1, kv_heads=1),
    block((4,), (4,)),
    block((5, 3, 4), (21, 40, 4), dim=64, block_size=16),
    block((2, 1, 0, 6), (70, 1, 5, 6), dim=80, heads=6, kv_heads=2, block_size=5),
    block((3,), (140,), dim=256, heads=2, kv_heads=2, block_size=64),
    block((7, 2), (33, 300), dim=24, heads=7, kv_heads=1, block_size=1, padding=3),
    block((9, 3), (80, 33), window=4),
    block((6, 2, 5), (160, 70, 5), window=3, block_size=4),
    block((6, 4), (60, 33), window=11, block_size=5),
    block((4, 3), (20, 9), window=1),
    block((5, 4), (40, 8), softcap=2.0),
    block((3, 5), (70, 5), sinks=True),
    block((9, 2), (170, 33), sinks=True, softcap=1.5, window=7, heads=16, kv_heads=1),
    # Padding at the end: some rows, all rows of an idle slot, and all of a slot without context.
    block((6, 6, 6), (30, 9, 6), dead=(2, 0, 5), block_size=4),
    block((4, 4, 4), (30, 20, 4), dead=(0, 4, 4), padding=2),
    block((8, 8), (50, 31), dead=(3, 1), window=3, block_size=3),
    block((8, 8), (50, 31), dead=(3, 6), window=5, sinks=True, softcap=3.0),
    # Too many rows for one tile of the kernel that also rotates.
    block((37,), (37,), dim=32, heads=8, kv_heads=1, block_size=16),
    block((40, 1, 17), (40, 90, 50), dim=24, heads=6, kv_heads=1, block_size=7, padding=2),
    block((40, 20), (95, 30), heads=8, kv_heads=1, window=9, dead=(6, 18)),
]


def assert_same(expected: Tensor, problem: Problem, out: Tensor, tolerance: float) -> None:
    rows = with_meaning(problem)
    assert_close("out", expected[rows], out[rows], tolerance)


def dense(problem: Problem, shape: Shape) -> Tensor:
    """Torch's own attention over each sequence's live keys, with a mask written out by hand."""
    p, size = problem.double(), shape.block_size
    out = torch.zeros(*p.query.shape[:2], shape.dv, dtype=torch.float64)
    near = shape.window or 10**9
    for b, (queries, context) in enumerate(zip(shape.queries, shape.contexts, strict=True)):
        live = context - (shape.dead[b] if shape.dead else 0)
        own = range(context - queries, live)
        if not own:
            continue
        rows = slice(int(p.query_start[b]), int(p.query_start[b]) + len(own))
        slots = [int(p.block_tables[b, i // size]) * size + i % size for i in range(live)]
        # A window leaves out keys that may be NaN, which a mask alone would not hide.
        keys, values = (
            cache.flatten(0, 1)[slots]
            .nan_to_num()
            .repeat_interleave(shape.heads // shape.kv_heads, 1)
            for cache in p.cache[:2]
        )
        mask = torch.tensor([[-near < i - j < near for j in range(live)] for i in own])
        states = (x.transpose(0, 1)[None] for x in (p.query[rows], keys, values))
        found = F.scaled_dot_product_attention(*states, attn_mask=mask, scale=p.call.scale)
        out[rows] = found[0].transpose(0, 1)
    return out


@pytest.mark.parametrize("shape", [s for s in SHAPES if not (s.softcap or s.sinks)], ids=str)
def test_the_expected_results_are_dense_attention(shape):
    problem = make_problem(shape, torch.float64, CPU)
    assert_same(dense(problem, shape), problem, expected_of(problem), 1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_paged(shape, dtype, device):
    problem = make_problem(shape, dtype, device)
    for splits in (1, 4) if dtype == torch.float32 else (None,):
        out = paged_attention_triton(**vars(problem), splits=splits)
        assert out.dtype == dtype and out.is_contiguous()
        assert_same(expected_of(problem), problem, out, TOLERANCE[dtype])


def test_paged_without_slots_has_no_padding(device):
    for attention, place in (
        (paged_attention_triton, device),
        (ops.paged_attention.reference, CPU),
    ):
        problem = make_problem(block((5, 3), (40, 9), window=4), torch.float32, place)
        out = attention(**vars(problem) | {"slots": None})
        assert_same(expected_of(problem), problem, out, 1e-5)


@pytest.mark.parametrize("lens", [(40, 1, 0, 17, 32), (0, 0, 33, 0)], ids=str)
def test_tiles_by_packed_token(lens, device):
    contexts = tuple(n + 30 if n else 0 for n in lens)
    problem = make_problem(block(lens, contexts, padding=7), torch.float32, device)
    wide = replace(problem, max_query_len=len(problem.query))
    assert_same(expected_of(problem), problem, paged_attention_triton(**vars(wide)), 1e-5)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        (shape, dtype)
        for shape in SHAPES
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
        # Softcap and sinks are computed in fp32.
        if dtype != torch.float64 or not (shape.softcap or shape.sinks)
    ],
    ids=str,
)
def test_gather(shape, dtype):
    problem = make_problem(shape, dtype, CPU)
    out = ops.paged_attention(**vars(problem))
    assert out.dtype == dtype and out.is_contiguous()
    assert_same(expected_of(problem), problem, out, TOLERANCE[dtype])


@pytest.mark.parametrize("window", [0, 1, 7, 40])
@pytest.mark.parametrize("shape", [(1, 1), (1, 33), (5, 33), (5, 5), (20, 64), (40, 40)], ids=str)
def test_a_sequence_in_one_piece_of_the_cache(shape, window):
    problem = make_problem(
        block(shape[:1], shape[1:], window=window, block_size=64), torch.float64, CPU
    )
    p = problem
    plan = gather_plan(p.block_tables, p.query_start, p.context_lens, 64, p.slots)
    assert all(isinstance(part.slots, slice) for part in plan.parts(View(window, False)))
    out = gather_attention(p.query, p.cache, plan, p.call)
    assert_close("out", expected_of(problem), out, 1e-12)


def test_one_plan_serves_causal_layers_and_others():
    shapes = [replace(block((5, 3), (40, 33), window=w), causal=c) for w in (0, 4) for c in (0, 1)]
    p = make_problem(block((5, 3), (40, 33)), torch.float64, CPU)
    plan = gather_plan(p.block_tables, p.query_start, p.context_lens, 8, p.slots)
    for shape in [*shapes, *shapes]:
        call = p.call._replace(sliding_window=shape.window, causal=bool(shape.causal))
        out = gather_attention(p.query, p.cache, plan, call)
        assert_close(str(shape), expected_of(replace(p, call=call)), out, 1e-12)


def poisoned(layer: Layer) -> Layer:
    """The layer with NaN as keys and values of padding."""
    qkv = layer.arguments["qkv"].clone()
    _, block_size, kv_heads, dim = layer.arguments["cache"].keys.shape
    padding = layer.arguments["slots"] < block_size
    qkv[padding, -2 * kv_heads * dim :] = torch.nan
    return replace(layer, arguments=layer.arguments | {"qkv": qkv})


def assert_layer(layer: Layer, out: Tensor) -> None:
    rows = layer.compared
    tolerance = TOLERANCE[layer.arguments["qkv"].dtype]
    assert_close("out", layer.expected[rows], out[rows], tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layer(shape, dtype, device):
    layer = poisoned(make_layer(shape, dtype, device, norms=dtype == torch.float32))
    out = layer.run()
    assert out.dtype == dtype and out.is_contiguous()
    assert_layer(layer, out)
    assert out.isfinite().all()  # those of padding too


@pytest.mark.each_value
@pytest.mark.parametrize("splits", [1, 33])
@pytest.mark.parametrize(
    "shape",
    [
        block((4, 4), (150, 4)),
        block((6, 2), (70, 140), window=5),
        block((3, 5), (170, 131), dim=24, heads=6, kv_heads=2, dead=(0, 2)),
        block((5, 3), (100, 3), sinks=True, softcap=3.0, window=2, dead=(1, 1), padding=1),
    ],
    ids=str,
)
def test_splits_do_not_change_the_result(shape, splits, device):
    layer = poisoned(make_layer(shape, torch.float32, device))
    for alone in (0, 80):
        assert_layer(layer, layer.run(splits=splits, alone=alone, min_keys=16, block_n=16))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_reference_of_a_layer(shape):
    layer = make_layer(shape, torch.float32, CPU, norms=True)
    assert_layer(layer, ops.rope_attention.reference(**layer.arguments))


def test_sequence_without_context_stays_finite(device):
    layer = make_layer(block((3, 2), (20, 9)), torch.float32, device)
    context_lens = torch.tensor([20, 0], dtype=torch.int32, device=device)
    out = layer.run(context_lens=context_lens)
    assert_close("out", layer.expected[:3], out[:3], 1e-5)
    assert out.isfinite().all()


@pytest.mark.parametrize("splits", [1, 2])
def test_queries_before_the_first_token_are_padding(splits, device):
    layer = make_layer(block((2, 3), (2, 3), sinks=True), torch.float32, device)
    order = torch.tensor([0, 0, 1, 0, 2, 3, 4], device=device)
    given = {name: layer.arguments[name][order] for name in ("qkv", "cos", "sin", "slots")}
    padding = torch.tensor([True, False, False, True, False, False, False], device=device)
    given["qkv"][padding] = torch.nan
    given["slots"][padding] = 1  # in the trash block
    query_start = torch.tensor([0, 3, 7], dtype=torch.int32, device=device)
    out = layer.run(**given, query_start=query_start, max_query_len=4, splits=splits)
    assert_close("out", layer.expected, out[~padding], 1e-5)


def test_chunks_are_left_to_the_cache(device, monkeypatch):
    """The kernel over gathered keys is causal, so no layer of another kind goes there."""
    shape = block((70, 20), (79, 20), dim=64)
    layer = make_layer(shape, torch.float16, device)
    plan = chunks.plan_chunks([70, 20], [79, 20], device, chunks.Bound(4, 0))
    assert isinstance(plan, ChunkPlan)
    cache, call, kind = layer.arguments["cache"], layer.arguments["call"], torch.float16
    assert takes_chunks(plan, cache, call._replace(causal=True), kind)
    assert not takes_chunks(plan, cache, call, kind)
    assert_layer(layer, layer.run(chunks=plan))


LIMIT = 24  # positions of the model below


@pytest.mark.each_value
@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("heads", [4, 64])
def test_a_padded_pass_is_its_live_rows(heads, window, device):
    """A block is cut where the model's positions end, and idle slots and short blocks are padding.

    Only the live rows of each sequence, run alone, give the expected results.
    """
    width, size, dim, kv_heads = 6, 4, 16, 2
    length = torch.tensor([9, LIMIT - 2, 1, 12, 5], device=device)
    lens = torch.tensor([5, 5, 5, 5, 2], device=device)
    active = torch.tensor([True, True, True, False, True], device=device)
    generator = torch.Generator().manual_seed(heads)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    columns = LIMIT // size
    order = torch.randperm(5 * columns, generator=generator) + 1
    tables = order.view(5, columns).int().to(device)
    _, positions, slots, contexts = ops.padded_pass(
        torch.zeros(5, width, dtype=torch.int64, device=device),
        *(length, lens, active, tables, -1, 1, size, LIMIT, 50),
    )
    live = slots >= size
    assert live.view(5, width).sum(1).tolist() == [6, 3, 6, 0, 3]
    caches = [torch.full((5 * columns + 1, size, kv_heads, dim), torch.nan) for _ in range(2)]
    caches = [cache.to(device) for cache in caches]
    for b in range(5):
        for cache in caches:
            for position in range(int(length[b]) - 1):
                place = tables[b, position // size], position % size
                cache[place] = normal(kv_heads, dim)
    qkv = normal(5 * width, (heads + 2 * kv_heads) * dim)
    angles = positions[:, None] * 50 ** -(torch.arange(dim // 2, device=device) / dim)
    angles = torch.cat([angles, angles], 1)
    call = ops.AttentionCall(dim**-0.5, window, causal=False)
    starts = torch.arange(0, 5 * width + 1, width, dtype=torch.int32, device=device)

    def run(attention: object, rows: Tensor, b: slice, *lengths: object) -> Tensor:
        given = [qkv[rows], angles.cos()[rows], angles.sin()[rows]]
        own = LayerCache(*(cache.clone() for cache in caches))
        given += [slots[rows], tables[b], *lengths]
        if attention is ops.rope_attention.reference:
            own = LayerCache(own.keys.cpu(), own.values.cpu())
            given = [x.cpu() if isinstance(x, Tensor) else x for x in given]
        return attention(*given[:3], own, *given[3:], call).to(device)

    everything = torch.arange(5 * width, device=device)
    whole = {
        "kernel": run(rope_attention_triton, everything, slice(5), starts, contexts, width),
        "reference": run(
            ops.rope_attention.reference, everything, slice(5), starts, contexts, width
        ),
    }
    for b in range(5):
        rows = (live & (everything // width == b)).nonzero()[:, 0]
        if not len(rows):
            continue
        start = torch.tensor([0, len(rows)], dtype=torch.int32, device=device)
        context = (positions[rows[-1:]] + 1).int()
        lengths = start, context, len(rows)
        alone = run(ops.rope_attention.reference, rows, slice(b, b + 1), *lengths)
        for name, out in whole.items():
            assert_close(f"{name}, sequence {b}", alone, out[rows], 1e-5)


@pytest.mark.parametrize("write", ["reference", "triton"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize(
    ("tokens", "kv_heads", "dim", "block_size"),
    [(1, 1, 16, 4), (5, 2, 16, 4), (7, 3, 80, 5), (3, 8, 128, 16), (4, 1, 24, 1), (9, 5, 256, 3)],
)
def test_keys_and_values_without_queries(
    tokens, kv_heads, dim, block_size, norm, dtype, write, device
):
    """Rotated keys and values go to their slots, and nothing else changes."""
    generator = torch.Generator().manual_seed(tokens * dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    wide = normal(tokens, 2 * kv_heads * dim + 8)  # rows of a larger tensor
    kv = wide[:, 4 : 4 + 2 * kv_heads * dim]
    angles = torch.rand(tokens, dim // 2, generator=generator) * 7
    angles = torch.cat([angles, angles], 1).to(device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weight = normal(dim) if norm else None
    blocks = -(-tokens // block_size) + 2
    caches = [
        torch.full((blocks, block_size, kv_heads, dim), torch.nan, device=device, dtype=dtype)
        for _ in range(2)
    ]
    usable = torch.randperm((blocks - 1) * block_size, generator=generator) + block_size
    slots = usable[:tokens].to(device)
    if tokens > 3:
        slots[[1, 3]] = 0  # the trash block; twice the same
    op = ops.write_kv_turned
    run = op.reference if write == "reference" else op.on_cuda
    assert run(kv, cos, sin, LayerCache(*caches), slots, weight, 1e-5) is None

    key, value = kv.double().view(tokens, 2, kv_heads, dim).unbind(1)
    if weight is not None:
        key = key / (key.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    first, second = key.chunk(2, -1)
    c, s = (t.double()[:, None, : dim // 2] for t in (cos, sin))
    key = torch.cat([first * c - second * s, second * c + first * s], -1)
    keys, values = (cache.view(-1, kv_heads, dim) for cache in caches)
    kept = slots >= block_size
    assert_close("keys", key[kept], keys[slots[kept]], TOLERANCE[dtype])
    assert torch.equal(values[slots[kept]].double(), value[kept])
    others = torch.ones(len(keys), dtype=torch.bool, device=device)
    others[slots] = False
    assert keys[others].isnan().all() and values[others].isnan().all()


def test_keys_written_alone_are_those_of_a_pass(device):
    """A pass over rows leaves in the cache what writing their keys and values leaves there."""
    layer = make_layer(block((5, 3), (21, 8), dim=64), torch.float32, device, norms=True)
    given = layer.arguments
    caches = LayerCache(*(pool.clone() for pool in given["cache"][:2]))
    kv = given["qkv"][:, 4 * 64 :]
    where = given["cos"], given["sin"], caches, given["slots"], given["key_norm"], given["eps"]
    ops.write_kv_turned(kv, *where)
    for actual, expected in zip(caches[:2], layer.expected_cache[:2], strict=True):
        assert torch.equal(actual.isnan(), expected.isnan())
        assert_close("cache", expected.nan_to_num(), actual.nan_to_num(), 1e-5)


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        block((8,), (4096,), dim=128, heads=32, kv_heads=8, block_size=16),
        block((16, 16), (4096, 2801), dim=128, heads=32, kv_heads=8, block_size=16),
        block((8, 8) * 16, (700, 77) * 16, dim=64, heads=32, kv_heads=8, block_size=16),
        block((16, 16), (4000, 500), dim=128, heads=32, kv_heads=2, block_size=16, dead=(3, 0)),
        block((8, 8), (4000, 500), dim=64, heads=16, kv_heads=2, window=6, sinks=True),
        block((160, 1), (1200, 4096), dim=128, heads=8, kv_heads=2, block_size=16),
        block((9, 9), (2000, 30), dim=256, heads=16, kv_heads=2, softcap=50.0, dead=(2, 9)),
    ],
    ids=str,
)
def test_large(shape, dtype, device):
    layer = poisoned(make_layer(shape, dtype, device))
    for _ in range(3):
        assert_layer(layer, layer.run())
    problem = make_problem(shape, dtype, device)
    out = paged_attention_triton(**vars(problem))
    assert_same(expected_of(problem), problem, out, TOLERANCE[dtype])
