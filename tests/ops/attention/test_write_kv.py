import pytest
import torch
from ops_helpers import DTYPES
from specdec_kernels import ops
from specdec_kernels.attention.cache_triton import write_kv_triton
from specdec_kernels.attention.call import LayerCache
from specdec_kernels.attention.reference import MANY


@pytest.mark.parametrize("write", [ops.write_kv.reference, write_kv_triton])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "dk", "dv", "block_size"),
    [(5, 2, 16, 16, 4), (3, 3, 80, 24, 1), (7, 1, 96, 96, 16), (1, 8, 128, 64, 5)],
    ids=lambda value: str(value),
)
def test_tokens_land_in_their_slots(tokens, heads, dk, dv, block_size, dtype, write, device):
    blocks = 6
    # Transposed, as models pass them: [Hkv, T, D] in memory.
    key = torch.randn(heads, tokens, dk, device=device).to(dtype).transpose(0, 1)
    value = torch.randn(heads, tokens, dv, device=device).to(dtype).transpose(0, 1)
    # Side by side in one memory, so that what is written past the end of the first is seen.
    sizes = [blocks * block_size * heads * dim for dim in (dk, dv)]
    pool = torch.zeros(sum(sizes), device=device, dtype=dtype)
    key_cache = pool[: sizes[0]].view(blocks, block_size, heads, dk)
    value_cache = pool[sizes[0] :].view(blocks, block_size, heads, dv)
    usable = torch.randperm((blocks - 1) * block_size) + block_size
    if tokens > len(usable):
        usable = torch.cat([usable, torch.zeros(tokens - len(usable), dtype=torch.int64)])
    slots = usable[:tokens].to(device)

    write(key, value, LayerCache(key_cache, value_cache), slots)
    written = slots[slots >= block_size]
    count = len(written)
    assert torch.equal(key_cache.view(-1, heads, dk)[written], key[:count])
    assert torch.equal(value_cache.view(-1, heads, dv)[written], value[:count])
    untouched = torch.ones(blocks * block_size, dtype=torch.bool, device=device)
    untouched[slots] = False
    for cache in (key_cache, value_cache):
        assert not cache.view(blocks * block_size, -1)[untouched].any()


@pytest.mark.parametrize("write", [ops.write_kv.reference, write_kv_triton])
def test_trash_slots_may_repeat(write, device):
    key = torch.randn(4, 1, 16, device=device)
    key_cache, value_cache = torch.zeros(2, 3, 4, 1, 16, device=device)
    slots = torch.tensor([1, 6, 1, 1], device=device)
    write(key, key, LayerCache(key_cache, value_cache), slots)
    assert torch.equal(value_cache[1, 2], key[1])
    assert any(torch.equal(key_cache[0, 1], key[t]) for t in (0, 2, 3))


@pytest.mark.parametrize("gap", [0, 1])
def test_many_slots_in_a_row(gap):
    """They are copied in one piece, unless one is left out."""
    key = torch.randn(2, MANY, 16).transpose(0, 1)
    key_cache, value_cache = torch.zeros(2, 12, 8, 2, 16)
    slots = torch.arange(9, 9 + MANY)
    slots[50:] += gap
    ops.write_kv(key, key + 1, LayerCache(key_cache, value_cache), slots)
    want = torch.zeros(96, 2, 16).index_copy_(0, slots, key)
    assert torch.equal(key_cache.view(-1, 2, 16), want)
    assert torch.equal(value_cache.view(-1, 2, 16)[slots], key + 1)
    assert value_cache.count_nonzero() == key.numel()
