"""Merging each row's valid tokens with the tokens that follow them.

Ids and positions are merged by the same function.
Legend: B rows, N tokens packed over the rows, M next tokens at most, T output tokens.
"""

import torch
from torch import Tensor

from specdec_kernels.dispatch import kernel


@kernel("specdec_kernels.ragged.merge_triton:merge_tokens_triton")
def merge_tokens(
    tokens: Tensor,
    start: Tensor,
    end: Tensor,
    next_tokens: Tensor,
    next_lens: Tensor,
    out_start: Tensor,
    total: int,
    fill: int = 0,
) -> tuple[Tensor, Tensor]:
    """Keep the valid tokens of every row, append the next ones, fill up to the row's capacity.

    Args:
        tokens: [N] int64, packed.
        start: [B + 1] int32, where each row begins in `tokens`.
        end: [B] int32, end (exclusive) of the row's valid tokens; the rest were rejected.
        next_tokens: [B, M] int64.
        next_lens: [B] int32, 0..M, how many of `next_tokens` to append.
        out_start: [B + 1] int32, where each row begins in the output.
        total: `out_start[B]`, known on the host.
        fill: A valid token id for the unused places: they pass through the embedding.

    Returns:
        merged [total] int64, and rejected [total] bool, True at the filled places.
    """
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
