"""Inputs of a pass that feeds the same number of tokens for every sequence: torch reference.

Legend: B sequences, Q tokens of each, MB block-table columns. Block 0 is the trash block.
"""

import torch
from torch import Tensor


def padded_pass_reference(
    tokens: Tensor,
    length: Tensor,
    lens: Tensor,
    active: Tensor,
    block_tables: Tensor,
    offset: int,
    margin: int,
    block_size: int,
    max_len: int,
    num_ids: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `ops.padded_pass`."""
    place = offset + torch.arange(tokens.shape[1], device=tokens.device)
    at = length[:, None] + place
    live = (at >= 0) & (at < max_len) & (lens[:, None] >= place + margin) & active[:, None]
    position = at.clamp(0, max_len - 1)
    column = (position // block_size).clamp(max=block_tables.shape[1] - 1)
    block = block_tables.gather(1, column).long() * live
    slots = block * block_size + position % block_size
    context = (at[:, -1] + 1).to(torch.int32)
    ids = tokens.clamp(0, num_ids - 1)
    return ids.reshape(-1), position.view(-1), slots.view(-1), context
