"""Mixtures of experts: routing, plan, products and sums against torch."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops_helpers import DTYPES, TOLERANCE, assert_close, needs_cuda
from peer_group import Group
from specdec_kernels import ops
from specdec_kernels.experts import mixture_triton
from specdec_kernels.experts.down_triton import down_add_norm_triton
from specdec_kernels.experts.gate_up_triton import gate_up_triton
from specdec_kernels.experts.group_triton import group_triton
from specdec_kernels.experts.grouped_triton import grouped_product
from specdec_kernels.experts.mixture_triton import in_tiles_triton, mixture_add_norm_triton
from specdec_kernels.experts.plan import FEW_TOKENS, ExpertPlan, PairGroups
from specdec_kernels.experts.reference import (
    CLAMPED,
    Experts,
    Routes,
    Routing,
    activated,
    logits_of,
    mixture_reference,
    routes_of,
)
from specdec_kernels.experts.route_triton import route_triton
from specdec_kernels.experts.sorted_triton import combine_triton, sorted_mixture_add_norm
from specdec_kernels.experts.tiles import (
    MANY_TOKENS,
    ExpertTiles,
    GroupTiles,
    choose_group_tiles,
    way_of,
)
from specdec_kernels.launch_triton import counters
from specdec_kernels.linear.reference import Normed, rms_norm_reference
from specdec_kernels.linear.stored import Storage
from specdec_kernels.linear.tiles import FEW_ROWS, can_be_tiled, is_tiled
from torch import Tensor
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

EPS = 1e-5
Kind = dict[str, Any]
# CI leaves out fp16: the kernels compute in fp32, and only loads and stores know the others.
SOME_DTYPES = [
    pytest.param(*given.values, id=given.id, marks=pytest.mark.slow)
    if given.values[0] == torch.float16
    else given
    for given in DTYPES
]


def some(*axes: Iterable[Any], every: int) -> list[Any]:
    """All combinations of the axes' values. CI runs those whose positions add up to a multiple of
    `every`, so that each pair of values occurs if every other axis is that long."""
    found = []
    for combination in product(*(list(enumerate(axis)) for axis in axes)):
        values = [value for _, value in combination]
        is_left_out = sum(position for position, _ in combination) % every
        marks = [pytest.mark.slow] if is_left_out else []
        found.append(pytest.param(*values, id="-".join(map(str, values)), marks=marks))
    return found


QWEN = Routing(3, renormalise=True)
OLMOE = Routing(3)
MIXTRAL = Routing(2, renormalise=True, rounds=False)
GPT_OSS = Routing(2, softmax_first=False)
ROUTINGS = [QWEN, OLMOE, MIXTRAL, GPT_OSS, Routing(1, renormalise=True)]
GLM = Routing(3, renormalise=True, sigmoid=True, scaling=2.5)
DOTS = Routing(2, sigmoid=True)
DEEPSEEK = Routing(4, True, True, sigmoid=True, num_groups=4, kept_groups=2, scaling=1.5)
SIGMOIDS = {"glm": GLM, "dots": DOTS, "deepseek": DEEPSEEK}


def normal(*size: int, kind: Kind, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size) + seed)
    return (torch.randn(size, generator=generator) * scale).to(kind["device"], kind["dtype"])


def make_experts(
    num_experts: int,
    width: int,
    features: int,
    kind: Kind,
    routing: Routing = QWEN,
    biases: bool = False,
    **more: Any,
) -> Experts:
    """Weights whose products have about the size of their factors; the router spreads logits."""
    if biases:
        more |= {
            "router_bias": normal(num_experts, kind=kind, seed=3),
            "gate_up_bias": normal(num_experts, 2 * features, kind=kind),
            "down_bias": normal(num_experts, width, kind=kind, seed=2),
        }
    return Experts(
        router=normal(num_experts, width, kind=kind, scale=2 * width**-0.5, seed=1),
        gate_up=normal(num_experts, 2 * features, width, kind=kind, scale=width**-0.5),
        down=normal(num_experts, width, features, kind=kind, scale=features**-0.5),
        routing=routing,
        **more,
    )


def make_stream(rows: int, width: int, kind: Kind, parts: int = 3) -> Normed:
    """A residual stream as a product of few rows leaves it, or a normed one without parts."""
    hidden = normal(rows, 2 * width, kind=kind)[:, :width]
    norm = 1 + normal(width, kind=kind, scale=0.3)
    if not parts:
        return Normed(hidden, rms_norm_reference(hidden, norm, EPS), None, EPS)
    wide = F.pad(hidden.float(), (0, -width % parts)).square()
    squares = wide.view(rows, parts, -1).sum(2)
    return Normed(hidden, (hidden.float() * norm.float()).to(hidden.dtype), squares, EPS)


def rows_of(x: Normed) -> Tensor:
    """The normed rows of a stream, in fp64."""
    if x.squares is None:
        return x.scaled.double()
    mean = x.squares.double().sum(1, keepdim=True) / x.hidden.shape[1]
    return x.scaled.double() * torch.rsqrt(mean + x.eps)


def assert_normed(x: Normed, weight: Tensor) -> None:
    """Check the norm of `x.hidden`, which is finished in fp16 and unfinished otherwise."""
    dtype = x.hidden.dtype
    expected = rms_norm_reference(x.hidden.double(), weight.double(), EPS)
    assert_close("norm", expected, rows_of(x), TOLERANCE[dtype])
    assert (x.squares is None) == (dtype == torch.float16)
    if x.squares is not None:
        assert_close("squares", x.hidden.double().square().sum(1), x.squares.sum(1), 1e-5)


def wide(experts: Experts) -> Experts:
    """The same in fp64, for a reference without rounding."""
    return experts._replace(
        **{n: v.double() for n, v in experts._asdict().items() if isinstance(v, Tensor)}
    )


def routes_from(plan: ExpertPlan, num_experts: int, num_chosen: int) -> Routes:
    """Experts, ascending, and weights of each token, from the slots in use."""
    count = int(plan.used)
    assert 0 < count <= len(plan.experts)
    experts, bits = plan.experts[:count].tolist(), plan.chosen[:count].tolist()
    assert experts == sorted(set(experts)) and 0 <= min(experts) <= max(experts) < num_experts
    rows = plan.weights.shape[1]
    found: list[list[tuple[int, float]]] = [[] for _ in range(rows)]
    for slot, expert in enumerate(experts):
        assert 0 < bits[slot] < 1 << rows
        for row in range(rows):
            weight = float(plan.weights[slot, row])
            if bits[slot] >> row & 1:
                found[row].append((expert, weight))
            else:
                assert weight == 0.0
    assert all(len(row) == num_chosen for row in found)
    chosen = torch.tensor([[e for e, _ in row] for row in found])
    return Routes(chosen, torch.tensor([[w for _, w in row] for row in found]))


def routes_in(groups: PairGroups, num_experts: int) -> Routes:
    """Experts, ascending, and weights of each token, from the pairs of each expert."""
    rows, count = groups.weights.shape
    assert groups.sizes.shape == (num_experts,) and groups.pairs.shape == (num_experts, rows)
    chosen = torch.full((rows * count,), -1)
    for expert, size in enumerate(groups.sizes.tolist()):
        pairs = groups.pairs[expert, :size].long().cpu()
        assert (chosen[pairs] == -1).all() and len(pairs.unique()) == size
        chosen[pairs] = expert
    assert (chosen >= 0).all()
    chosen = chosen.view(rows, count)
    assert (chosen.diff(dim=1) > 0).all()
    return Routes(chosen, groups.weights.cpu())


def routed(x: Normed, experts: Experts, is_grouped: bool) -> tuple[Routes, Tensor | None]:
    """Experts, ascending, and weights of each token, and the factors of rows, by either kernel."""
    if is_grouped:
        groups = group_triton(x, experts)
        return routes_in(groups, experts.num_experts), groups.factors
    plan = route_triton(x, experts)
    return routes_from(plan, experts.num_experts, experts.routing.num_chosen), plan.factors


def ascending(routes: Routes) -> Routes:
    experts, order = routes.experts.sort(dim=1)
    return Routes(experts.cpu(), routes.weights.gather(1, order).float().cpu())


# T, E, K; rows that fill a tile and rows that do not, experts that fill no program.
SIZES = [
    (1, 8, 64),
    (3, 6, 40),
    (8, 20, 100),
    (9, 33, 64),
    (16, 5, 1100),
    (33, 17, 72),
    (64, 40, 48),
    (130, 9, 40),
    (1061, 4, 24),
]


WAYS = {"few": False, "grouped": True}


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("size, routing, way", some(SIZES, ROUTINGS, WAYS, every=3))
def test_routes(size, routing, way, dtype, device):
    rows, num_experts, width = size
    if rows > FEW_TOKENS:
        way = "grouped"
    kind = {"dtype": dtype, "device": device}
    biased = routing is GPT_OSS
    experts = make_experts(num_experts, width, 4, kind, routing, biases=biased)
    if experts.router_bias is not None:
        experts.router_bias.sub_(5)  # nearly all scores are negative
    x = make_stream(rows, width, kind, parts=3 * (rows % 3))
    found, factors = routed(x, experts, WAYS[way])
    logits = F.linear(rows_of(x), experts.router.double(), None)
    if experts.router_bias is not None:
        logits += experts.router_bias.double()
    exact = ascending(routes_of(logits, routing))
    # Rounded logits may order near-ties otherwise.
    same = (found.experts == exact.experts).all(1)
    assert same.float().mean() >= (0.95 if dtype == torch.float32 else 0.8)
    tolerance = 10 * TOLERANCE[dtype]
    assert_close("weights", exact.weights[same], found.weights[same], tolerance)
    assert (factors is None) == (x.squares is None)
    if factors is not None:
        mean = x.squares.double().sum(1) / width
        assert_close("factors", torch.rsqrt(mean + EPS), factors, 1e-5)
    assert not counters(device).any()


@pytest.mark.parametrize("is_grouped", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_ties_go_to_the_first_expert(routing, is_grouped, device):
    """All logits are equal, or two are; torch.topk on CUDA chooses the same."""
    kind = {"dtype": torch.float32, "device": device}
    experts = make_experts(12, 32, 4, kind, routing)
    experts.router[:] = experts.router[0]
    x = make_stream(5, 32, kind, parts=0)
    count = routing.num_chosen
    found, _ = routed(x, experts, is_grouped)
    assert found.experts.tolist() == [list(range(count))] * 5
    even = torch.full((5, count), 1 / count if routing.renormalise else 1 / 12)
    assert_close(
        "weights", even if routing.softmax_first else torch.ones(5, 2) / 2, found.weights, 1e-6
    )
    # Experts 4 and 9 share the last place of every token.
    top = torch.arange(count - 1)
    x = x._replace(scaled=torch.ones_like(x.scaled))
    experts.router[:] = -0.1
    experts.router[top] = 0.1
    experts.router[[4, 9]] = 0.0
    found, _ = routed(x, experts, is_grouped)
    assert found.experts.tolist() == [[*top.tolist(), 4]] * 5


def transformers_routes(rows: Tensor, experts: Experts) -> Routes:
    """The routes of glm4_moe's router, ascending, for rows [T, K]."""
    routing = experts.routing
    config = SimpleNamespace(
        num_experts_per_tok=routing.num_chosen,
        num_local_experts=experts.num_experts,
        hidden_size=rows.shape[1],
        routed_scaling_factor=routing.scaling,
        n_group=routing.num_groups,
        topk_group=routing.kept_groups,
        norm_topk_prob=routing.renormalise,
    )
    router = Glm4MoeTopkRouter(config).to(rows.device)
    router.weight.data = experts.router
    if experts.choice_bias is not None:
        router.e_score_correction_bias = experts.choice_bias
    with torch.inference_mode():
        _, weights, chosen = router(rows)
    return ascending(Routes(chosen, weights))


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("rows, routing, way", some([3, 11], SIGMOIDS, [*WAYS, "sorted"], every=3))
def test_sigmoid_routes_are_those_of_transformers(rows, routing, way, dtype, device):
    """Also with a bias by which no token chooses expert 1 and all choose expert 2."""
    kind = {"dtype": dtype, "device": device}
    routing = SIGMOIDS[routing]
    experts = make_experts(28, 40, 4, kind, routing)
    for bias in (None, normal(28, kind=kind, seed=rows).float()):
        if bias is not None:
            bias[1], bias[2] = -10.0, 10.0
        experts = experts._replace(choice_bias=bias)
        x = make_stream(rows, 40, kind, parts=0 if way == "sorted" else 3 * (rows % 2))
        if way == "sorted":
            logits = logits_of(x.scaled, experts)
            found = ascending(routes_of(logits, routing, bias))
        else:
            found, _ = routed(x, experts, WAYS[way])
        exact = transformers_routes(rows_of(x), experts)
        same = (found.experts == exact.experts).all(1)
        assert same.float().mean() >= (1 if dtype == torch.float32 else 0.8)
        assert_close("weights", exact.weights[same], found.weights[same], 1e-5)
        if bias is not None:
            assert (found.experts == 2).any(1).all() and not (found.experts == 1).any()


@pytest.mark.parametrize("is_grouped", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("routing", SIGMOIDS)
def test_ties_of_sigmoids_go_to_the_first_expert_and_group(routing, is_grouped, device):
    kind = {"dtype": torch.float32, "device": device}
    routing = SIGMOIDS[routing]
    experts = make_experts(12, 32, 4, kind, routing)
    experts.router[:] = experts.router[0]
    x = make_stream(5, 32, kind, parts=0)
    found, _ = routed(x, experts, is_grouped)
    count = routing.num_chosen
    assert found.experts.tolist() == [list(range(count))] * 5
    # Four groups of 3, of which three have equal sums of two scores; all sigmoids are 1 / 2.
    x = x._replace(scaled=torch.zeros_like(x.scaled))
    bias = torch.tensor([1, 1, -9, 0, 0, 0, 2, 0, 0, 1, -9, 1], device=device) / 4
    found, _ = routed(x, experts._replace(choice_bias=bias), is_grouped)
    assert found.experts.tolist() == [{2: [0, 6], 3: [0, 1, 6], 4: [0, 1, 6, 7]}[count]] * 5


@needs_cuda
@pytest.mark.parametrize("is_grouped", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("routing", SIGMOIDS)
def test_ties_of_sigmoids_are_decided_as_transformers_decides_them(routing, is_grouped, device):
    """Few levels of logits and of biases, of 128 experts: sums are exact in any order."""
    kind = {"dtype": torch.bfloat16, "device": device}
    experts = make_experts(128, 16, 8, kind, SIGMOIDS[routing])
    experts.router[:] = experts.router.round() / 2
    bias = normal(128, kind=kind).float().round() / 4
    experts = experts._replace(choice_bias=bias)
    x = make_stream(64 if is_grouped else FEW_TOKENS, 16, kind, parts=0)
    x = x._replace(scaled=x.scaled.round())
    expected = transformers_routes(x.scaled, experts)
    found, _ = routed(x, experts, is_grouped)
    assert torch.equal(found.experts, expected.experts)
    assert_close("weights", expected.weights, found.weights, 1e-6)


@needs_cuda
@pytest.mark.parametrize("is_grouped", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_ties_are_decided_as_transformers_decides_them(routing, is_grouped, device):
    """bf16 logits of 128 experts have many ties. transformers computes torch.topk on CUDA."""
    kind = {"dtype": torch.bfloat16, "device": device}
    width = 16
    experts = make_experts(128, width, 8, kind, routing)
    # Few levels, so that sums are exact in any order.
    experts.router[:] = (2 * experts.router).round() / 2
    x = make_stream(64 if is_grouped else FEW_TOKENS, width, kind, parts=0)
    x = x._replace(scaled=x.scaled.round())
    expected = ascending(routes_of(F.linear(x.scaled, experts.router), routing))
    found, _ = routed(x, experts, is_grouped)
    assert torch.equal(found.experts, expected.experts)
    assert_close("weights", expected.weights, found.weights, 1e-6)


def plan_of(
    routes: Routes, num_experts: int, factors: Tensor | None, device: torch.device
) -> ExpertPlan:
    """The plan as `route_triton` would write it, with absurd numbers in unused slots."""
    rows, count = routes.experts.shape
    slots = min(num_experts, rows * count)
    chosen = routes.experts.unique().tolist()
    plan = ExpertPlan(
        torch.tensor([len(chosen)], dtype=torch.int32),
        torch.full((slots,), 2**30, dtype=torch.int32),
        torch.full((slots,), -1, dtype=torch.int64),
        torch.full((slots, rows), float("nan")),
        factors,
    )
    for slot, expert in enumerate(chosen):
        is_chosen = (routes.experts == expert).any(1)
        plan.experts[slot] = expert
        plan.chosen[slot] = sum(1 << t for t in range(rows) if is_chosen[t])
        plan.weights[slot] = (routes.weights * (routes.experts == expert)).sum(1)
    return ExpertPlan(*(None if t is None else t.to(device) for t in plan))


def some_routes(rows: int, num_experts: int, num_chosen: int) -> Routes:
    """Routes in which no token chose expert 1 and all chose expert 2."""
    generator = torch.Generator().manual_seed(rows)
    others = [e for e in range(num_experts) if e not in (1, 2)]
    picks = [
        [
            2,
            *(
                others[i]
                for i in torch.randperm(len(others), generator=generator)[: num_chosen - 1]
            ),
        ]
        for _ in range(rows)
    ]
    weights = torch.rand(rows, num_chosen, generator=generator) + 0.1
    return Routes(torch.tensor(picks), weights)


TILES = [
    ExpertTiles(8, 16, 64, 4, 1, 0, 4, 3),
    ExpertTiles(8, 16, 32, 1, 3, 2, 4, 3),
    ExpertTiles(16, 32, 32, 1, 2, 0, 4, 3),
    ExpertTiles(16, 32, 64, 2, 4, 0, 4, 3),
]
SHAPES = [(1, 9, 64, 32), (7, 5, 72, 50), (40, 6, 40, 33)]  # T, E, K, F
KINDS = {
    "silu": {},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "interleaved": {"interleaved": True},
    "clamped": {"activation": CLAMPED, "interleaved": True, "limit": 0.5},
}


def experts_of_kind(what: str, num_experts: int, width: int, features: int, kind: Kind) -> Experts:
    """Experts of one of `KINDS`; the weights of expert 1, which nobody chooses, are NaN."""
    biases = what in ("clamped", "gelu_tanh")
    experts = make_experts(num_experts, width, features, kind, biases=biases, **KINDS[what])
    for weight in (experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias):
        if weight is not None:
            weight[1] = float("nan")
    return experts


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("size, what, tiles", some(SHAPES, KINDS, TILES, every=3))
def test_products(size, what, tiles, dtype, device):
    """Rows of x that no expert reads, and weights of experts nobody chose, are NaN."""
    rows, num_experts, width, features = size
    rows = min(rows, tiles.block_m, FEW_TOKENS)
    kind = {"dtype": dtype, "device": device}
    experts = experts_of_kind(what, num_experts, width, features, kind)
    routes = some_routes(rows, num_experts, 3)
    x = make_stream(rows, width, kind, parts=3 * (rows % 2))
    factors = None
    if x.squares is not None:
        factors = torch.rsqrt(x.squares.sum(1) / width + EPS)
    plan = plan_of(routes, num_experts, factors, device)
    norm = 1 + normal(width, kind=kind, scale=0.3)
    inner = gate_up_triton(x.scaled, plan, experts, tiles._replace(splits=1))
    exact = wide(experts)
    for slot, expert in enumerate(plan.experts[: int(plan.used)].tolist()):
        mine = (routes.experts == expert).any(1).to(device)
        bias = None if exact.gate_up_bias is None else exact.gate_up_bias[expert]
        whole = activated(F.linear(rows_of(x)[mine], exact.gate_up[expert], bias), exact)
        expected = whole * plan.weights[slot][mine][:, None]
        assert_close("inner", expected, inner[slot][mine], TOLERANCE[dtype])
        assert inner[slot][~mine].isnan().all()
    out = down_add_norm_triton(inner, plan, experts, tiles, x.hidden, norm, EPS)
    hidden = x.hidden.double()
    for slot, expert in enumerate(plan.experts[: int(plan.used)].tolist()):
        mine = (routes.experts == expert).any(1).to(device)
        part = F.linear(inner[slot][mine].double(), exact.down[expert])
        if exact.down_bias is not None:
            part += exact.down_bias[expert] * plan.weights[slot][mine][:, None]
        hidden[mine] += part
    assert_close("hidden", hidden, out.hidden, TOLERANCE[dtype])
    assert_normed(out, norm)
    assert not counters(device).any()


def groups_of(routes: Routes, num_experts: int, factors: Tensor | None) -> PairGroups:
    """The groups as `group_triton` would write them, with absurd numbers after the pairs."""
    routes = ascending(routes)
    pairs = torch.full((num_experts, len(routes.experts)), 2**30, dtype=torch.int32)
    sizes = torch.zeros(num_experts, dtype=torch.int32)
    order = torch.randperm(routes.experts.numel(), generator=torch.Generator().manual_seed(0))
    for pair in order.tolist():
        expert = routes.experts.flatten()[pair]
        pairs[expert, sizes[expert]] = pair
        sizes[expert] += 1
    return PairGroups(sizes, pairs, routes.weights, factors)


GROUP_TILES = [
    GroupTiles(16, 32, 32, 4, 3),
    GroupTiles(32, 32, 64, 4, 4),
    GroupTiles(64, 64, 64, 8, 3),
]


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("size, what, tiles", some(SHAPES, KINDS, GROUP_TILES, every=3))
def test_grouped_products(size, what, tiles, dtype, device):
    """All tokens choose one expert, in several blocks. An expert that none chooses has NaN."""
    rows, num_experts, width, features = size
    kind = {"dtype": dtype, "device": device}
    experts = experts_of_kind(what, num_experts, width, features, kind)
    routes = ascending(some_routes(rows, num_experts, 3))
    x = make_stream(rows, width, kind, parts=3 * (rows % 2))
    factors = None
    if x.squares is not None:
        factors = torch.rsqrt(x.squares.sum(1) / width + EPS)
    groups = groups_of(routes, num_experts, None)
    groups = PairGroups(*(t.to(device) for t in groups[:3]), factors)
    inner = grouped_product(x.scaled, groups, experts, tiles, is_gate=True)
    parts = grouped_product(inner, groups, experts, tiles, is_gate=False)
    exact = wide(experts)
    for pair, expert in enumerate(routes.experts.flatten().tolist()):
        bias, down_bias = (
            None if b is None else b[expert] for b in (exact.gate_up_bias, exact.down_bias)
        )
        row = rows_of(x)[pair // 3]
        expected = activated(F.linear(row, exact.gate_up[expert], bias), exact)
        assert_close("inner", expected, inner[pair], TOLERANCE[dtype])
        expected = F.linear(inner[pair].double(), exact.down[expert], down_bias)
        assert_close("parts", expected, parts[pair], TOLERANCE[dtype])


MXFP4 = Storage("mxfp4", (1, 32), scales=torch.uint8)
BF16 = torch.bfloat16
# T, E, K, F: rows of none to three whole blocks of 128 columns, and 0, 32, 64 or 96 beside them.
MX_SHAPES = [(1, 9, 128, 160), (7, 5, 352, 32), (16, 6, 416, 192)]
MX_WAYS = [(8, 2), (16, 1), (32, 2)]  # rows in a tile, and blocks of columns in a step
# Numbers and products are exact, so only sums in fp32 and the last rounding differ. The interpreter
# cuts bits off where a GPU rounds.
MX_TOLERANCE = 4e-3 if torch.cuda.is_available() else 8e-3


def mx_experts(
    what: str, num_experts: int, width: int, features: int, device: torch.device
) -> tuple[Experts, Experts]:
    """Experts of one of `KINDS` in mxfp4, and the same numbers in fp64. Expert 1, which nobody
    chooses, has infinite scales. Scales differ by a factor of 2^14 in all."""
    kind = {"dtype": BF16, "device": device}
    biases = what in ("clamped", "gelu_tanh")
    experts = make_experts(num_experts, width, features, kind, biases=biases, **KINDS[what])
    gate_up, down = (MXFP4.quantised(w.float()) for w in (experts.gate_up, experts.down))
    for weight in (gate_up, down):
        weight.scales.add_(
            torch.arange(weight.scales.numel(), device=device)
            .view_as(weight.scales)
            .remainder(5)
            .to(torch.uint8)
            - 2
        )
    exact = wide(experts)._replace(
        gate_up=gate_up.plain(torch.float64), down=down.plain(torch.float64)
    )
    for weight in (gate_up, down):
        weight.scales[1] = 255
    experts = experts._replace(gate_up=gate_up, down=down)
    return in_tiles_triton(experts, BF16), exact


def mx_tiles(way: tuple[int, int], parts: int = 1) -> tuple[ExpertTiles, ExpertTiles]:
    """Tiles of gate and up and of down for so many rows and blocks of columns. Some programs of
    down have the last parts of one expert and the first of the next."""
    rows, blocks = way
    return (
        ExpertTiles(rows, 32, 128 * blocks, 1, 1, 0, 4, 3),
        ExpertTiles(rows, 64, 128 * blocks, 1, 1 + 2 * parts, 0, 4, 3, parts=parts),
    )


def features_of(inner: Tensor) -> Tensor:
    """The results of gate and up in mxfp4, with features in ascending order."""
    blocks = [block.unflatten(-1, (2, 2, -1)) for block in inner.split(128, -1)]
    return torch.cat([block.transpose(-1, -2).flatten(-3) for block in blocks], -1)


@pytest.mark.parametrize("size, what, way", some(MX_SHAPES, KINDS, MX_WAYS[:2], every=3))
def test_products_of_mxfp4(size, what, way, device):
    """The kernels of few tokens, and rows of x that no expert reads are NaN."""
    rows, num_experts, width, features = size
    rows = min(rows, way[0])
    experts, exact = mx_experts(what, num_experts, width, features, device)
    routes = some_routes(rows, num_experts, 3)
    x = make_stream(rows, width, {"dtype": BF16, "device": device}, parts=3 * (rows % 2))
    factors = None
    if x.squares is not None:
        factors = torch.rsqrt(x.squares.sum(1) / width + EPS)
    plan = plan_of(routes, num_experts, factors, device)
    first, second = mx_tiles(way, 1 + rows % 3)
    inner = gate_up_triton(x.scaled, plan, experts, first)
    norm = 1 + normal(width, kind={"dtype": BF16, "device": device}, scale=0.3)
    out = down_add_norm_triton(inner, plan, experts, second, x.hidden, norm, EPS)
    hidden, inner = x.hidden.double(), features_of(inner)
    for slot, expert in enumerate(plan.experts[: int(plan.used)].tolist()):
        mine = (routes.experts == expert).any(1).to(device)
        bias = None if exact.gate_up_bias is None else exact.gate_up_bias[expert]
        whole = activated(F.linear(rows_of(x)[mine], exact.gate_up[expert], bias), exact)
        weights = plan.weights[slot][mine][:, None]
        assert_close("inner", whole * weights, inner[slot][mine], MX_TOLERANCE)
        part = F.linear(inner[slot][mine].double(), exact.down[expert])
        if exact.down_bias is not None:
            part += exact.down_bias[expert] * weights
        hidden[mine] += part
    assert_close("hidden", hidden, out.hidden, MX_TOLERANCE)
    assert_normed(out, norm)
    assert not counters(device).any()


@pytest.mark.parametrize("size, what, way", some(MX_SHAPES, KINDS, MX_WAYS, every=3))
def test_grouped_products_of_mxfp4(size, what, way, device):
    """All tokens choose one expert, in several blocks."""
    _, num_experts, width, features = size
    rows = 19
    experts, exact = mx_experts(what, num_experts, width, features, device)
    routes = ascending(some_routes(rows, num_experts, 3))
    x = make_stream(rows, width, {"dtype": BF16, "device": device})
    factors = torch.rsqrt(x.squares.sum(1) / width + EPS)
    groups = groups_of(routes, num_experts, None)
    groups = PairGroups(*(t.to(device) for t in groups[:3]), factors)
    first, second = (GroupTiles(way[0], features, 128 * way[1], 4, 3) for features in (32, 64))
    inner = grouped_product(x.scaled, groups, experts, first, is_gate=True)
    parts = grouped_product(inner, groups, experts, second, is_gate=False)
    inner = features_of(inner)
    for pair, expert in enumerate(routes.experts.flatten().tolist()):
        bias, down_bias = (
            None if b is None else b[expert] for b in (exact.gate_up_bias, exact.down_bias)
        )
        row = rows_of(x)[pair // 3]
        expected = activated(F.linear(row, exact.gate_up[expert], bias), exact)
        assert_close("inner", expected, inner[pair], MX_TOLERANCE)
        expected = F.linear(inner[pair].double(), exact.down[expert], down_bias)
        assert_close("parts", expected, parts[pair], MX_TOLERANCE)


def test_infinite_rows_of_mxfp4_and_rows_that_are_read_otherwise(device):
    """An infinity leaves other tokens' results alone. Weights are tiled if groups are whole."""
    experts, _ = mx_experts("silu", 5, 128, 64, device)
    routes = some_routes(2, 5, 2)
    x = make_stream(2, 128, {"dtype": BF16, "device": device}, parts=0)
    x.scaled[1, 3] = float("inf")
    plan = plan_of(routes, 5, None, device)
    inner = gate_up_triton(x.scaled, plan, experts, mx_tiles((8, 2))[0])
    slot = plan.experts.tolist().index(2)
    assert inner[slot][0].isfinite().all() and not inner[slot][1].isfinite().any()
    weights = {n: MXFP4.quantised(torch.ones(n, n)) for n in (32, 96, 128, 144, 160)}
    read = {width for width, weight in weights.items() if can_be_tiled(BF16, device, weight)}
    assert weights.keys() - read == {144}
    assert not can_be_tiled(BF16, device, weights[128], weights[144])
    assert not can_be_tiled(torch.float16, device, weights[128])


@pytest.mark.parametrize(("rows", "features"), [(3, 64), (3, 80), (12, 64), (12, 80)])
def test_layer_of_mxfp4(rows, features, device):
    """Few tokens and groups. If down's rows have 80 columns, neither weight is tiled."""
    experts, exact = mx_experts("clamped", 9, 128, features, device)
    assert is_tiled(experts.gate_up) == is_tiled(experts.down) == (features == 64)
    for weight in (experts.gate_up, experts.down):
        weight.scales[1] = 118
    plain = {name: getattr(experts, name).plain(torch.float64) for name in ("gate_up", "down")}
    exact = exact._replace(**plain)
    x = make_stream(rows, 128, {"dtype": BF16, "device": device})
    norm = torch.ones(128, dtype=BF16, device=device)
    out = mixture_add_norm_triton(x, experts, norm, EPS)
    logits = F.linear(rows_of(x), exact.router, exact.router_bias)
    expected = x.hidden.double() + mixture_reference(rows_of(x), routes_of(logits, QWEN), exact)
    errors = (out.hidden.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert (errors <= 0.02).float().mean() >= 0.8


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("rows, routing", some([1, 3, 6, 11], [QWEN, MIXTRAL, GPT_OSS], every=3))
def test_layer(rows, routing, dtype, device):
    """The whole layer equals the reference where rounding does not reorder experts."""
    kind = {"dtype": dtype, "device": device}
    experts = make_experts(40, 64, 48, kind, routing)
    x, norm = make_stream(rows, 64, kind), 1 + normal(64, kind=kind, scale=0.3)
    out = mixture_add_norm_triton(x, experts, norm, EPS)
    routes = routes_of(F.linear(rows_of(x), experts.router.double()), routing)
    mixed = mixture_reference(rows_of(x), routes, wide(experts))
    expected = x.hidden.double() + mixed
    errors = (out.hidden.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert (errors <= TOLERANCE[dtype]).float().mean() >= (1 if dtype == torch.float32 else 0.8)
    assert_normed(out, norm)


def sorted_way(x: Normed, experts: Experts, norm: Tensor, eps: float) -> Normed:
    return sorted_mixture_add_norm(x, experts, x.hidden, norm, eps)


MANY = {"grouped": mixture_add_norm_triton, "sorted": sorted_way}


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize(
    "routing, biases, way",
    some(
        [GPT_OSS, QWEN, MIXTRAL],
        [True, False],
        MANY,
        every=2,
    ),
)
def test_layer_of_many_tokens(routing, biases, way, dtype, device):
    """Grouped and sorted tokens equal the reference where rounding does not reorder experts."""
    kind = {"dtype": dtype, "device": device}
    experts = make_experts(10, 64, 48, kind, routing, biases=biases)
    if biases:  # gpt-oss has all of these
        experts = experts._replace(activation=CLAMPED, interleaved=True)
    exact = wide(experts)
    rows, parts = (40, 3) if way == "grouped" else (70, 0)
    x, norm = make_stream(rows, 64, kind, parts), 1 + normal(64, kind=kind, scale=0.3)
    out = MANY[way](x, experts, norm, EPS)
    routes = routes_of(F.linear(rows_of(x), exact.router, exact.router_bias), routing)
    expected = x.hidden.double() + mixture_reference(rows_of(x), routes, exact)
    errors = (out.hidden.double() - expected).norm(dim=1) / expected.norm(dim=1)
    assert (errors <= TOLERANCE[dtype]).float().mean() >= (1 if dtype == torch.float32 else 0.8)
    normed = rms_norm_reference(out.hidden.double(), norm.double(), EPS)
    assert_close("scaled", normed, out.scaled, TOLERANCE[dtype])


@pytest.mark.parametrize(
    "rows, way",
    [
        (3, mixture_add_norm_triton),
        (120, mixture_add_norm_triton),
        (120, sorted_way),
    ],
)
def test_experts_are_counted_and_the_stream_may_be_zeros(rows, way, device):
    """A rank's part of a sum is added to zeros, one row for all tokens, in every way."""
    kind = {"dtype": torch.float32, "device": device}
    read = torch.full((3,), -1, dtype=torch.int32, device=device)
    experts = make_experts(200, 32, 16, kind, MIXTRAL)._replace(read=read[1:2])
    x, norm = make_stream(rows, 32, kind, parts=3 if rows < 120 else 0), normal(32, kind=kind)
    nothing = torch.zeros(1, 32, device=device).expand(rows, 32)
    out = way(x._replace(hidden=nothing), experts, norm, EPS)
    routes = routes_of(F.linear(rows_of(x), experts.router.double()), MIXTRAL)
    expected = mixture_reference(rows_of(x), routes, wide(experts))
    assert_close("hidden", expected, out.hidden, TOLERANCE[torch.float32])
    assert read.tolist() == [-1, len(routes.experts.unique()), -1]
    assert 4 <= read[1] < 200


@pytest.mark.pairwise
@pytest.mark.parametrize("half", DTYPES[1:])
@pytest.mark.parametrize("rows", [1, 6, 40, 70])
@pytest.mark.parametrize("has_start", [False, True])
def test_a_mixture_without_a_norm_goes_to_the_other_ranks(has_start, rows, half, device):
    """Few tokens are sent, many are stored where the other ranks read them."""
    kind = {"dtype": half, "device": device}
    experts = make_experts(20, 66, 48, kind, QWEN)
    x, norm = make_stream(rows, 66, kind, parts=0), normal(66, kind=kind)
    start = make_stream(rows, 2 * 66, kind, parts=0).hidden[:, 66:] if has_start else None
    group = Group(3, 66, half, device)
    untouched = group.inboxes.clone()
    is_sent = mixture_triton.mixture_to_peers(group.ranks[1], 1, x, experts, start)
    assert is_sent == (rows <= 6)
    base = torch.zeros_like(x.hidden) if start is None else start
    expected = mixture_add_norm_triton(x._replace(hidden=base), experts, norm, EPS).hidden
    part = group.parts[1, 1, :rows]
    if is_sent:
        words = group.words(expected).view(-1)
        untouched[:, 1, 1, : words.numel()] = words
        assert part.isnan().all()
    else:
        assert torch.equal(part, expected)
    assert torch.equal(group.inboxes, untouched)
    part[:] = float("nan")
    assert group.parts.isnan().all()


@pytest.mark.parametrize("dtype", SOME_DTYPES)
@pytest.mark.parametrize("size", [(1, 2, 64), (5, 3, 100)], ids=str)
@pytest.mark.parametrize("is_placed", [True, False])
def test_combine(size, is_placed, dtype, device):
    rows, count, width = size
    kind = {"dtype": dtype, "device": device}
    parts = normal(rows * count, width, kind=kind)
    residual = normal(rows, 2 * width, kind=kind)[:, width:]
    weights, norm = normal(rows, count, kind=kind), 1 + normal(width, kind=kind, scale=0.3)
    places = torch.randperm(rows * count, generator=torch.Generator().manual_seed(1))
    places = places.view(rows, count).to(device)
    out = combine_triton(parts, places if is_placed else None, weights, residual, norm, EPS)
    taken = parts.double()[places] if is_placed else parts.double().view(rows, count, width)
    mixed = (taken * weights.double()[:, :, None]).sum(1)
    assert_close("hidden", residual.double() + mixed, out.hidden, TOLERANCE[dtype])
    expected = rms_norm_reference(out.hidden.double(), norm.double(), EPS)
    assert_close("scaled", expected, out.scaled, TOLERANCE[dtype])


def test_reference_runs_on_a_cpu():
    """The public function, token by token and expert by expert."""
    kind = {"dtype": torch.float64, "device": torch.device("cpu")}
    read, chosen = torch.zeros(1, dtype=torch.int32), set()
    experts = make_experts(7, 24, 20, kind, QWEN, biases=True)._replace(read=read)
    x, norm = make_stream(5, 24, kind, parts=0), 1 + normal(24, kind=kind, scale=0.3)
    out = ops.mixture_add_norm(x, experts, norm, EPS)
    expected = x.hidden.clone()
    for token in range(5):
        logits = experts.router @ x.scaled[token] + experts.router_bias
        top = torch.softmax(logits, 0).topk(3)
        chosen |= set(top.indices.tolist())
        for weight, expert in zip(top.values / top.values.sum(), top.indices, strict=True):
            both = experts.gate_up[expert] @ x.scaled[token] + experts.gate_up_bias[expert]
            inner = F.silu(both[:20]) * both[20:]
            expected[token] += weight * (experts.down[expert] @ inner + experts.down_bias[expert])
    assert int(read) == len(chosen)
    assert_close("hidden", expected, out.hidden, 1e-12)
    assert_close("scaled", rms_norm_reference(expected, norm, EPS), out.scaled, 1e-12)


IN_BLOCKS = {
    "mxfp4": MXFP4,
    "fp8": Storage("fp8", (128, 128)),
    "fp8-rows": Storage("fp8"),
    "int4": Storage("int4", (1, 128), True, torch.bfloat16),
}


@needs_cuda
@pytest.mark.parametrize("rows", [50, 100, 500, 1100])
@pytest.mark.parametrize("form", IN_BLOCKS)
def test_quantised_layer_of_many_tokens(rows, form, device):
    """Quantised experts of a prompt's tokens, with the tiles of the tables, are read as they are.
    The reference is given the kernel's routes, since rounding may reorder experts."""
    kind = {"dtype": BF16, "device": device}
    experts = make_experts(5, 256, 384, kind, biases=True, **KINDS["clamped"])
    held = [IN_BLOCKS[form].quantised(w.float()) for w in (experts.gate_up, experts.down)]
    plain = {n: w.plain(torch.float64) for n, w in zip(("gate_up", "down"), held, strict=True)}
    exact = wide(experts)._replace(**plain)
    experts = in_tiles_triton(experts._replace(gate_up=held[0], down=held[1]), BF16)
    assert (form == "mxfp4") == is_tiled(experts.gate_up)
    x = make_stream(rows, 256, kind, parts=0)
    norm = torch.ones(256, **kind)
    routes = routes_in(group_triton(x, experts), 5)
    out = mixture_add_norm_triton(x, experts, norm, EPS)
    routes = Routes(routes.experts.to(device), routes.weights.to(device))
    expected = x.hidden.double() + mixture_reference(rows_of(x), routes, exact)
    assert_close("hidden", expected, out.hidden, 1e-2)


def test_quantised_experts_are_read_as_they_are():
    """Weights whose columns share scales in blocks of 128 are never dequantised for a chunk of a
    prompt, and others are from some number of tokens on."""
    size, meta = (4, 256, 256), torch.device("meta")
    int4, fine = (Storage("int4", (1, wide), scales=BF16).on_meta(size) for wide in (128, 32))
    rows, blocks = Storage("fp8").on_meta(size), Storage("fp8", (128, 128)).on_meta(size)
    narrow = Storage("fp8", (1, 48)).on_meta(size)
    tiled = replace(MXFP4, is_tiled=True).on_meta(size)
    plain = torch.empty(size, dtype=BF16, device=meta)
    assert [way_of(w, w) for w in (int4, rows, blocks)] == ["stored"] * 3
    assert [way_of(w, w) for w in (fine, narrow, MXFP4.on_meta(size))] == ["sliced"] * 3
    assert way_of(int4, fine) == way_of(fine, int4) == "sliced"
    assert way_of(int4, plain) == "stored" and way_of(plain, int4) == "plain"
    assert way_of(tiled, tiled) == "tiled"
    for way, most in MANY_TOKENS.items():
        read = [choose_group_tiles(n, 4, 128, 2, way=way) is not None for n in (most, most + 1)]
        assert read == [True, False]
    assert choose_group_tiles(1024, 4, 32, 4, way="stored") is None, "fp32"


def test_ways_by_tokens(monkeypatch):
    """A plan while most experts have no token, then groups; the library once experts have many."""
    kind = {"dtype": torch.float32, "device": torch.device("cpu")}
    experts = make_experts(8, 16, 8, kind, MIXTRAL)
    taken = []
    for name in ("sorted_mixture_add_norm", "grouped_mixture_add_norm", "down_add_norm_triton"):
        monkeypatch.setattr(mixture_triton, name, lambda *_, name=name: taken.append(name))
    for name in ("route_triton", "gate_up_triton", "group_triton"):
        monkeypatch.setattr(mixture_triton, name, lambda *_: None)
    for rows in (3, 4, 256, 257, MANY_TOKENS["plain"] + 1):
        x = make_stream(rows, 16, kind, parts=0)
        mixture_add_norm_triton(x, experts, torch.ones(16), EPS)
    ways = [name.split("_")[0] for name in taken]
    assert ways == ["down", "grouped", "grouped", "sorted", "sorted"]

    # Up to 64 tokens may have an unfinished norm, which the library cannot read.
    taken.clear()
    monkeypatch.setattr(mixture_triton, "plain_triton", lambda weight, _: weight)
    for count, chosen in ((2, 1), (2, 2), (5, 2), (5, 4), (5, 5)):
        experts = make_experts(count, 16, 8, kind, Routing(chosen))
        stored = {n: Storage("fp8").quantised(getattr(experts, n)) for n in ("gate_up", "down")}
        for rows in range(17, FEW_ROWS + 1):
            x = make_stream(rows, 16, kind)
            mixture_add_norm_triton(x, experts, torch.ones(16), EPS)
            mixture_add_norm_triton(x, experts._replace(**stored), torch.ones(16), EPS)
    assert set(taken) == {"grouped_mixture_add_norm"}
