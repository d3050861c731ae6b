"""Sums and logits on one rank, after the other ranks have written their parts."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from ops_helpers import DTYPES, TOLERANCE, assert_close
from specdec_kernels.comm import peers_triton
from specdec_kernels.comm.peers import (
    GATHER_COLUMNS,
    GATHER_GROUPS,
    GATHER_ROWS,
    MAX_ROWS,
    PUSHED_NUMBERS,
    SUM_COLUMNS,
    SUM_ROWS,
    Peers,
    num_gather_flags,
    num_pushed_words,
    num_sum_flags,
)
from specdec_kernels.comm.peers_triton import (
    Outputs,
    gather_columns_triton,
    reduce_add_norm_triton,
    reduce_parts_triton,
)
from torch import Tensor

EPS = 1e-5
WIDE = 2**31 - 2  # counters wrap around


def peers_of(parts: Tensor, rank: int, flags: int) -> tuple[Peers, Tensor]:
    """`Peers` as `rank` sees them, and all ranks' flags. parts: [size, places, MAX_ROWS, N]."""
    size, device = len(parts), parts.device
    all_flags = torch.full((size, flags, size), WIDE, dtype=torch.int32, device=device)
    peers = Peers(
        rank,
        size,
        parts[rank],
        torch.tensor([p.data_ptr() for p in parts], device=device),
        torch.tensor([f.data_ptr() for f in all_flags], device=device),
        torch.full((flags, size), WIDE, dtype=torch.int32, device=device),
        None,
        torch.full((flags,), WIDE, dtype=torch.int32, device=device),
    )
    return peers, all_flags


def summed(peers: Peers, place: int, rows: int) -> Tensor:
    """The sum of all ranks' parts, without residual and norm."""
    outputs = Outputs.allocated(peers.parts, rows, has_norm=False)
    reduce_parts_triton(peers, place, outputs)
    return outputs.hidden


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (2, 256), (6, 600), (33, 256), (69, 320)])
def test_sums_of_ranks(rows, width, size, dtype, device):
    generator = torch.Generator().manual_seed(width)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    parts = normal(size, 2, MAX_ROWS, width)
    parts[:, :, rows:] = float("nan")
    rank = size - 1
    peers, flags = peers_of(parts, rank, num_sum_flags(width))
    used = -(-width // SUM_COLUMNS) * -(-rows // SUM_ROWS)
    norm, residual = normal(width), normal(rows, 2 * width)[:, :width]
    assert peers.take(0, MAX_ROWS + 1, width) is None
    for call, place in enumerate((0, 1, 0, 1), start=1):
        flags[rank, :used, :rank] += 1  # set by the other ranks
        before = flags.clone()
        out = reduce_add_norm_triton(peers, place, residual, norm, EPS)
        before[:, :used, rank] += 1
        assert torch.equal(flags, before)
        epochs = peers.epochs.view(-1).long() - WIDE
        assert ((epochs[:used] - call) % 2**32 == 0).all() and not epochs[used:].any()
        expected = residual.double() + parts[:, place, :rows].double().sum(0)
        assert_close("hidden", expected, out.hidden, 2 * TOLERANCE[dtype])
        normed = F.rms_norm(out.hidden.double(), (width,), norm.double(), EPS)
        if rows > 64 or dtype == torch.float16:  # the next product needs a finished norm
            assert out.squares is None
            assert_close("norm", normed, out.scaled, TOLERANCE[dtype])
            continue
        assert out.squares is not None
        assert_close("scaled", out.hidden.double() * norm.double(), out.scaled, TOLERANCE[dtype])
        assert_close("squares", out.hidden.double().square().sum(1), out.squares.sum(1), 1e-5)
        factor = (out.squares.double().sum(1, keepdim=True) / width + EPS).rsqrt()
        assert_close("norm", normed, out.scaled.double() * factor, TOLERANCE[dtype])


def words_of(part: Tensor, count: int) -> Tensor:
    """The words [T, N / 2] in which a part [T, N] is written to other ranks."""
    return (part.view(torch.int32).long() & 0xFFFFFFFF) | count << 32


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (2, 256), (6, 600), (32, 514)])
def test_sums_of_parts_that_ranks_write_to_each_other(rows, width, size, dtype, device):
    generator = torch.Generator().manual_seed(width)
    parts = torch.randn((size, 2, MAX_ROWS, width), generator=generator).to(device, dtype)
    parts[:, :, rows:] = float("nan")
    rank = 1
    assert rows * width <= PUSHED_NUMBERS
    pushed = torch.full((size, 2, size, PUSHED_NUMBERS // 2), -1, device=device)
    assert pushed[0].numel() == num_pushed_words(size, width, dtype.itemsize)
    peers, flags = peers_of(parts, rank, num_sum_flags(width))
    addresses = torch.tensor([p.data_ptr() for p in pushed], device=device)
    peers = replace(peers, pushed=addresses)
    used = -(-width // SUM_COLUMNS) * -(-rows // SUM_ROWS)
    norm = torch.ones(width, dtype=dtype, device=device)
    residual = parts[0, 0, :rows].clone()
    for call, place in enumerate((0, 1, 0, 1), start=1):
        count = (WIDE + call + 2**31) % 2**32 - 2**31
        parts[:, place, :rows] += 1
        for other in (r for r in range(size) if r != rank):
            words = words_of(parts[other, place, :rows], count)
            pushed[rank, place, other, : words.numel()] = words.view(-1)
        expected, before = pushed.clone(), flags.clone()
        for other in (r for r in range(size) if r != rank):
            words = words_of(parts[rank, place, :rows], count)
            expected[other, place, rank, : words.numel()] = words.view(-1)
        whole = parts[:, place, :rows].double().sum(0)
        if place:
            out = reduce_add_norm_triton(peers, place, residual, norm, EPS)
            whole += residual.double()
            assert (out.squares is None) == (dtype == torch.float16)
            if out.squares is not None:
                squares = out.hidden.double().square().sum(1)
                assert_close("squares", squares, out.squares.sum(1), 1e-5)
            assert_close("sum", whole, out.hidden, 2 * TOLERANCE[dtype])
        else:
            out = summed(peers, place, rows)
            assert_close("sum", whole, out, 2 * TOLERANCE[dtype])
        assert torch.equal(pushed, expected) and torch.equal(flags, before)
        assert (peers.pushes[:used] == count).all() and (peers.pushes[used:] == WIDE).all()


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize(("rows", "width"), [(70, 320), (97, 600)])
def test_ranks_sum_a_share_of_many_rows_each(rows, width, size, dtype, device, monkeypatch):
    monkeypatch.setattr(peers_triton, "SHARED_OUT_NUMBERS", rows * width)
    generator = torch.Generator().manual_seed(width)
    parts = torch.randn((size, 2, MAX_ROWS, width), generator=generator).to(device, dtype)
    parts[:, :, rows:] = float("nan")
    for rank in (0, size - 1):
        peers, flags = peers_of(parts, rank, num_sum_flags(width))
        share = -(-rows // size)
        own = slice(rank * share, min(rows, (rank + 1) * share))
        used = -(-width // SUM_COLUMNS) * -(-share // SUM_ROWS)
        residual, norm = parts[0, 0, :rows].clone(), torch.ones(width, dtype=dtype, device=device)
        for place in (0, 1):
            flags[rank, :used, [r for r in range(size) if r != rank]] += 2
            before = flags[:, :, rank].clone()
            expected = parts[:, place, :rows].double().sum(0)
            # The other ranks' rows are already their sums.
            theirs = [
                parts[min(row // share, size - 1), place, row].double() for row in range(rows)
            ]
            if place:
                out = reduce_add_norm_triton(peers, place, residual, norm, EPS)
                expected += residual.double()
                normed = F.rms_norm(out.hidden.double(), (width,), eps=EPS)
                assert_close("norm", normed, out.scaled, TOLERANCE[dtype])
                out = out.hidden
            else:
                out = summed(peers, place, rows)
            assert_close("sum", expected[own], out[own], 2 * TOLERANCE[dtype])
            others = [row for row in range(rows) if not own.start <= row < own.stop]
            assert torch.equal(out[others].double(), torch.stack(theirs)[others])
            assert torch.equal(parts[rank, place, own], out[own])
            before[:, :used] += 2
            assert torch.equal(flags[:, :, rank], before)
            epochs = peers.epochs.view(-1).long() - WIDE
            assert ((epochs[:used] - 2 * (place + 1)) % 2**32 == 0).all()
            assert not epochs[used:].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (6, 600), (69, 320)])
def test_sums_alone(rows, width, dtype, device):
    """These sums alternate with sums that have a residual, since they share the flags."""
    generator = torch.Generator().manual_seed(width)
    parts = torch.randn((3, 2, MAX_ROWS, width), generator=generator).to(device, dtype)
    parts[:, :, rows:] = float("nan")
    peers, flags = peers_of(parts, 1, num_sum_flags(width))
    used = -(-width // SUM_COLUMNS) * -(-rows // SUM_ROWS)
    residual, norm = parts[0, 0, :rows].clone(), torch.ones(width, dtype=dtype, device=device)
    for place in (0, 1, 0, 1):
        flags[1, :used, [0, 2]] += 1
        before = flags[:, :, 1].clone()
        expected = parts[:, place, :rows].double().sum(0)
        if place:
            out = reduce_add_norm_triton(peers, place, residual, norm, EPS).hidden
            expected += residual.double()
        else:
            out = summed(peers, place, rows)
        assert_close("sum", expected, out, 2 * TOLERANCE[dtype])
        before[:, :used] += 1
        assert torch.equal(flags[:, :, 1], before)


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("rows", "share"), [(1, 16), (5, 1100), (33, 90), (70, 2048)])
def test_shares_of_ranks_side_by_side(rows, share, size, dtype, device):
    generator = torch.Generator().manual_seed(share)
    parts = torch.randn((size, 1, MAX_ROWS, share), generator=generator).to(device, dtype)
    parts[:, :, rows:] = float("nan")
    rank = size - 2
    peers, flags = peers_of(parts, rank, num_gather_flags(share))
    assert peers.take(0, rows, share + 1) is None
    others = [r for r in range(size) if r != rank]
    tiles = -(-rows // min(GATHER_ROWS, rows))
    used = -(-share // GATHER_COLUMNS) * min(GATHER_GROUPS, tiles)
    for call in (1, 2, 3):
        parts[:, :, :rows] += 1
        flags[rank, :used, others] += 1
        before = flags.clone()
        out = gather_columns_triton(peers, rows)
        before[others, :used, rank] += 1
        assert torch.equal(flags, before)
        epochs = peers.epochs.long() - WIDE
        assert ((epochs[:used, others] - call) % 2**32 == 0).all()
        assert not epochs[used:].any() and not epochs[:, rank].any()
        assert torch.equal(out, torch.cat([*parts[:, 0, :rows]], dim=1))
