import pytest
import torch
from ops_helpers import needs_cuda, starts_of
from specdec_kernels import ops
from specdec_kernels.attention.cache_triton import slot_mapping_triton

both = pytest.mark.parametrize("slot_mapping", [ops.slot_mapping.reference, slot_mapping_triton])


def slots_by_hand(tables, lens, positions, block_size):
    slots = []
    rows = [b for b, length in enumerate(lens) for _ in range(length)]
    for t, position in enumerate(positions.tolist()):
        trash = t >= len(rows) or position >= tables.shape[1] * block_size
        block = 0 if trash else int(tables[rows[t], position // block_size])
        slots.append(block * block_size + position % block_size)
    return slots


@both
@pytest.mark.parametrize("block_size", [1, 4, 7, 16, 64], ids=lambda size: f"BS{size}")
@pytest.mark.parametrize(
    "lens", [[1, 1, 1], [5, 0, 3], [0, 4, 0], [1], [290, 33, 1]], ids=lambda lens: f"lens{lens}"
)
def test_slots_follow_the_block_table(lens, block_size, slot_mapping, device):
    generator = torch.Generator().manual_seed(block_size)
    columns = 5
    tables = torch.randint(1, 99, (len(lens), columns), generator=generator, dtype=torch.int32)
    tables = tables.to(device)
    end = columns * block_size
    positions = torch.randint(0, end + 2, (sum(lens),), generator=generator).to(device)
    positions[-1] = end  # the first position past the table
    slots = slot_mapping(tables, starts_of(lens, device), positions, block_size)
    assert slots.dtype == torch.int64
    assert slots.tolist() == slots_by_hand(tables, lens, positions, block_size)


@both
def test_what_must_not_be_stored_goes_to_the_trash_block(slot_mapping, device):
    tables = torch.tensor([[3, 4], [5, 6]], dtype=torch.int32, device=device)
    # The last of the table, two past it, a valid one, and two tokens without a row.
    positions = torch.tensor([9, 10, 1 << 33, 2, 3, 1], device=device)
    slots = slot_mapping(tables, starts_of([1, 3], device), positions, 5)
    assert slots.tolist() == [4 * 5 + 4, 0, (1 << 33) % 5, 5 * 5 + 2, 3, 1]


@both
def test_table_may_be_a_slice_of_a_wider_one(slot_mapping, device):
    wide = torch.arange(1, 21, dtype=torch.int32, device=device).view(2, 10)
    positions = torch.tensor([0, 11, 4, 8], device=device)
    slots = slot_mapping(wide[:, :3], starts_of([2, 2], device), positions, 4)
    assert slots.tolist() == [4, 15, 48, 52]


@needs_cuda
def test_large_batch(device):
    lens = [1 + 7 * (b % 5) for b in range(300)]
    tables = torch.randint(1, 2**27, (300, 513), dtype=torch.int32, device=device)
    positions = torch.randint(0, 513 * 16 + 40, (sum(lens),), device=device)
    args = (tables, starts_of(lens, device), positions, 16)
    assert torch.equal(ops.slot_mapping.reference(*args), slot_mapping_triton(*args))
