"""The paged KV cache: the slot of each token, and storing keys and values there.

Legend: B rows, T packed tokens, MB block-table columns, NB blocks of BS slots, Hkv key heads.
Block 0 is the trash block.
"""

import torch
from torch import Tensor

from specdec_kernels.dispatch import kernel

MANY = 64  # fewer slots are not worth a look at them


@kernel("specdec_kernels.attention.cache_triton:slot_mapping_triton")
def slot_mapping(
    block_tables: Tensor,
    out_start: Tensor,
    positions: Tensor,
    rejected: Tensor | None,
    block_size: int,
    max_model_len: int,
) -> Tensor:
    """KV cache slot of every token: `block_tables[b, pos // block_size]`, at `pos % block_size`.

    Rejected tokens, positions at or past `max_model_len` or the block table's end, and tokens at
    or past `out_start[B]` (padding) go to the trash block.

    Args:
        block_tables: [B, MB] int32.
        out_start: [B + 1] int32, where each row begins in `positions`.
        positions: [T] int64.
        rejected: [T] bool, or None for none.
        block_size: Slots a block.
        max_model_len: Positions a sequence may have.

    Returns:
        [T] int64, indices into `[NB * BS]`.
    """
    num_rows, num_columns = block_tables.shape
    place = torch.arange(positions.shape[0], device=positions.device)
    row = torch.searchsorted(out_start[1:].long(), place, right=True)
    limit = min(max_model_len, num_columns * block_size)
    trash = (positions >= limit) | (row >= num_rows)
    if rejected is not None:
        trash = trash | rejected
    column = (positions // block_size).clamp(0, num_columns - 1)
    block = block_tables[row.clamp(max=num_rows - 1), column].long().masked_fill(trash, 0)
    return block * block_size + positions % block_size


@kernel("specdec_kernels.attention.cache_triton:write_kv_triton")
def write_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Store each token's key and value at its slot, in place.

    Only trash slots may occur twice; which of their tokens remains is not defined.

    Args:
        key: [T, Hkv, Dk].
        value: [T, Hkv, Dv].
        key_cache: [NB, BS, Hkv, Dk].
        value_cache: [NB, BS, Hkv, Dv].
        slots: [T] int64, as from `slot_mapping`.
    """
    keys = key_cache.view(-1, *key_cache.shape[2:])
    values = value_cache.view(-1, *value_cache.shape[2:])
    if (first := _first_of_run(slots)) is not None:
        keys[first : first + len(key)].copy_(key)
        values[first : first + len(value)].copy_(value)
        return
    keys.index_copy_(0, slots, key)
    values.index_copy_(0, slots, value)


def _first_of_run(slots: Tensor) -> int | None:
    """The first of many slots that follow each other, as in a cache with one sequence; else None.

    Copied in one piece they take a CPU a fifth of the time.
    """
    if slots.is_cuda or len(slots) < MANY:
        return None
    numbers = slots.numpy()
    is_run = bool((numbers[1:] - numbers[:-1] == 1).all())
    return int(numbers[0]) if is_run else None
