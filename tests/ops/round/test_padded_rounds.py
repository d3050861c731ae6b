"""The kernels between a round's products: noise, pass inputs, acceptance, advance."""

import pytest
import torch
from specdec_kernels import ops
from specdec_kernels.round.steps_triton import accept_triton, advance_triton, padded_pass_triton
from specdec_kernels.sampling.noise_triton import uniform_rows_triton
from specdec_kernels.sampling.reference import uniform_reference

BATCHES = [1, 3, 70]


@pytest.mark.parametrize("uniform", [ops.uniform_rows.reference, uniform_rows_triton])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("seed", [0, 7, 2**40 + 3, -5])
@pytest.mark.parametrize("by_round", [False, True], ids=["by-position", "by-round"])
def test_noise_is_a_function_of_what_it_decides(by_round, uniform, batch, seed, device):
    generator = torch.Generator().manual_seed(batch)
    index = torch.randint(0, 2**32, (batch,), generator=generator).to(device)
    position = torch.randint(0, 2**31, (batch,), generator=generator).to(device)
    seeded = torch.tensor(seed, device=device)
    found = uniform(seeded, index, position, 3, 5, by_round)
    assert found.shape == (3, batch, 5) and found.dtype == torch.float32
    for purpose in range(3):
        for place in range(5):
            start = position if by_round else None
            one = uniform_reference(
                seeded, index, position + place, torch.full_like(index, purpose), start
            )
            assert torch.equal(found[purpose, :, place], one)


@pytest.mark.parametrize("uniform", [ops.uniform_rows.reference, uniform_rows_triton])
def test_rounds_that_overlap_share_numbers_only_when_keyed_by_position(uniform, device):
    seed, index = torch.tensor(3, device=device), torch.tensor([8, 8], device=device)
    position = torch.tensor([0, 1], device=device)
    plain, keyed = (uniform(seed, index, position, 2, 4, by_round) for by_round in (False, True))
    assert torch.equal(plain[:, 0, 1:], plain[:, 1, :3])
    numbers = torch.cat((plain[:, 0].flatten(), plain[:, 1, 3], keyed.flatten()))
    assert len(numbers.unique()) == len(numbers)


both_passes = pytest.mark.parametrize(
    "padded_pass", [ops.padded_pass.reference, padded_pass_triton]
)


@both_passes
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("width", "offset", "margin"),
    [(2, -2, 2), (1, 0, 2), (1, 3, 2), (1, -1, 1), (5, -1, 1), (7, -1, None), (3, -3, None)],
)
def test_padded_pass_by_hand(padded_pass, batch, width, offset, margin, device):
    """Without a margin a token is fed whatever the lengths of proposals are."""
    generator = torch.Generator().manual_seed(width)
    block_size, columns, max_len, num_ids = 4, 6, 21, 50
    tokens = torch.randint(-1, 60, (batch, 2 * width), generator=generator).to(device)[:, ::2]
    length = torch.randint(1, 23, (batch,), generator=generator).to(device)
    lens = torch.randint(0, 5, (batch,), generator=generator).to(device)
    active = torch.rand(batch, generator=generator).to(device) < 0.7
    tables = torch.randint(1, 90, (batch, columns + 3), generator=generator, dtype=torch.int32)
    tables = tables.to(device)[:, :columns]
    ids, positions, slots, contexts = padded_pass(
        *(tokens, length, None if margin is None else lens, active, tables, offset, margin or 0),
        *(block_size, max_len, num_ids),
    )
    assert contexts.dtype == torch.int32
    for b in range(batch):
        for j in range(width):
            at = int(length[b]) + offset + j
            inside = min(max(at, 0), max_len - 1)
            live = bool(active[b]) and 0 <= at < max_len
            live = live and (margin is None or int(lens[b]) >= offset + j + margin)
            block = int(tables[b, inside // block_size]) if live else 0
            lane = b * width + j
            assert int(ids[lane]) == min(max(int(tokens[b, j]), 0), num_ids - 1)
            assert int(positions[lane]) == inside
            assert int(slots[lane]) == block * block_size + inside % block_size
        assert int(contexts[b]) == int(length[b]) + offset + width


@both_passes
def test_padding_past_the_table_reads_no_block(padded_pass, device):
    tables = torch.tensor([[3]], dtype=torch.int32, device=device)
    one = torch.tensor([9], device=device)
    live = torch.tensor([True], device=device)
    tokens = torch.zeros(1, 2, dtype=torch.int64, device=device)
    *_, slots, contexts = padded_pass(tokens, one, one * 0, live, tables, -1, 1, 9, 100, 5)
    assert slots.tolist() == [3 * 9 + 8, 0] and contexts.tolist() == [10]


@pytest.mark.pairwise
@pytest.mark.parametrize("accept", [ops.accept.reference, accept_triton])
@pytest.mark.parametrize("with_rates", [False, True], ids=["greedy", "rates"])
@pytest.mark.parametrize("width", [0, 1, 5, 8])
@pytest.mark.parametrize("batch", BATCHES)
def test_accept_by_hand(accept, with_rates, width, batch, device):
    generator = torch.Generator().manual_seed(width)
    best = torch.randint(-1, 3, (batch, width + 1), generator=generator)
    best[best < 0] = torch.where(torch.rand((best < 0).sum(), generator=generator) < 0.8, 1, -1)
    proposed = torch.randint(-1, 3, (batch, width), generator=generator)
    lens = torch.randint(0, width + 1, (batch,), generator=generator)
    noise = torch.rand(2 * batch, width, generator=generator)[::2]
    rates = torch.linspace(0.9, 0.2, width) if width else torch.zeros(0)
    extra = (noise.to(device), rates.to(device)) if with_rates else (None, None)
    tokens, accepted = accept(
        proposed.to(device).contiguous(), best.to(device), lens.to(device), *extra
    )
    for b in range(batch):
        count = 0
        while count < int(lens[b]) and (
            noise[b, count] < rates[count] if with_rates else proposed[b, count] == best[b, count]
        ):
            count += 1
        used = slice(0, int(lens[b]))
        if (proposed[b, used] < 0).any():
            assert int(accepted[b]) == -2
        elif (best[b, : int(lens[b]) + 1] < 0).any():
            assert int(accepted[b]) == -1
        else:
            assert int(accepted[b]) == count
            want = [*proposed[b, :count].tolist(), int(best[b, count])]
            assert tokens[b, : count + 1].tolist() == want


@pytest.mark.pairwise
@pytest.mark.parametrize("advance", [ops.advance.reference, advance_triton])
@pytest.mark.parametrize("eos", [[], [4], [4, 9, 2]], ids=len)
@pytest.mark.parametrize("width", [1, 2, 6])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(
    ("kept", "has_history"), [(2, False), (2, True), (1, False), (3, True), (7, False)]
)
def test_advance_by_hand(advance, eos, width, batch, kept, has_history, device):
    """kept: tokens of the tail, fewer and more than a round may append."""
    if advance is ops.advance.reference:
        device = "cpu"  # it writes through numpy
    generator = torch.Generator().manual_seed(width + len(eos))

    def ints(low, high, *shape):
        return torch.randint(low, high, shape, generator=generator)

    tokens, accepted = ints(-1, 12, batch, width), ints(-2, width, batch)
    lens, tail, length, limit = (
        *(ints(0, width, batch), ints(20, 30, batch, kept)),
        *(ints(1, 9, batch), ints(6, 14, batch)),
    )
    active = torch.rand(batch, generator=generator) < 0.7
    state = [t.clone().to(device) for t in (tail, length, limit, active)]
    record = torch.full((batch, width + 2), -99, device=device)
    wide = torch.full((batch + 4, 30), -99, dtype=torch.int32, device=device)
    history, rows = wide[:, :24], 2 + torch.randperm(batch, generator=generator)
    advance(
        *(tokens.to(device), accepted.to(device), lens.to(device), *state),
        *(torch.tensor(eos, dtype=torch.int64, device=device), record),
        *((history, rows.to(device)) if has_history else ()),
    )
    expected = torch.full((batch + 4, 30), -99, dtype=torch.int32)
    told = torch.cat((tokens, accepted[:, None], lens[:, None]), dim=1)
    assert torch.equal(record.cpu(), told)
    for b in range(batch):
        new = tokens[b, : max(int(accepted[b]), 0) + 1].tolist()
        ends = [i for i, t in enumerate(new) if t in eos]
        new = [max(t, 0) for t in (new[: ends[0] + 1] if ends else new)]
        want = (tail[b].tolist(), int(length[b]), bool(active[b]))
        if active[b]:
            total = int(length[b]) + len(new)
            want = ((tail[b].tolist() + new)[-kept:], total, not ends and total < int(limit[b]))
            if has_history:
                place = slice(int(length[b]), total)
                expected[int(rows[b]), place] = torch.tensor(new, dtype=torch.int32)
        assert (state[0][b].tolist(), int(state[1][b]), bool(state[3][b])) == want
    assert torch.equal(wide.cpu(), expected)


def test_stamps_rise():
    times = torch.zeros(3, dtype=torch.int64)
    for place in range(3):
        ops.stamp.reference(times, place)
    assert 0 < times[0] < times[1] < times[2]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device's clock")
def test_stamps_measure_the_devices_time():
    from specdec_kernels.round.steps_triton import stamp_triton

    times = torch.zeros(2, dtype=torch.int64, device="cuda")
    work = torch.randn(4096, 4096, device="cuda")
    for _ in range(2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        stamp_triton(times, 0)
        for _ in range(20):
            work @ work
        stamp_triton(times, 1)
        end.record()
    torch.cuda.synchronize()
    ours = float(times[1] - times[0]) / 1e6
    assert ours == pytest.approx(start.elapsed_time(end), rel=0.05)
