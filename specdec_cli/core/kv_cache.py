"""Paged storage for keys and values, and the allocator of its blocks. Block 0, the trash block,
belongs to no sequence: the keys and values of padding are written there."""

from dataclasses import dataclass

import torch
from specdec_kernels import ops

TRASH_BLOCK = 0


@dataclass(frozen=True, slots=True)
class LayerShape:
    """The cache shape of one attention layer: the number of KV heads on this rank, and the widths
    of a key and a value."""

    num_kv_heads: int
    key_dim: int
    value_dim: int


def block_bytes(layers: list[LayerShape], block_size: int, dtype: torch.dtype) -> int:
    """Return the size of one block over all layers of a model on this rank, in bytes."""
    per_token = sum(s.num_kv_heads * (s.key_dim + s.value_dim) for s in layers)
    return per_token * block_size * dtype.itemsize


class KVCache:
    """Keys and values of each layer, [num_blocks, block_size, kv heads, head dim]. A cache in fp8
    also has scales, as in `ops.LayerCache`."""

    def __init__(
        self,
        layers: list[LayerShape],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        scales: list[torch.Tensor] | None = None,
    ) -> None:
        self._shapes, self._dtype = layers, dtype
        if scales is None and dtype == ops.FP8:
            scales = [torch.ones(2, s.num_kv_heads, device=device) for s in layers]
        self._scales = scales
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.device = device

        def pool(heads: int, dim: int) -> torch.Tensor:
            return torch.zeros((num_blocks, block_size, heads, dim), dtype=dtype, device=device)

        self.layers = [
            ops.LayerCache(
                pool(s.num_kv_heads, s.key_dim),
                pool(s.num_kv_heads, s.value_dim),
                None if scales is None else scales[index],
            )
            for index, s in enumerate(layers)
        ]

    @property
    def num_bytes(self) -> int:
        """The size of all keys and values, in bytes."""
        return sum(pool.nbytes for pool in self.pools)

    @property
    def pools(self) -> list[torch.Tensor]:
        """Keys and values of every layer."""
        return [pool for layer in self.layers for pool in (layer.keys, layer.values)]

    def resized(self, num_blocks: int) -> "KVCache":
        """Make a cache like this one, but with `num_blocks` blocks. This does not read `layers`, so
        the caller may free them first to save memory."""
        sizes = num_blocks, self.block_size
        return KVCache(self._shapes, *sizes, self._dtype, self.device, self._scales)

    @torch.inference_mode()
    def clear(self) -> None:
        """Set all keys and values to zero."""
        for pool in self.pools:
            pool.zero_()


class BlockAllocator:
    """Hands out block ids 1..num_blocks-1. Assertions check that no block is both free and used."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 2, "a cache needs the trash block and one block of its own"
        self.block_size = block_size
        self.num_usable = num_blocks - 1
        self._free = list(range(num_blocks - 1, TRASH_BLOCK, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that this many tokens need."""
        return -(-num_tokens // self.block_size)

    def missing(self, table: list[int], num_tokens: int) -> int:
        """Return how many more blocks `table` needs to hold this many tokens."""
        return max(0, self.blocks_for(num_tokens) - len(table))

    def extend(self, table: list[int], num_tokens: int) -> None:
        """Grow `table` to hold `num_tokens` tokens. The caller must first check with `missing` that
        enough blocks are free."""
        missing = self.missing(table, num_tokens)
        assert missing <= self.num_free, f"{missing} blocks are missing, {self.num_free} free"
        first = len(self._free) - missing
        added = self._free[first:]
        del self._free[first:]
        added.reverse()
        self._used.update(added)
        table += added

    def shrink(self, table: list[int], num_tokens: int) -> None:
        """Release the blocks of `table` that `num_tokens` tokens do not need."""
        keep = self.blocks_for(num_tokens)
        while len(table) > keep:
            block = table.pop()
            assert block in self._used, f"block {block} freed twice"
            self._used.remove(block)
            self._free.append(block)
