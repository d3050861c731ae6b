"""The kernels that read stored weights, beside products with their plain form in fp64."""

import pytest
import torch
import torch.nn.functional as F
from ops_helpers import DTYPES, TOLERANCE, assert_close, normal
from specdec_kernels import ops
from specdec_kernels.experts.mixture_triton import mixture_add_norm_triton
from specdec_kernels.experts.reference import CLAMPED
from specdec_kernels.linear.one_row_triton import one_row_linear
from specdec_kernels.linear.plain_triton import plain_triton
from specdec_kernels.linear.products_triton import kernel_for
from specdec_kernels.linear.stored import KINDS, Storage, Stored
from specdec_kernels.linear.stored_rows_triton import stored_rows_linear
from specdec_kernels.linear.terms_triton import terms_triton
from specdec_kernels.linear.tile_tables import Tiles
from specdec_kernels.linear.tiles import (
    RowTiles,
    choose_row_tiles,
    choose_stored_tiles,
    choose_terms_tiles,
    fits_lanes,
    slices_for,
)
from torch import Tensor

MINIMA = Storage("int4", (1, 32), scales=torch.float32, has_minima=True)
FORMS = {
    "fp8": (Storage("fp8"), 200),
    "fp8-blocks": (Storage("fp8", (32, 128)), 384),
    "int8-groups": (Storage("int8", (1, 64), scales=torch.bfloat16), 256),
    "int4": (Storage("int4", (1, 128), scales=torch.bfloat16), 384),
    "int4-over": (Storage("int4", (1, 192), scales=torch.bfloat16), 384),
    "int4-rows": (Storage("int4"), 256),
    "int4-rows-zeros": (Storage("int4", has_zeros=True), 256),
    "int4-zeros": (Storage("int4", (1, 32), True, torch.float16), 256),
    "int4-minima": (MINIMA, 2 * 128 + 64),
    "int8-minima": (Storage("int8", (1, 16), scales=torch.float16, has_minima=True), 272),
    "mxfp4": (Storage("mxfp4", (1, 32), scales=torch.uint8), 2 * 128 + 64),
}
HALVES = {  # forms in four bits whose codes terms of x meet
    "int4": FORMS["int4"],
    "int4-block-zeros": (Storage("int4", (1, 128), True, torch.bfloat16), 384),
    "int4-rows": FORMS["int4-rows"],
    "int4-rows-zeros": FORMS["int4-rows-zeros"],
    "int4-wide-zeros": (Storage("int4", (1, 256), True, torch.float16), 512),
}
EPS = 1e-5


def filled(storage: Storage, rows: int, width: int, device: torch.device) -> Stored:
    """Every code that is a number, at random; scales that differ from group to group."""
    generator = torch.Generator().manual_seed(rows + width)
    kind, shape = KINDS[storage.kind], storage.scales_shape((rows, width))
    size = storage.codes_shape((rows, width))
    codes = torch.randint(0, 256, size, generator=generator).to(torch.uint8)
    if storage.kind == "fp8":
        codes = torch.where(codes % 128 == 127, codes - 1, codes)  # not NaN
    scales = 0.01 + torch.rand(shape, generator=generator)
    if storage.scales == torch.uint8:
        scales = torch.randint(120, 130, shape, generator=generator)
    zeros = None
    if storage.has_zeros:
        zeros = torch.randint(0, 16, shape, generator=generator).to(kind.codes)
        zeros -= zeros.dtype.is_signed * 8
    if (
        storage.has_minima
    ):  # like a middle of codes; half floats, whose products with codes are exact
        scales = scales.half()
        zeros = (scales * 16 * torch.rand(shape, generator=generator)).to(storage.scales)
    held = Stored(codes.view(kind.codes), scales.to(storage.scales), zeros, storage)
    return held.copied(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("rows", [1, 7, 13, 40])
def test_products_are_those_with_the_plain_weight(name, rows, dtype, device) -> None:
    storage, width = FORMS[name]
    features = 50 if storage.group[0] == 1 else 96
    weight = filled(storage, features, width, device)
    x = normal(rows, width, dtype=dtype, device=device)
    made = kernel_for("norm", x, weight)
    assert made is not None
    bias = normal(features, dtype=dtype, device=device)
    squares = x.float().square().sum(1, keepdim=True)
    out = made(x, weight, squares=squares, eps=EPS, bias=bias)[0]
    plain = weight.plain(torch.float64)
    factor = (x.double().square().mean(1, keepdim=True) + EPS).rsqrt()
    want = factor * (x.double() @ plain.T) + bias.double()
    assert_close("norm", want, out, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["fp8", "int4-zeros", "int4-minima", "mxfp4"])
@pytest.mark.parametrize(("splits", "early"), [(1, 0), (2, 0), (2, 1024)])
def test_gates_and_sums_of_splits(name, splits, early, dtype, device) -> None:
    storage, width = FORMS[name]
    weight = filled(storage, 2 * 40, width, device)
    tiles = Tiles(8, 16, 128, 1, splits, 0, 4, 3, early)
    tiles = tiles._replace(slices=slices_for(weight, tiles.block_k, tiles.slices))
    x = normal(6, width, dtype=dtype, device=device) / 50
    out = stored_rows_linear(x, weight, tiles, activation="silu")[0]
    gate, up = (x.double() @ weight.plain(torch.float64).T).chunk(2, 1)
    assert_close("gate", F.silu(gate) * up, out, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_next_norm_and_blocks_of_rows(dtype, device) -> None:
    weight = filled(FORMS["int4"][0], 50, 256, device)
    x, residual = (normal(n, w, dtype=dtype, device=device) for n, w in ((20, 256), (20, 50)))
    norm = normal(50, dtype=dtype, device=device).abs()
    tiles = Tiles(8, 16, 128, 1, 2, 0, 4, 3)
    tiles = tiles._replace(slices=slices_for(weight, tiles.block_k, tiles.slices))
    fused = {"residual": residual, "norm_weight": norm}
    out, scaled, squares = stored_rows_linear(x, weight, tiles, **fused)
    want = x.double() @ weight.plain(torch.float64).T + residual.double()
    assert_close("sum", want, out, TOLERANCE[dtype])
    assert_close("scaled", out.double() * norm.double(), scaled, TOLERANCE[dtype])
    assert_close("squares", out.double().square().sum(1), squares.sum(1), 1e-4)


def terms_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """The terms and scales of `terms_triton`, by torch."""
    exponent = torch.frexp(x.float().abs().amax(1).clamp(min=2.0**-119)).exponent
    scales = torch.ldexp(torch.ones_like(exponent, dtype=torch.float32), exponent - 8)
    scaled = x.float() / scales[:, None]
    first = (scaled.view(torch.int32) & -(1 << 20)).view(torch.float32)
    terms = torch.stack((first, scaled - first), 1).to(torch.float8_e4m3fn)
    finite = x.isfinite().all(1)
    return terms, torch.where(finite, scales, float("nan"))


def test_terms_of_rows_are_exact_far_below_the_largest_number(device) -> None:
    x = normal(6, 320, dtype=torch.bfloat16, device=device)
    x[1] *= 2.0**-100
    x[2, 5:] *= 2.0**-9
    x[3] = 0
    x[4, 7], x[5, 9] = float("inf"), float("nan")
    terms, scales, sums = terms_triton(x, summed=64)
    assert sums is not None
    for parts, scale in (terms, scales), terms_of(x):
        off = (parts.double().sum(1) * scale[:, None] - x.double())[:4].abs()
        most = x[:4].double().abs().amax(1, keepdim=True)
        assert (off <= most * 2.0**-16).all()
        assert (off == 0)[x[:4].abs() >= most * 2.0**-9].all()
        assert scale[4:].isnan().all()
    assert torch.equal(terms.view(torch.uint8)[:4], terms_of(x)[0].view(torch.uint8)[:4])
    assert torch.equal(scales[:4], terms_of(x)[1][:4])
    want = (x.double() / terms_of(x)[1][:, None]).unflatten(1, (-1, 64)).sum(2).T
    assert torch.allclose(sums[:, :4].double(), want[:, :4], rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", [*(n for n in FORMS if n.startswith("fp8")), *HALVES])
@pytest.mark.parametrize("activation", ["", "silu"])
def test_products_of_terms(name, activation, device) -> None:
    storage, width = (FORMS | HALVES)[name]
    weight = filled(storage, 2 * 96, width, device)
    tiles = Tiles(16, 64, 128, 1, 2 if activation else 1, 0, 4, 3)
    x = normal(21, width, dtype=torch.bfloat16, device=device) / 50
    squares = x.float().square().sum(1, keepdim=True)
    fused = {"squares": squares, "eps": EPS, "activation": activation}
    out = stored_rows_linear(x, weight, tiles, as_terms=True, **fused)[0]
    factor = (x.double().square().mean(1, keepdim=True) + EPS).rsqrt()
    want = factor * (x.double() @ weight.plain(torch.float64).T)
    if activation:
        gate, up = want.chunk(2, 1)
        want = F.silu(gate) * up
    assert_close("product", want, out, 5e-3)


def test_terms_are_for_bf16_and_codes_that_are_e4m3_from_9_rows_on() -> None:
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    int4 = Storage("int4", (1, 128))
    for rows, storage, dtype, width, expected in (
        (9, Storage("fp8"), bf16, 256, True),
        (8, Storage("fp8"), bf16, 256, False),
        (9, Storage("int8"), bf16, 256, False),
        (9, Storage("fp8"), torch.float16, 256, False),
        (9, int4, bf16, 256, True),
        (8, int4, bf16, 256, False),
        (128, int4, bf16, 256, True),
        (129, int4, bf16, 256, False),
        (9, int4, bf16, 256 + 64, False),  # a shorter last block
        (9, Storage("int4", (1, 64)), bf16, 256, False),  # two scales in a block
    ):
        x, weight = torch.empty(rows, width, dtype=dtype), filled(storage, 8, width, cpu)
        assert (choose_terms_tiles("norm", x, weight) is not None) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_a_plain_weight_is_the_reference_bit_for_bit(name, dtype, device) -> None:
    storage, width = FORMS[name]
    weight = filled(storage, 96, width, device)
    assert torch.equal(plain_triton(weight, dtype), weight.plain(dtype))


# Of one row of a weight, by the scales' dtype. As powers of two they are 2^-127, 2^127 and 2^-126;
# kernels take the first for 0. In the interpreter denormal bf16 numbers are others.
ODD_SCALES = {
    "zero": {torch.uint8: 0},
    "inf": {torch.uint8: 254, None: float("inf")},
    "denormal": {torch.uint8: 1, torch.float16: 6e-8, None: 1e-42},
}
ODD_FORMS = ("fp8", "int4-rows", "int4-zeros", "int4-minima", "int8-minima", "mxfp4")


def of_kernel(way: str, x: Tensor, weight: Stored) -> Tensor:
    """The product by one of the kernels that read stored weights."""
    if way == "plain":
        return x @ plain_triton(weight, x.dtype).T
    if way == "one row":
        return one_row_linear(x, weight, RowTiles(2, 128, 2))[0]
    if way == "terms":
        return stored_rows_linear(x, weight, Tiles(16, 64, 128, 1, 1, 0, 4, 3), as_terms=True)[0]
    made = kernel_for("add", x, weight)
    assert made is not None
    return made(x, weight)[0]


WAYS = [(way, name) for way in ("rows", "one row", "plain") for name in ODD_FORMS]


@pytest.mark.parametrize("kind", ODD_SCALES)
@pytest.mark.parametrize(("way", "name"), [*WAYS, ("terms", "fp8"), ("terms", "int4-block-zeros")])
def test_odd_scales_are_multiplied_like_others(way, name, kind, device) -> None:
    """x is so large that products with denormal scales are normal numbers."""
    storage, width = (FORMS | HALVES)[name]
    weight, odd = filled(storage, 32, width, device), ODD_SCALES[kind]
    weight.scales[3] = odd.get(storage.scales, odd.get(None, 0))
    dtype = torch.bfloat16 if way == "terms" else torch.float32
    rows = {"one row": 1, "terms": 21}.get(way, 2)
    x = 2.0**60 * (normal(rows, width, dtype=dtype, device=device).abs() + 1)
    out = of_kernel(way, x, weight)
    want = x.double() @ weight.plain(torch.float64).T
    kept, tolerance = torch.arange(32, device=device) != 3, 5e-3 if way == "terms" else 1e-5
    assert_close("others", want[:, kept], out[:, kept], tolerance)
    if kind == "inf":
        assert not out[:, 3].isfinite().any()
    elif (name, kind) == ("mxfp4", "zero"):
        assert (out[:, 3] == 0).all()
    else:
        assert torch.allclose(out[:, 3].double(), want[:, 3], rtol=100 * tolerance)


def test_forms_that_the_kernel_does_not_read_have_no_tiles() -> None:
    x = torch.empty(1, 48)
    cpu = torch.device("cpu")
    for storage in (Storage("int8", (1, 64), True), Storage("int4", has_minima=True)):
        assert choose_stored_tiles("norm", x, storage.quantised(torch.ones(8, 128))) is None
    for storage in (Storage("int4", has_minima=True), Storage("int4", (1, 8))):
        assert choose_row_tiles("norm", x, storage.quantised(torch.ones(8, 128))) is None
    assert choose_stored_tiles("norm", x, filled(Storage("int4", (1, 8)), 8, 48, cpu)) is None
    assert (
        choose_stored_tiles("norm", torch.empty(300, 128), filled(Storage("fp8"), 8, 128, cpu))
        is None
    )


# The kernels of few tokens and of groups scale rows, blocks and blocks with zeros each in its way.
FEW_AND_GROUPED = [
    pytest.param(rows, name, marks=[pytest.mark.slow] * ((rows, name) == (2, "mxfp4")))
    for rows in (2, 18)
    for name in ("fp8", "int4-zeros", "mxfp4", *["int4-minima"] * (rows == 2))
]


@pytest.mark.parametrize("dtype", DTYPES[::2])
@pytest.mark.parametrize(("num_rows", "name"), FEW_AND_GROUPED)
def test_experts_are_those_with_plain_weights(name, num_rows, dtype, device) -> None:
    """Few tokens and grouped ones; those of mxfp4 are gpt-oss's."""
    storage, width = FORMS[name]
    count, inner = 5, width
    kept = {}
    for field, rows in (("gate_up", 2 * inner), ("down", width)):
        weight = filled(storage, count * rows, width, device)
        if name == "fp8":
            weight.scales.mul_(0.01)  # sums within the range of fp16
        parts = [part.unflatten(0, (count, -1)) for part in weight.tensors]
        kept[field] = Stored(parts[0], parts[1], parts[2] if parts[2:] else None, storage)
    more: dict[str, object] = {}
    if name == "mxfp4":
        more = {"activation": CLAMPED, "interleaved": True, "slope": 1.7, "limit": 7.0}
        biases = (2 * inner, width)
        for field, size in zip(("gate_up_bias", "down_bias"), biases, strict=True):
            more[field] = normal(count, size, dtype=dtype, device=device)
    router = normal(count, width, dtype=dtype, device=device)
    routing = ops.Routing(1 if num_rows < 10 else 2)
    hidden = normal(num_rows, width, dtype=dtype, device=device)
    x = ops.Normed(hidden, hidden / 50, None, EPS)
    norm = torch.ones(width, dtype=dtype, device=device)
    plain = {field: weight.plain(torch.float64) for field, weight in kept.items()}
    experts = ops.Experts(router, routing=routing, **kept, **more)
    got = mixture_add_norm_triton(x, experts, norm, EPS)
    wide = [t.double() if isinstance(t, Tensor) else t for t in x]
    double = {k: v.double() if isinstance(v, Tensor) else v for k, v in more.items()}
    experts = ops.Experts(router.double(), routing=routing, **plain, **double)
    want = ops.mixture_add_norm.reference(ops.Normed(*wide), experts, norm.double(), EPS)
    assert_close("hidden", want.hidden, got.hidden, TOLERANCE[dtype])


@pytest.mark.parametrize(("num_rows", "chosen"), [(2, 1), (26, 2)])
def test_experts_that_end_inside_a_group_of_rows(num_rows, chosen, device) -> None:
    """The next expert's groups do not begin at a multiple of 48 rows. Of 26 rows, each chooses both
    experts, which has no tiles for stored weights."""
    kind = {"dtype": torch.float32, "device": device}
    storage, width = Storage("fp8", (48, 128)), 128
    gate_up, down = (normal(2, rows, width, **kind) for rows in (96, width))
    scale = torch.arange(1, width + 1, device=device)[:, None]
    kept = {
        "gate_up": storage.quantised(gate_up),
        "down": storage.quantised(down[..., :48] * scale),
    }
    plain = {name: weight.plain(torch.float32) for name, weight in kept.items()}
    hidden, norm = normal(num_rows, width, **kind), torch.ones(width, **kind)
    x = ops.Normed(hidden, hidden, hidden.square().sum(1, keepdim=True), EPS)
    router = normal(2, width, **kind)
    want, got = (
        mixture_add_norm_triton(x, ops.Experts(router, routing=ops.Routing(chosen), **w), norm, EPS)
        for w in (plain, kept)
    )
    assert_close("hidden", want.hidden, got.hidden, TOLERANCE[torch.float32])


LANES = {
    "fp8": (Storage("fp8"), 416),
    "fp8-blocks": (Storage("fp8", (32, 128)), 384),
    "int8-groups": (Storage("int8", (1, 64), scales=torch.bfloat16), 320),
    "int4-zeros": (Storage("int4", (1, 128), True, torch.float16), 640),
    "int4-rows": (Storage("int4", has_zeros=True), 320),
    "int4-fine-zeros": (Storage("int4", (1, 16), True, torch.float16), 320),
    "int4-odd": (Storage("int4", (1, 96), scales=torch.float16), 352),
    "int4-minima": FORMS["int4-minima"],
    "int8-zeros": (Storage("int8", (1, 64), True, torch.float16), 320),
    "int8-minima": (FORMS["int8-minima"][0], 272),
    "mxfp4": FORMS["mxfp4"],
}


@pytest.mark.parametrize("dtype", DTYPES[::2])
@pytest.mark.parametrize("name", LANES)
def test_one_row_from_registers(name, dtype, device) -> None:
    storage, width = LANES[name]
    tiles = RowTiles(2, 128, 2)
    features = 90 if storage.group[0] == 1 else 96
    weight = filled(storage, features, width, device)
    assert fits_lanes(weight)
    x, residual, norm = (
        normal(1, n, dtype=dtype, device=device) for n in (width, features, features)
    )
    fused = {"residual": residual, "norm_weight": norm[0]}
    out, scaled, squares = one_row_linear(x, weight, tiles, **fused)
    plain = weight.plain(torch.float64)
    assert_close("sum", x.double() @ plain.T + residual.double(), out, TOLERANCE[dtype])
    assert_close("scaled", out.double() * norm.double(), scaled, TOLERANCE[dtype])
    assert_close("squares", out.double().square().sum(1), squares.sum(1), 1e-4)
    squares = x.float().square().sum(1, keepdim=True)
    out = one_row_linear(x, weight, tiles, squares=squares, eps=EPS, activation="silu")[0]
    factor = (x.double().square().mean(1, keepdim=True) + EPS).rsqrt()
    gate, up = (factor * (x.double() @ plain.T)).chunk(2, 1)
    assert_close("gate", F.silu(gate) * up, out, TOLERANCE[dtype])
