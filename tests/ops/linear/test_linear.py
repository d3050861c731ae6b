import pytest
import torch
import torch.nn.functional as F
from ops_helpers import DTYPES, TOLERANCE, assert_close, needs_cuda
from specdec_kernels import ops
from specdec_kernels.gpu import CAPABILITY, MULTIPROCESSORS, SHARED_MEMORY
from specdec_kernels.launch_triton import counters
from specdec_kernels.linear import norm_triton, products_triton
from specdec_kernels.linear import tiles as tiles_module
from specdec_kernels.linear.few_rows_triton import few_rows_linear
from specdec_kernels.linear.one_row_triton import one_row_linear
from specdec_kernels.linear.reference import Normed, rms_norm_reference
from specdec_kernels.linear.tile_tables import ANY, TABLES
from specdec_kernels.linear.tiles import (
    FEW_ROWS,
    NARROW,
    RowTiles,
    Tiles,
    at_once,
    choose_row_tiles,
    choose_tiles,
    resident,
    spread,
    tiles_for,
)
from specdec_kernels.tiles import Case
from torch import Tensor

EPS = 1e-5


def normal(*size: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return (torch.randn(size, generator=generator) * scale).to(device, dtype)


def norm_of(x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm_reference(x.double(), weight.double(), EPS)


# T, K, N
SIZES = [(1, 64, 32), (3, 96, 50), (6, 200, 34), (16, 130, 48), (17, 72, 40), (70, 64, 20)]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_layer(size, activation, dtype, device):
    check_layer(size, activation, dtype, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kinds", [("gate",), ("add", "norm"), ("norm", "gate", "add")], ids=str)
def test_layer_of_more_rows_by_a_table_that_has_them(kinds, dtype, device, monkeypatch):
    """Products of the table and the library's follow each other in each way. In fp32 all are the
    library's."""
    case = Case(Tiles(128, 16, 32, 1, 1, 0, 4, 3), (128, ANY), (0,))
    table = {
        device: found | {kind: (case, *found[kind]) for kind in kinds}
        for device, found in TABLES.items()
    }
    monkeypatch.setattr(tiles_module, "TABLES", table)
    tiles_module.tiles_for.cache_clear()
    try:
        x = torch.empty(FEW_ROWS + 6, 64, dtype=dtype, device="meta")
        weight = torch.empty(40, 64, dtype=dtype, device="meta")
        chosen = [k for k in ("norm", "gate", "add") if choose_tiles(k, x, weight) is not None]
        assert set(chosen) == (set() if dtype == torch.float32 else set(kinds))
        check_layer((FEW_ROWS + 6, 64, 20), "silu", dtype, device)
    finally:
        tiles_module.tiles_for.cache_clear()


def check_layer(size, activation, dtype, device):
    """Tests output projection, norm, gated MLP and the next layer's projection in sequence."""
    rows, width, features = size
    kind = {"dtype": dtype, "device": device}
    x, residual = normal(rows, width, **kind), normal(rows, features, **kind)
    out_weight = normal(features, width, scale=width**-0.5, **kind)
    gate_up = normal(2 * width, features, scale=features**-0.5, **kind)
    down = normal(features, width, scale=width**-0.5, **kind)
    last = normal(width + 1, features, scale=features**-0.5, **kind)
    norms = [1 + normal(features, scale=0.3, **kind) for _ in range(2)]
    biases = [normal(features, **kind), normal(width + 1, **kind)]

    first = products_triton.linear_add_norm_triton(
        x, out_weight, residual, norms[0], EPS, bias=biases[0]
    )
    inner = products_triton.norm_gate_up_triton(first, gate_up, activation)
    second = products_triton.linear_add_norm_triton(inner, down, first.hidden, norms[1], EPS)
    out = products_triton.norm_linear_triton(second, last, biases[1])

    tolerance = TOLERANCE[dtype]
    product = residual.double() + F.linear(x.double(), out_weight.double())
    added = products_triton.linear_add_triton(x, out_weight, residual)
    assert_close("added", product, added, tolerance)
    assert_close("hidden", product + biases[0].double(), first.hidden, tolerance)
    # Each step starts from the previous step's result, so errors do not add up.
    mlp = F.linear(norm_of(first.hidden, norms[0]), gate_up.double())
    assert_close("inner", ops.gate.reference(mlp, activation), inner, tolerance)
    hidden = first.hidden.double() + F.linear(inner.double(), down.double())
    assert_close("second hidden", hidden, second.hidden, tolerance)
    expected = F.linear(norm_of(second.hidden, norms[1]), last.double(), biases[1].double())
    assert_close("out", expected, out, tolerance)
    assert all(t.dtype == dtype for t in (first.hidden, inner, second.scaled, out))


TILES = [
    Tiles(16, 16, 32, 1, 1, 0, 4, 3),
    Tiles(16, 32, 64, 4, 1, 0, 4, 3),
    Tiles(16, 16, 32, 2, 3, 0, 4, 3),
    Tiles(32, 16, 64, 1, 2, 0, 4, 3),
    Tiles(16, 16, 32, 1, 1, 0, 4, 3, early=64),
    Tiles(16, 32, 64, 4, 1, 0, 4, 3, early=128),
    Tiles(8, 16, 64, 4, 1, 0, 4, 3),
    Tiles(8, 32, 32, 1, 3, 0, 4, 3),
    Tiles(8, 16, 64, 4, 1, 0, 4, 3, early=64),
]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize("size", [(1, 192, 32), (7, 200, 50), (16, 72, 33)], ids=str)
def test_tiles_do_not_change_the_result(size, tiles, dtype, device):
    rows, width, features = size
    rows = min(rows, tiles.block_m)
    kind = {"dtype": dtype, "device": device}
    # Rows that lie apart, as in a slice of a wider tensor.
    x = normal(rows, 2 * width, **kind)[:, :width]
    residual = normal(rows, 3 * features, **kind)[:, :features]
    longer = normal(features + 1, width, scale=width**-0.5, **kind)
    longer[features] = float("nan")  # what lies behind the weight is not read
    weight = longer[:features]
    norm, bias = normal(features, **kind), normal(features + 1, **kind)[1:]
    squares = normal(rows, 5, dtype=torch.float32, device=device).square() * width
    steps = {"squares": squares, "eps": EPS, "residual": residual, "norm_weight": norm}
    for _ in range(2):
        out, scaled, parts = few_rows_linear(x, weight, tiles, bias=bias, **steps)
        factor = torch.rsqrt(squares.double().sum(1, keepdim=True) / width + EPS)
        product = F.linear(x.double() * factor, weight.double(), bias.double())
        expected = residual.double() + product
        assert_close("out", expected, out, TOLERANCE[dtype])
        assert_close("scaled", out.double() * norm.double(), scaled, TOLERANCE[dtype])
        assert_close("squares", out.double().square().sum(1), parts.sum(1), 1e-5)
        assert not counters(device).any()


@pytest.mark.parametrize("dtype", DTYPES[1:])  # in fp32 so many rows are cuBLAS'
@pytest.mark.parametrize("product", [(2048, 8192), (4096, 14336)], ids=str)
@pytest.mark.parametrize("size", [(128, 256, 131), (65, 136, 70)], ids=str)
def test_gate_of_more_rows(size, product, dtype, device):
    """A small gate, with the tiles of the larger `product`."""
    rows, width, features = size
    kind = {"dtype": dtype, "device": device}
    tiles = tiles_for(CAPABILITY, "gate", 128, *product)
    x = normal(rows, 2 * width, **kind)[:, :width]
    longer = normal(2 * features + 1, width, scale=width**-0.5, **kind)
    longer[-1] = float("nan")  # what lies behind the weight is not read
    weight = longer[:-1]
    into = torch.full((rows, features), float("nan"), **kind)
    few_rows_linear(x, weight, tiles, activation="silu", into=into)
    expected = ops.gate.reference(F.linear(x.double(), weight.double()), "silu")
    assert_close("gate", expected, into, TOLERANCE[dtype])


ROW_TILES = [
    RowTiles(8, 64, 4),  # a chunk that the row fills
    RowTiles(16, 256, 4),
    RowTiles(1, 128, 2),
    RowTiles(4, 16, 8),  # more threads than loads
]


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tiles", ROW_TILES, ids=str)
@pytest.mark.parametrize("activation", ["", "silu"])
@pytest.mark.parametrize("size", [(192, 32), (200, 33)], ids=str)
def test_one_row(size, activation, tiles, dtype, device):
    width, features = size
    kind = {"dtype": dtype, "device": device}
    x = normal(1, 2 * width, **kind)[:, :width]
    weight = normal(features * (2 if activation else 1), width, scale=width**-0.5, **kind)
    bias, norm = normal(features, **kind), normal(features, **kind)
    residual = None if activation else normal(1, 3 * features, **kind)[:, :features]
    squares = normal(1, 5, dtype=torch.float32, device=device).square() * width
    out, scaled, parts = one_row_linear(
        x,
        weight,
        tiles,
        squares=squares,
        eps=EPS,
        bias=None if activation else bias,
        activation=activation,
        residual=residual,
        norm_weight=norm,
    )
    factor = torch.rsqrt(squares.double().sum() / width + EPS)
    expected = F.linear(x.double() * factor, weight.double())
    if residual is None:
        expected = ops.gate.reference(expected)
    else:
        expected = expected + bias.double() + residual.double()
    assert_close("out", expected, out, TOLERANCE[dtype])
    assert_close("scaled", out.double() * norm.double(), scaled, TOLERANCE[dtype])
    assert_close("squares", out.double().square().sum(1), parts.sum(1), 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [20, 64, 130, 896, 1024, 1536, 2048, 2304, 3072, 8960])
def test_tiles_of_one_row(width, dtype):
    for kind in ("norm", "gate", "add"):
        for features in (width,) if kind == "norm" else (48, 896, 2048, 3072):
            weight = torch.empty(features * (1 + (kind == "gate")), width, device="meta")
            x = torch.empty(1, width, dtype=dtype, device="meta")
            for rows in (0, 2):
                assert choose_row_tiles(kind, x.expand(2, -1)[:rows], weight) is None
            tiles = choose_row_tiles(kind, x, weight)
            if (features if kind == "add" else width) * x.element_size() >= NARROW:
                assert tiles is None
                continue
            threads = 32 * tiles.num_warps
            assert tiles.block_n * tiles.chunk * x.element_size() >= 16 * threads, "idle threads"
            loaded = tiles.block_n * (width + -width % tiles.chunk) * x.element_size() / threads
            assert loaded <= 384 or tiles.block_n == 1


def test_logits_of_one_row_are_not_cut_as_a_layer():
    x = torch.empty(1, 1024, dtype=torch.bfloat16, device="meta")
    assert choose_row_tiles("norm", x, torch.empty(4096, 1024, device="meta")) is not None
    assert choose_row_tiles("norm", x, torch.empty(32000, 1024, device="meta")) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 100), (2, 3, 24)], ids=str)
def test_rms_norm(shape, dtype, device):
    x, weight = (
        normal(*shape, dtype=dtype, device=device),
        normal(shape[-1], dtype=dtype, device=device),
    )
    out = norm_triton.rms_norm_triton(x, weight, EPS)
    assert_close("out", norm_of(x, weight), out, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (5, 100), (3, 2048)], ids=str)
def test_norm_of_a_projection_before_it_is_added(shape, dtype, device):
    """Weights are fp32, like Gemma's 1 + g; x is rounded when normed and when added."""
    kind = {"dtype": dtype, "device": device}
    wide = {"dtype": torch.float32, "device": device}
    # Rows that lie apart, at a scale where the epsilon matters.
    x = normal(shape[0], 2 * shape[1], scale=1e-3, **kind)[:, shape[1] :]
    residual = normal(*shape, **kind)
    post, norm = 1 + normal(shape[1], **wide), 1 + normal(shape[1], **wide)
    out = norm_triton.add_norm_triton(x, residual, norm, EPS, post)
    expected = residual.double() + norm_of(x, post)
    assert_close("hidden", expected, out.hidden, TOLERANCE[dtype])
    assert_close("scaled", norm_of(out.hidden, norm), out.scaled, TOLERANCE[dtype])
    reference = ops.add_norm(x.cpu(), residual.cpu(), norm.cpu(), EPS, post.cpu())
    assert reference.hidden.dtype == reference.scaled.dtype == out.scaled.dtype == dtype
    assert_close("reference", expected.cpu(), reference.hidden, TOLERANCE[dtype])
    assert_close(
        "scaled", norm_of(reference.hidden, norm.cpu()), reference.scaled, TOLERANCE[dtype]
    )


def test_no_rows(device):
    kind = {"dtype": torch.float32, "device": device}
    out = products_triton.linear_triton(normal(0, 40, **kind), normal(24, 40, **kind))
    assert out.shape == (0, 24)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_into_given_memory(dtype, device):
    for rows in (2, FEW_ROWS + 1):
        x = normal(rows, 40, dtype=dtype, device=device)
        weight = normal(24, 40, dtype=dtype, device=device, scale=40**-0.5)
        into = torch.full((rows + 1, 24), float("nan"), dtype=dtype, device=device)
        out = products_triton.linear_triton(x, weight, into=into[:rows])
        assert out.data_ptr() == into.data_ptr() and into[rows].isnan().all()
        assert_close("out", F.linear(x.double(), weight.double()), out, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_given", [False, True], ids=["new", "given"])
@pytest.mark.parametrize(
    "size", [(1, 40, 24), (1, 72, 33), (5, 130, 50), (FEW_ROWS + 1, 40, 17)], ids=str
)
def test_linear_adds_the_bias(size, is_given, dtype, device):
    """By each kernel and by the library; `ops.linear` does it on a CPU."""
    rows, width, features = size
    kind = {"dtype": dtype, "device": device}
    x, weight = normal(rows, width, **kind), normal(features, width, scale=width**-0.5, **kind)
    bias = normal(features, **kind)
    into = torch.full((rows, features), float("nan"), **kind) if is_given else None
    out = products_triton.linear_triton(x, weight, bias, into)
    assert into is None or out.data_ptr() == into.data_ptr()
    expected = F.linear(x.double(), weight.double(), bias.double())
    assert_close("out", expected, out, TOLERANCE[dtype])
    assert_close(
        "reference", expected.cpu(), ops.linear(x.cpu(), weight.cpu(), bias.cpu()), TOLERANCE[dtype]
    )


def test_norm_then_product(device):
    kind = {"dtype": torch.float32, "device": device}
    x, norm = normal(5, 48, **kind), normal(48, **kind)
    weight = normal(70, 48, scale=48**-0.5, **kind)
    out = products_triton.norm_linear_triton(
        Normed(x, norm_triton.rms_norm_triton(x, norm, EPS), None, EPS), weight
    )
    assert_close("out", F.linear(norm_of(x, norm), weight.double()), out, 1e-5)


@pytest.mark.parametrize("rows", [1, 3])
def test_fp16_norms_are_finite_where_the_stream_times_the_weight_is_not(rows, device):
    kind = {"dtype": torch.float16, "device": device}
    residual, x = normal(rows, 48, **kind), normal(rows, 24, **kind)
    norm, weight = torch.ones(48, **kind), normal(48, 24, **kind)
    residual[:, 7], norm[7] = 3000.0, 30.0
    stream = products_triton.linear_add_norm_triton(x, weight, residual, norm, EPS)
    assert stream.hidden.isfinite().all()
    last = normal(40, 48, scale=48**-0.5, **kind)
    expected = F.linear(norm_of(stream.hidden, norm), last.double())
    out = products_triton.norm_linear_triton(stream, last)
    assert_close("out", expected, out, TOLERANCE[torch.float16])


def test_references_agree_with_torch():
    """`ops` on CPU tensors compute a Llama layer without attention like torch."""
    kind = {"dtype": torch.float64, "device": torch.device("cpu")}
    x, weight, residual = normal(3, 16, **kind), normal(8, 16, **kind), normal(3, 8, **kind)
    norm, gate_up = normal(8, **kind), normal(12, 8, **kind)
    stream = ops.linear_add_norm(x, weight, residual, norm, EPS)
    assert isinstance(stream, Normed) and stream.squares is None
    hidden = residual + x @ weight.T
    normed = F.rms_norm(hidden, (8,), norm, EPS)
    assert_close("hidden", hidden, stream.hidden, 1e-12)
    again = ops.add_norm(ops.linear(x, weight), residual, norm, EPS)
    assert_close("add_norm", stream.hidden, again.hidden, 1e-12)
    assert_close("add_norm", stream.scaled, again.scaled, 1e-12)
    assert_close("scaled", normed, stream.scaled, 1e-12)
    gate, up = (normed @ gate_up.T).chunk(2, 1)
    assert_close("gate", F.silu(gate) * up, ops.norm_gate_up(stream, gate_up), 1e-12)
    start = Normed(hidden, ops.rms_norm(hidden, norm, EPS), None, EPS)
    assert_close("norm_linear", normed @ gate_up.T, ops.norm_linear(start, gate_up), 1e-12)
    assert_close("rms_norm", normed, ops.rms_norm(hidden, norm, EPS), 1e-12)


def test_many_rows_go_to_the_library():
    weight = torch.empty(64, 32)
    assert choose_tiles("norm", torch.empty(FEW_ROWS, 32), weight) is not None
    assert choose_tiles("norm", torch.empty(FEW_ROWS + 1, 32), weight) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 9, 16, 17, 64])
def test_buffers_fit_and_loads_stay_inside(rows, dtype):
    for kind in ("norm", "gate", "add"):
        for width in (20, 64, 512, 896, 1000, 1024, 2048, 3584, 4096, 7168, 8192, 14336):
            for features in (48, 768, 2048, 3072, 4096, 7168, 8192, 14336, 128256):
                weight = torch.empty(features * (1 + (kind == "gate")), width, device="meta")
                x = torch.empty(rows, width, dtype=dtype, device="meta")
                tiles = choose_tiles(kind, x, weight)
                assert rows <= tiles.block_m and tiles.prefetch <= width
                assert tiles.prefetch == 0 or tiles.prefetch * x.element_size() >= 128
                assert tiles.early % tiles.block_k == 0 and tiles.early <= width
                stage = (1 + (kind == "gate")) * tiles.block_n + tiles.block_m
                stage *= tiles.block_k * x.element_size()
                assert (tiles.num_stages - 1) * stage <= 210 * 1024


def test_few_programs_get_a_multiprocessor_each():
    tiles = Tiles(16, 32, 128, 1, 1, 0, 4, 3)
    used = (spread(tiles, 128, 2).num_stages - 1) * (16 + 32) * 128 * 2
    assert used < 227 * 1024 < 2 * used
    assert spread(tiles, 133, 2) == tiles
    deep = tiles._replace(num_stages=15)
    assert spread(deep, 128, 2) == deep


def test_programs_that_nearly_fit_all_run_at_once():
    """Models of width 5120 get smaller tiles; the measured tiles of the 8B do not change."""

    def tiles_of(kind: str, features: int, width: int) -> Tiles:
        x = torch.empty(6, width, dtype=torch.bfloat16, device="meta")
        return choose_tiles(kind, x, torch.empty(features, width, device="meta"))

    for kind, features, width in (("norm", 7168, 5120), ("add", 5120, 5120), ("add", 5120, 13824)):
        tiles = tiles_of(kind, features, width)
        assert features // tiles.block_n <= resident(tiles, 2)
        assert tiles.num_stages >= 3 and tiles.early % tiles.block_k == 0
    assert tiles_of("norm", 6144, 4096) == Tiles(8, 16, 512, 4, 1, 256, 4, 3, 512)
    for width in (4096, 14336):
        assert tiles_of("add", 4096, width) == Tiles(8, 16, 256, 4, 1, 512, 4, 6, 512)


@pytest.mark.parametrize("rows", [17, 64])
def test_programs_of_many_rows_do_not_come_in_a_turn_and_a_few(rows):
    """Layers that end in residual streams of 2048 to 8192 run in one full wave of programs."""
    for width, inner in ((2048, 8192), (3584, 18944), (4096, 14336), (5120, 13824), (8192, 28672)):
        for depth in (width, inner):
            x = torch.empty(rows, depth, dtype=torch.bfloat16, device="meta")
            tiles = choose_tiles("add", x, torch.empty(width, depth, device="meta"))
            programs = width // tiles.block_n * tiles.splits
            assert MULTIPROCESSORS // 2 < programs <= resident(tiles, 2), (width, depth, tiles)


def test_nothing_is_given_up_for_waves_that_are_nearly_full_or_cannot_be_one():
    tiles = Tiles(8, 16, 256, 4, 1, 512, 4, 6, 512)
    assert resident(tiles, 2) == 2 * MULTIPROCESSORS
    for programs in (264, 430, 528, 10_000):
        assert at_once(tiles, programs, 2) == tiles, programs
    for programs in (265, 396):
        assert at_once(tiles, programs, 2) == tiles._replace(num_stages=5)
    assert at_once(tiles, 265, 2, SHARED_MEMORY // 8) == tiles, "none fits such a GPU as it is"


@needs_cuda
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 6, 16, 33, 64, 100])
@pytest.mark.parametrize(
    ("width", "heads", "inner"),
    [
        (4096, 6144, 14336),
        (5120, 7168, 13824),
        (3584, 4608, 18944),
        (2048, 3072, 8192),
        (896, 1152, 4864),
    ],
)
def test_large(rows, width, heads, inner, dtype, device):
    kind = {"dtype": dtype, "device": device}
    x, residual = normal(rows, width, **kind), normal(rows, width, **kind)
    square = normal(width, width, scale=width**-0.5, **kind)
    gate_up = normal(2 * inner, width, scale=width**-0.5, **kind)
    down = normal(width, inner, scale=inner**-0.5, **kind)
    qkv = normal(heads, width, scale=width**-0.5, **kind)
    norm = 1 + normal(width, scale=0.3, **kind)
    for _ in range(3):
        first = ops.linear_add_norm(x, square, residual, norm, EPS)
        inside = ops.norm_gate_up(first, gate_up)
        second = ops.linear_add_norm(inside, down, first.hidden, norm, EPS)
        out = ops.norm_linear(second, qkv)
        tolerance = TOLERANCE[dtype]
        hidden = residual.double() + F.linear(x.double(), square.double())
        assert_close("hidden", hidden, first.hidden, tolerance)
        mlp = ops.gate.reference(F.linear(norm_of(first.hidden, norm), gate_up.double()))
        assert_close("inner", mlp, inside, tolerance)
        hidden = first.hidden.double() + F.linear(inside.double(), down.double())
        assert_close("second hidden", hidden, second.hidden, tolerance)
        expected = F.linear(norm_of(second.hidden, norm), qkv.double())
        assert_close("out", expected, out, tolerance)
