"""Products with stored weights beside those with their plain form, and cuts of stored weights."""

from collections.abc import Callable, Iterator

import pytest
import torch
from ops_helpers import DTYPES, TOLERANCE, assert_close, normal
from specdec_kernels import ops
from specdec_kernels.experts.mixture_triton import mixture_add_norm_triton
from specdec_kernels.linear import products_triton
from specdec_kernels.linear.plain_triton import plain_triton
from specdec_kernels.linear.stored import (
    FP8,
    INT4,
    INT8,
    KINDS,
    MXFP4,
    Storage,
    Stored,
    packed,
    unpacked,
)
from torch import Tensor

from tests.stored_kind import PAIRS, known

EPS = 1e-5
GROUPS = [(1, 0), (1, 32), (16, 32), (24, 48)]


@pytest.fixture(autouse=True)
def kind() -> Iterator[None]:
    with known():
        yield


def stored(*size: int, group: tuple[int, int], device: object = "cpu") -> Stored:
    """Scales differ from group to group."""
    rows = torch.logspace(-1, 1, size[-2])[:, None] * torch.logspace(-1, 1, size[-1])
    found = Storage(PAIRS, group).quantised(normal(*size) * rows * size[-1] ** -0.5)
    return found.copied(torch.device(device))


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("size", [(48, 96), (50, 72), (3, 32, 64)], ids=str)
def test_plain_is_each_code_times_the_scale_of_its_group(size, group) -> None:
    weight = stored(*size, group=group)
    high, wide = group[0], group[1] or size[-1]
    assert weight.shape == size
    plain, codes = weight.plain(torch.float32), weight.codes.view(torch.int8)
    for row in range(size[-2]):
        for column in range(size[-1]):
            scale = weight.scales[..., row // high, column // wide]
            assert torch.equal(plain[..., row, column], codes[..., row, column] * scale)
    assert len(weight.scales.unique()) > 2 or weight.scales.numel() <= 2
    assert weight.num_bytes == weight.storage.num_bytes(size)
    assert weight.num_bytes == codes.numel() + 4 * weight.scales.numel()
    assert_close("numbers", plain, normal(*size) * 0 + plain, 0.0)


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_quantising_loses_half_a_step_at_most(group) -> None:
    numbers = normal(50, 70)
    found = Storage(PAIRS, group).quantised(numbers)
    steps = found.storage.of_each(found.scales, numbers.shape)
    assert ((found.plain(torch.float32) - numbers).abs() <= 0.5001 * steps).all()
    assert (found.codes.view(torch.int8).abs() == 127).any()


def test_zeros_are_taken_away_first() -> None:
    weight = stored(4, 64, group=(1, 32))
    zeros = torch.arange(8, dtype=torch.uint8).view(4, 2)
    shifted = Stored(weight.codes, weight.scales, zeros, Storage(PAIRS, (1, 32), has_zeros=True))
    codes = weight.codes.view(torch.int8).float() - zeros.repeat_interleave(32, 1)
    assert torch.equal(shifted.plain(torch.float32), codes * weight.scales.repeat_interleave(32, 1))
    assert shifted.num_bytes == shifted.storage.num_bytes((4, 64)) == weight.num_bytes + 8
    part = shifted.rows(1, 3).columns(32, 64)
    assert torch.equal(part.plain(torch.float32), shifted.plain(torch.float32)[1:3, 32:])
    both = Stored.joined([part, part]).plain(torch.float32)
    assert torch.equal(both, torch.cat([part.plain(torch.float32)] * 2))


@pytest.mark.parametrize("columns", [128, 256, 64, 192, 2, 130, 2880])
def test_bytes_hold_two_columns_of_a_block(columns: int) -> None:
    numbers = torch.randint(16, (3, columns), generator=torch.Generator().manual_seed(columns))
    codes = packed(numbers.to(torch.uint8))
    assert codes.shape == (3, columns // 2)
    for column in range(columns):
        first = column // 128 * 128
        half = min(128, columns - first) // 2
        place = first // 2 + (column - first) % half
        is_high = (column - first) // half
        assert torch.equal(codes[:, place] >> 4 * is_high & 15, numbers[:, column]), column
    assert torch.equal(unpacked(codes), numbers)


@pytest.mark.parametrize("columns", [32, 96, 128, 160, 320, 448])
def test_tiles_have_the_codes_and_scales_of_32_rows_and_128_columns(columns, device) -> None:
    weight = KEPT[-1].quantised(normal(3, 64, columns)).copied(device)
    tiled = weight.tiled()
    assert tiled.storage != weight.storage and tiled.num_bytes == weight.num_bytes
    for ours, theirs, of_block in (
        (weight.codes, tiled.codes, 64),
        (weight.scales, tiled.scales, 4),
    ):
        place, (rows, width) = 0, (3 * 64, ours.shape[-1])
        for row in range(0, rows, 32):
            for first in range(0, width, of_block):
                block = ours.view(rows, width)[row : row + 32, first : first + of_block]
                assert torch.equal(theirs.flatten()[place : place + block.numel()], block.flatten())
                place += block.numel()
        assert place == theirs.numel()
    plain = weight.plain(torch.bfloat16)
    for found in (tiled.plain(torch.bfloat16), plain_triton(tiled, torch.bfloat16)):
        assert torch.equal(found, plain)
    assert torch.equal(tiled[1].plain(torch.bfloat16), plain[1])


def test_each_code_is_its_number() -> None:
    """Numbers are the formats'. e2m1 has a sign, two bits of exponent and one of fraction."""
    codes = packed(torch.arange(16, dtype=torch.uint8))
    assert KINDS[INT4].decode(codes).tolist() == list(range(16)) and KINDS[INT4].middle == 8
    want = []
    for code in range(16):
        exponent, fraction = code >> 1 & 3, code & 1
        size = 2.0 ** (exponent - 1) * (1 + fraction / 2) if exponent else fraction / 2
        want.append(-size if code & 8 else size)
    numbers = KINDS[MXFP4].decode(codes)
    assert numbers.tolist() == want and numbers.signbit().tolist() == [False] * 8 + [True] * 8
    for kind in (INT4, MXFP4):
        assert torch.equal(KINDS[kind].encode(KINDS[kind].decode(codes)), codes)
    between = torch.tensor([[0.24, 0.26, 2.4, 2.6, -4.9, 5.1, 7.0, -9.0]])
    near = KINDS[MXFP4].decode(KINDS[MXFP4].encode(between))
    assert near.tolist() == [[0.0, 0.5, 2.0, 3.0, -4.0, 6.0, 6.0, -6.0]]


KEPT = [
    Storage(FP8, (1, 0)),
    Storage(INT4, (1, 32), scales=torch.float16),
    Storage(INT4, (1, 32), scales=torch.float16, has_minima=True),
    Storage(INT4, (1, 0), True, torch.bfloat16),
    Storage(INT8, (1, 64), scales=torch.bfloat16),
    Storage(MXFP4, (1, 32), scales=torch.uint8),
]


@pytest.mark.parametrize("storage", KEPT, ids=str)
@pytest.mark.parametrize("size", [(6, 320), (2, 5, 192)], ids=str)
def test_numbers_of_each_kind(storage: Storage, size: tuple[int, ...]) -> None:
    numbers = normal(*size) * torch.logspace(-2, 2, size[-2])[:, None]
    found = storage.quantised(numbers)
    assert found.scales.dtype == storage.scales and found.shape == size
    assert found.num_bytes == storage.num_bytes(size)
    plain, wide = found.plain(torch.float32), storage.group[1] or size[-1]
    groups = numbers.unflatten(-1, (-1, wide)), plain.unflatten(-1, (-1, wide))
    most = groups[0].abs().amax(-1, keepdim=True)
    step = {FP8: 1 / 28, INT4: 1 / 13, INT8: 1 / 250, MXFP4: 1 / 3}[storage.kind]
    assert ((groups[0] - groups[1]).abs() <= most * step).all()
    assert (groups[1].abs().amax(-1, keepdim=True) > 0.7 * most).all()
    for start, stop in ((0, 64), (64, 192), (128, 192), (0, size[-1])):
        if storage.group[1]:
            columns = found.columns(start, stop)
            assert torch.equal(columns.plain(torch.float32), plain[..., start:stop])
            assert columns.num_bytes == storage.num_bytes((*size[:-1], stop - start))


@pytest.mark.parametrize("has_minima", [False, True])
def test_four_bits_with_zeros_or_minima(has_minima: bool) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(2, 128) % 16
    zeros = torch.tensor([[0, 15, 8, 3], [16, 1, 7, 9]], dtype=torch.uint8)
    scales = torch.tensor([[1.0, 2.0, -0.5, 0.0], [3.0, float("inf"), 6e-8, 1.0]]).half()
    storage = Storage(INT4, (1, 32), not has_minima, torch.float16, has_minima)
    found = Stored(packed(numbers), scales, zeros, storage).plain(torch.float32)
    shift, scale = (t.float().repeat_interleave(32, 1) for t in (zeros, scales))
    want = numbers * scale - shift if has_minima else (numbers - shift) * scale
    assert torch.equal(found.nan_to_num(7.0), want.nan_to_num(7.0))


def test_scales_of_bytes_are_powers() -> None:
    found = Storage(MXFP4, (1, 32), scales=torch.uint8).factors(torch.arange(256).byte())
    assert found[255].isnan()
    assert found[:255].tolist() == [2.0**power for power in range(-127, 128)]


Product = Callable[..., Tensor]


def products(where: str, x: ops.Normed, residual: Tensor, bias: Tensor) -> dict[str, Product]:
    """Each product of a layer, by its name, as a function of its weight."""
    names = ("linear", "norm_linear", "norm_gate_up", "linear_add_norm", "linear_add")
    ours: list[Callable[..., object]] = [getattr(ops, name) for name in names]
    if where == "kernels":
        ours = [getattr(products_triton, f"{name}_triton") for name in names]
    linear, norm_linear, gate_up, add_norm, add = ours
    norm = bias.abs()

    def both(found: object) -> Tensor:
        assert isinstance(found, ops.Normed)
        return torch.cat((found.hidden, found.scaled))

    return {
        "linear": lambda weight: linear(x.scaled, weight, bias),
        "norm_linear": lambda weight: norm_linear(x, weight, bias),
        "gate_up": lambda weight: gate_up(x, weight),
        "add": lambda weight: add(x.scaled, weight, residual),
        "add_norm": lambda weight: both(add_norm(x.scaled, weight, residual, norm, EPS, bias)),
    }


@pytest.mark.parametrize("where", ["ops", "kernels"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 5, 70])
def test_products_equal_those_with_the_plain_weight(num_rows, dtype, where, device) -> None:
    kind = {"dtype": dtype, "device": device}
    hidden = normal(num_rows, 64, **kind)
    x = ops.Normed(hidden, hidden, None, EPS)
    weight = stored(48, 64, group=(16, 32), device=device)
    found = products(where, x, normal(num_rows, 48, **kind), normal(48, **kind))
    for name, product in found.items():
        assert torch.equal(product(weight), product(weight.plain(dtype))), name


def test_a_stored_product_takes_an_unfinished_norm(device) -> None:
    """Plain and stored weights may follow each other in a layer."""
    residual, x = normal(3, 64, device=device), normal(3, 64, device=device)
    first = products_triton.linear_add_norm_triton(
        x, normal(64, 64, device=device), residual, torch.ones(64, device=device), EPS
    )
    assert first.squares is not None
    weight = stored(48, 64, group=(1, 32), device=device)
    want = products_triton.norm_linear_triton(first, weight.plain(torch.float32))
    assert torch.equal(products_triton.norm_linear_triton(first, weight), want)


@pytest.mark.parametrize("where", ["ops", "kernels"])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
@pytest.mark.parametrize("only", ["gate_up", "down", "both"])
def test_experts_equal_those_with_plain_weights(only, num_rows, where, device) -> None:
    count, width, inner = 8, 64, 32
    mixture = ops.mixture_add_norm if where == "ops" else mixture_add_norm_triton
    gate_up = stored(count, 2 * inner, width, group=(16, 32), device=device)
    down = stored(count, width, inner, group=(1, 32), device=device)
    kept = {"gate_up": gate_up, "down": down}
    plain = {name: weight.plain(torch.float32) for name, weight in kept.items()}
    kept = kept if only == "both" else plain | {only: kept[only]}
    router = normal(count, width, device=device)
    hidden = normal(num_rows, width, device=device)
    x, norm = ops.Normed(hidden, hidden, None, EPS), torch.ones(width, device=device)
    want, got = (
        mixture(x, ops.Experts(router=router, routing=ops.Routing(2), **w), norm, EPS)
        for w in (plain, kept)
    )
    if where == "ops" and hidden.device.type == "cpu":
        assert torch.equal(got.hidden, want.hidden)
    # Kernels have other tiles for stored weights, and so sum in another order on some processors.
    assert_close("hidden", want.hidden.double(), got.hidden, TOLERANCE[torch.float32])
    assert_close("scaled", want.scaled.double(), got.scaled, TOLERANCE[torch.float32])


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_parts_are_those_of_the_plain_weight(group) -> None:
    weight = stored(2, 48, 96, group=group)
    plain = weight.plain(torch.float32)
    for start, stop in ((0, 24), (24, 48), (48, 96)):
        if stop <= 48 and all(place % group[0] == 0 for place in (start, stop)):
            rows = weight.rows(start, stop)
            assert torch.equal(rows.plain(torch.float32), plain[:, start:stop])
        if all(place % (group[1] or 2) == 0 for place in (start, stop)):
            columns = weight.columns(start, stop)
            assert torch.equal(columns.plain(torch.float32), plain[..., start:stop])
    assert torch.equal(weight[1].plain(torch.float32), plain[1])


@pytest.mark.parametrize("group", [(16, 32), (24, 48)], ids=str)
def test_cuts_through_a_group_or_a_code_are_refused(group) -> None:
    weight = stored(50, 100, group=group)
    last_rows, last_columns = 50 // group[0] * group[0], 100 // group[1] * group[1]
    assert weight.rows(last_rows, 50).shape == (50 - last_rows, 100)
    assert weight.columns(last_columns, 100).shape == (50, 100 - last_columns)
    for cut, start, stop in (
        (weight.rows, 0, group[0] + 1),
        (weight.rows, 8, 50),
        (weight.columns, 0, group[1] - 2),
        (weight.columns, 16, 100),
        (stored(4, 6, group=(1, 0)).columns, 0, 3),
    ):
        with pytest.raises(ValueError, match="splits a quantisation group"):
            cut(start, stop)


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("rows", [(48, 16, 32), (50, 7, 48), (24, 48, 5)], ids=str)
def test_joined_parts_are_the_plain_parts_below_each_other(rows, group) -> None:
    """This holds even if a part ends within a group of rows."""
    parts = [stored(n, 96, group=group) for n in rows]
    whole = Stored.joined(parts)
    want = torch.cat([part.plain(torch.float32) for part in parts])
    assert torch.equal(whole.plain(torch.float32), want)
    fits = not any(n % group[0] for n in rows[:-1])
    assert whole.storage.group == (group if fits else (1, group[1]))
    start = 0
    for part in parts:  # as parameters view their part of what they were merged to
        view = whole.rows(start, start := start + part.shape[0])
        assert torch.equal(view.plain(torch.float32), part.plain(torch.float32))


@pytest.mark.parametrize("group", [(1, 0), (1, 32), (16, 32), (24, 48)], ids=str)
def test_rows_in_another_order(group) -> None:
    weight, order = stored(48, 96, group=group), torch.tensor([3, 1, 0, 2, 7, 5, 6, 4])
    want = weight.plain(torch.float32).unflatten(0, (-1, 8))[:, order].flatten(0, 1)
    moved = weight.reordered(order)
    assert torch.equal(moved.plain(torch.float32), want)
    assert moved.storage == weight.storage, "each head lies within groups of rows"
    other = weight.reordered(torch.tensor([2, 0, 1]))
    want = weight.plain(torch.float32).unflatten(0, (-1, 3))[:, [2, 0, 1]].flatten(0, 1)
    assert torch.equal(other.plain(torch.float32), want)
