"""Where in the paged KV cache each token's key and value go: torch reference.

Does not know the cache itself: a slot is an index into `[num_blocks * block_size]`.
Legend: B rows, T packed tokens, MB block-table columns. Block 0 is the trash block.
"""

import torch
from torch import Tensor


def slot_mapping_reference(
    block_tables: Tensor,
    out_start: Tensor,
    positions: Tensor,
    rejected: Tensor | None,
    block_size: int,
    max_model_len: int,
) -> Tensor:
    """See `ops.slot_mapping`."""
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
