"""Merging the still valid tokens of every row with the tokens that follow them: torch reference.

Does not know what the tokens are: ids and positions are merged by the same function.
Legend: B rows, N tokens packed over the rows, M next tokens at most, T output tokens.
"""

import torch
from torch import Tensor


def merge_tokens_reference(
    tokens: Tensor,
    start: Tensor,
    end: Tensor,
    next_tokens: Tensor,
    next_lens: Tensor,
    out_start: Tensor,
    total: int,
    fill: int = 0,
) -> tuple[Tensor, Tensor]:
    """See `ops.merge_tokens`. Every output token is one gather from `tokens ++ next ++ fill`."""
    num_tokens, (num_rows, width) = tokens.shape[0], next_tokens.shape
    place = torch.arange(total, device=tokens.device)
    row = torch.searchsorted(out_start[1:].long(), place, right=True)
    offset = place - out_start[row]
    beyond = offset - (end - start[:-1])[row]
    kept = beyond < 0
    added = ~kept & (beyond < next_lens[row])

    pool = torch.cat([tokens, next_tokens.reshape(-1), tokens.new_full((1,), fill)])
    index = torch.where(added, num_tokens + row * width + beyond, num_tokens + num_rows * width)
    index = torch.where(kept, start[row] + offset, index)
    return pool[index], ~(kept | added)
