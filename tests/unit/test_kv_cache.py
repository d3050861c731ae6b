"""The block allocator under random use, and the size of a cache."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_cli.core.kv_cache import (
    TRASH_BLOCK,
    BlockAllocator,
    KVCache,
    LayerShape,
    block_bytes,
)

CPU = torch.device("cpu")


def check(allocator: BlockAllocator, tables: list[list[int]], total: int) -> None:
    held = [block for table in tables for block in table]
    assert len(held) == len(set(held)), "a block in two tables"
    assert TRASH_BLOCK not in held
    assert all(0 < block <= total for block in held)
    assert allocator.num_used == len(held)
    assert allocator.num_free + allocator.num_used == total


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("seed", [0, 1])
def test_free_and_used_are_the_total_after_thousands_of_steps(block_size: int, seed: int) -> None:
    rng = random.Random(seed)
    total = 60
    allocator = BlockAllocator(total + 1, block_size)
    tables: list[list[int]] = [[] for _ in range(9)]
    refused = 0
    for _ in range(5000):
        table = rng.choice(tables)
        tokens = rng.randrange(0, 20 * block_size)
        if rng.random() < 0.5:
            had = len(table)
            if allocator.missing(table, tokens) > allocator.num_free:
                refused += 1
                continue
            allocator.extend(table, tokens)
            assert len(table) == max(had, allocator.blocks_for(tokens))
            assert len(table) * block_size >= tokens
        else:
            had = len(table)
            allocator.shrink(table, tokens)
            assert len(table) == min(had, allocator.blocks_for(tokens))
        check(allocator, tables, total)
    assert refused > 50, "the allocator was never full"
    for table in tables:
        allocator.shrink(table, 0)
    check(allocator, tables, total)
    assert allocator.num_free == total


@given(
    block_size=st.integers(1, 9),
    held=st.integers(0, 6),
    tokens=st.integers(0, 60),
)
def test_missing_is_what_extend_takes(block_size: int, held: int, tokens: int) -> None:
    allocator = BlockAllocator(100, block_size)
    table: list[int] = []
    allocator.extend(table, held * block_size)
    assert len(table) == held
    want = allocator.missing(table, tokens)
    before = allocator.num_free
    first = list(table)
    allocator.extend(table, tokens)
    assert before - allocator.num_free == want
    assert table[:held] == first, "what was there stays where it is"
    assert len(table) * block_size >= tokens
    assert allocator.missing(table, tokens) == 0


def test_every_block_but_the_trash_block_is_handed_out_once() -> None:
    allocator = BlockAllocator(8, 4)
    table: list[int] = []
    allocator.extend(table, 7 * 4)
    assert sorted(table) == [1, 2, 3, 4, 5, 6, 7]
    assert allocator.num_free == 0 and allocator.num_used == 7
    with pytest.raises(AssertionError, match="1 blocks are missing, 0 free"):
        allocator.extend(table, 7 * 4 + 1)
    assert len(table) == 7


def test_double_free_asserts() -> None:
    allocator = BlockAllocator(8, 4)
    table: list[int] = []
    allocator.extend(table, 9)
    copy = list(table)
    allocator.shrink(table, 0)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.shrink(copy, 0)


def test_freeing_the_trash_block_asserts() -> None:
    allocator = BlockAllocator(8, 4)
    with pytest.raises(AssertionError):
        allocator.shrink([TRASH_BLOCK], 0)


def test_a_cache_needs_a_block_of_its_own() -> None:
    with pytest.raises(AssertionError, match="trash block"):
        BlockAllocator(1, 4)


SHAPES = {
    "multi-head": [LayerShape(4, 16, 16)] * 2,
    "gqa": [LayerShape(2, 32, 32)] * 3,
    "one-kv-head": [LayerShape(1, 8, 8)],
    "mla": [LayerShape(4, 24, 16)] * 2,
    "layers-differ": [LayerShape(1, 64, 64), LayerShape(4, 16, 12)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_cache_bytes_are_blocks_times_block_bytes(
    shapes: list[LayerShape], dtype: torch.dtype
) -> None:
    num_blocks, block_size = 7, 5
    cache = KVCache(shapes, num_blocks, block_size, dtype, CPU)
    assert cache.num_bytes == num_blocks * block_bytes(shapes, block_size, dtype)
    stored = sum(t.untyped_storage().nbytes() for t in cache.pools)
    assert stored == cache.num_bytes
    for shape, (keys, values, scales) in zip(shapes, cache.layers, strict=True):
        assert keys.shape == (num_blocks, block_size, shape.num_kv_heads, shape.key_dim)
        assert values.shape == (num_blocks, block_size, shape.num_kv_heads, shape.value_dim)
        assert scales is None


@settings(max_examples=30)
@given(
    shapes=st.lists(
        st.builds(LayerShape, st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)), max_size=4
    ),
    num_blocks=st.integers(2, 5),
    block_size=st.integers(1, 6),
)
def test_bytes_of_any_shape(shapes: list[LayerShape], num_blocks: int, block_size: int) -> None:
    cache = KVCache(shapes, num_blocks, block_size, torch.float16, CPU)
    assert cache.num_bytes == num_blocks * block_bytes(shapes, block_size, torch.float16)
