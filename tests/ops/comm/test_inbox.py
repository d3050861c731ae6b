"""Matmuls that send their results to all ranks, and the sums over what has been sent."""

import multiprocessing
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from ops_helpers import DTYPES, TOLERANCE, assert_close, normal
from peer_group import Group
from specdec_kernels import ops
from specdec_kernels.comm import peers as peers_module
from specdec_kernels.comm import peers_triton, split_sums_triton
from specdec_kernels.comm.peers import SUM_COLUMNS, SUM_ROWS, Peers
from specdec_kernels.comm.peers_triton import (
    Outputs,
    reduce_add_norm_triton,
    reduce_parts_triton,
)
from specdec_kernels.experts.mixture_triton import mixture_add_norm_triton
from specdec_kernels.linear import products_triton
from specdec_kernels.linear.few_rows_triton import few_rows_linear
from specdec_kernels.linear.one_row_triton import one_row_linear
from specdec_kernels.linear.stored import Storage
from specdec_kernels.linear.stored_rows_triton import stored_rows_linear
from specdec_kernels.linear.tiles import RowTiles, Tiles, leaves_norm
from torch import Tensor

EPS = 1e-5
# Words hold numbers of 16 bits. CI would leave most cases of a `dtype` in fp16 out.
HALVES = DTYPES[1:]


PLAIN = [Tiles(8, 16, 64, 4, 1, 0, 4, 3), Tiles(8, 32, 32, 1, 3, 0, 4, 3)]
PLAIN += [Tiles(16, 16, 64, 4, 1, 0, 4, 3, early=64), Tiles(32, 64, 64, 1, 2, 0, 4, 3)]


@pytest.mark.each_value
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("tiles", [*PLAIN, RowTiles(2, 64, 4), RowTiles(16, 256, 4), "stored"])
@pytest.mark.parametrize(("rows", "features"), [(1, 50), (6, 514), (9, 96), (20, 300)])
def test_what_is_sent_is_what_is_stored(rows, features, tiles, half, device):
    width, size, rank, place = 192, 3, 2, rows % 2
    kind = {"dtype": half, "device": device}
    weight, how = normal(features, width, **kind), {"tiles": tiles}
    if tiles == "stored":
        linear, weight = stored_rows_linear, Storage("int8", (1, 64)).quantised(weight)
        how["tiles"] = Tiles(8, 16, 64, 1, 2, 0, 4, 3)
    elif isinstance(tiles, RowTiles):
        linear, rows = one_row_linear, 1
    else:
        linear, rows = few_rows_linear, min(rows, tiles.block_m)
    x, bias = normal(rows, width, **kind), normal(features, **kind)
    stored = linear(x, weight, bias=bias, **how)[0]
    group = Group(size, features, half, device)
    into, inbox = group.parts[rank, place, :rows], group.ranks[rank].inbox(place, rows)
    assert inbox is not None
    expected = group.inboxes.clone()
    linear(x, weight, bias=bias, into=into, inbox=inbox, **how)
    words = group.words(stored).view(-1)
    expected[:, place, rank, : words.numel()] = words
    assert torch.equal(group.inboxes, expected)
    assert into.isnan().all(), "nothing is stored beside"


@pytest.mark.pairwise
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(("rows", "width"), [(1, 96), (2, 256), (6, 600), (32, 514)])
def test_sums_of_what_ranks_have_sent(rows, width, size, half, device):
    group = Group(size, width, half, device)
    parts = normal(size, rows, width, dtype=half, device=device)
    residual = normal(rows, 2 * width, dtype=half, device=device)[:, :width]
    norm = normal(width, dtype=half, device=device)
    for place in (0, 1):
        for rank, part in enumerate(parts):
            words = group.words(part).view(-1)
            group.inboxes[:, place, rank, : words.numel()] = words
        before, whole = group.inboxes.clone(), parts.double().sum(0)
        for peers in group.ranks:
            if place:
                outputs = Outputs.allocated(peers.parts, rows, has_norm=False)
                reduce_parts_triton(peers, place, outputs, is_sent=True)
                assert_close("sum", whole, outputs.hidden, 2 * TOLERANCE[half])
            else:
                outputs = Outputs.allocated(peers.parts, rows, leaves_norm(residual))
                out = reduce_add_norm_triton(peers, place, residual, norm, EPS, outputs, True)
                assert_close("hidden", residual.double() + whole, out.hidden, 2 * TOLERANCE[half])
                expected = F.rms_norm(out.hidden.double(), (width,), norm.double(), EPS)
                found = out.scaled.double()
                if out.squares is not None:
                    found *= (out.squares.double().sum(1, keepdim=True) / width + EPS).rsqrt()
                assert_close("norm", expected, found, TOLERANCE[half])
        used = -(-width // SUM_COLUMNS) * -(-rows // SUM_ROWS)
        group.counts[:used] += 1
        assert all(torch.equal(peers.pushes, group.counts) for peers in group.ranks)
        assert torch.equal(group.inboxes, before) and not group.flags.any()


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("storage", [None, Storage("fp8")], ids=["plain", "fp8"])
@pytest.mark.parametrize("rows", [1, 6])
def test_a_split_matmul_is_the_whole_one(rows, storage, half, device):
    size, width, features = 2, 256, 320
    kind = {"dtype": half, "device": device}
    x, weight = normal(rows, width, **kind), normal(features, width, **kind) / 16
    bias, residual = normal(features, **kind), normal(rows, features, **kind)
    group, share = Group(size, features, half, device), width // size
    halves = [weight[:, r * share : (r + 1) * share].contiguous() for r in range(size)]
    held = [h if storage is None else storage.quantised(h) for h in halves]
    plain = [h if storage is None else h.plain(torch.float64) for h in held]
    for place in (0, 1, 0):
        for rank, peers in enumerate(group.ranks):
            part = x[:, rank * share : (rank + 1) * share].contiguous()
            own_bias = bias if rank == 0 else None
            assert products_triton.linear_to_peers(peers, place, part, held[rank], own_bias)
        hiddens = []
        for peers in group.ranks:
            outputs = Outputs.allocated(peers.parts, rows, leaves_norm(residual))
            out = reduce_add_norm_triton(peers, place, residual, bias, EPS, outputs, True)
            expected = F.linear(x.double(), torch.cat([p.double() for p in plain], 1))
            expected += bias.double() + residual.double()
            assert_close("hidden", expected, out.hidden, 2 * TOLERANCE[half])
            hiddens.append(out.hidden)
        assert torch.equal(*hiddens), "the same to the bit on every rank"


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_that_cannot_be_sent_are_stored(dtype, device, monkeypatch):
    """Too many rows, numbers of 32 bits, programs with one feature, and matmuls of cuBLAS."""
    kind = {"dtype": dtype, "device": device}
    weight, features = normal(64, 128, **kind), 64
    group = Group(2, features, torch.float16 if dtype == torch.float32 else dtype, device)
    peers = group.ranks[0]
    if dtype == torch.float32:
        parts = torch.full(group.parts.shape[1:], float("nan"), device=device)
        peers = Peers(0, 2, parts, *(None,) * 5)
    untouched = group.inboxes.clone()

    def check(rows: int) -> None:
        x = normal(rows, 128, **kind)
        assert not products_triton.linear_to_peers(peers, 1, x, weight, None)
        expected = F.linear(x.double(), weight.double())
        assert_close("part", expected, peers.parts[1, :rows], TOLERANCE[dtype])
        assert torch.equal(group.inboxes, untouched)

    with monkeypatch.context() as patch:
        patch.setattr(peers_module, "PUSHED_NUMBERS", 3 * features - 1)
        check(3)
    with monkeypatch.context() as patch:
        patch.setattr(products_triton, "choose_row_tiles", lambda *_: RowTiles(1, 128, 2))
        check(1)
    with monkeypatch.context() as patch:
        patch.setattr(products_triton, "choose_tiles", lambda *_: None)
        check(2)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ["linear_reduce_add_norm", "linear_reduce", "mixture"])
def test_a_sum_writes_no_memory_that_the_matmul_may_read(name, half, device, monkeypatch):
    """Results are allocated before the matmul is launched, and the op is the sum of all parts."""
    kind = {"dtype": half, "device": device}
    rows, width, features = 3, 64, 300
    group, used = Group(2, features, half, device), -(-features // SUM_COLUMNS)
    peers, theirs = group.ranks[0], normal(rows, features, **kind)
    weight, bias, norm = normal(features, width, **kind), *normal(2, features, **kind)
    residual, x = normal(rows, features, **kind), normal(rows, width, **kind)
    words = group.words(theirs).view(-1)
    group.inboxes[0, 1, 1, : words.numel()] = words
    steps = []

    def noted(step, run):
        return lambda *args, **more: (steps.append(step), run(*args, **more))[1]

    allocated = noted("allocate", Outputs.allocated)
    monkeypatch.setattr(split_sums_triton.Outputs, "allocated", allocated)
    for step in ("linear_to_peers", "mixture_to_peers"):
        run = noted("matmul", getattr(split_sums_triton, step))
        monkeypatch.setattr(split_sums_triton, step, run)
    if name == "mixture":
        router, gate_up = normal(4, features, **kind), normal(4, 2 * 32, features, **kind) / 16
        experts = ops.Experts(router, gate_up, normal(4, features, 32, **kind), ops.Routing(1))
        stream = ops.Normed(residual, residual, None, EPS)
        out = ops.mixture_reduce_add_norm(peers, 1, stream, experts, bias.expand(3, -1), norm, EPS)
        alone = stream._replace(hidden=bias.expand(3, -1))
        own = mixture_add_norm_triton(alone, experts, norm, EPS).hidden.double()
    else:
        end = (residual, norm, EPS) if name == "linear_reduce_add_norm" else ()
        out = getattr(ops, name)(peers, 1, x, weight, bias, *end)
        own = F.linear(x.double(), weight.double(), bias.double())
    expected = own + theirs.double()
    if name != "linear_reduce":
        expected, out = expected + residual.double(), out.hidden
    assert_close("sum", expected, out, 2 * TOLERANCE[half])
    assert steps == ["allocate", "matmul"]
    assert (peers.pushes[:used] == group.counts[:used] + 1).all(), "sent"


# Rows of successive sums. Those of more than 8 rows are read.
ROWS = [1, 6, 6, 12, 2, 8, 1]


def parts_of(rank: int, call: int) -> tuple[Tensor, Tensor]:
    """The operands of a rank's matmul in one call."""
    generator = torch.Generator().manual_seed(10 * call + rank)
    x, weight = (torch.randn(n, 64, generator=generator) for n in (ROWS[call], 300))
    return x.half(), (weight / 8).half()


def stored_at_odd_calls(calls: list[int], *args: object) -> bool:
    """`linear_to_peers` of a rank that stores its part in every second call."""
    calls.append(len(calls))
    peers, place, x, weight, _ = args
    if len(calls) % 2:
        return products_triton.linear_to_peers(*args)
    peers.take(place, len(x), len(weight)).copy_(F.linear(x.float(), weight.float()))
    return False


def run_rank(rank: int, group: Group, sums: Tensor) -> None:
    """Sum the parts of all calls, late in every third, and store the sums [calls, 12, 300]."""
    if rank:
        calls: list[int] = []
        split_sums_triton.linear_to_peers = partial(stored_at_odd_calls, calls)
    for call, rows in enumerate(ROWS):
        if (call + rank) % 3 == 0:
            time.sleep(0.4)
        product = group.ranks[rank], call % 2, *parts_of(rank, call), None
        sums[call, :rows] = ops.linear_reduce(*product)


@pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are forks, which cannot use CUDA")
def test_ranks_wait_for_each_other(monkeypatch):
    """Ranks that are late, that send or store their parts as they like, and sums of other sizes."""
    for module in (peers_module, peers_triton):
        monkeypatch.setattr(module, "PUSHED_NUMBERS", 8 * 300)
    group = Group(2, 300, torch.float16, torch.device("cpu"), are_shared=True)
    sums = torch.full((2, len(ROWS), 12, 300), float("nan"), dtype=torch.float16).share_memory_()
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(r, group, sums[r])) for r in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    for call, rows in enumerate(ROWS):
        expected = sum(F.linear(*(t.double() for t in parts_of(r, call))) for r in range(2))
        assert_close(f"call {call}", expected, sums[0, call, :rows], TOLERANCE[torch.float16])
        assert torch.equal(sums[0, call, :rows], sums[1, call, :rows])
