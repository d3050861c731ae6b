"""The end of a round: how far each sequence gets, and what the host is told. Torch reference.

Legend: B sequences, K proposal length.
"""

import torch
from torch import Tensor


def accept_reference(
    proposed: Tensor,
    best: Tensor,
    lens: Tensor,
    accept_noise: Tensor | None,
    rates: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """See `ops.accept`."""
    width = proposed.shape[1]
    place = torch.arange(width + 1, device=proposed.device)
    drafted = place[:width] < lens[:, None]
    if rates is None or accept_noise is None:
        stands = drafted & (proposed == best[:, :width])
    else:
        stands = drafted & (accept_noise < rates)
    accepted = stands.long().cumprod(1).sum(1)
    own = best.gather(1, accepted[:, None])
    tokens = torch.nn.functional.pad(proposed, (0, 1)).scatter(1, accepted[:, None], own)
    void = ((best < 0) & (place <= lens[:, None])).any(1)
    spoilt = (drafted & (proposed < 0)).any(1)
    return tokens, accepted.masked_fill(void, -1).masked_fill(spoilt, -2)


def advance_reference(
    tokens: Tensor,
    accepted: Tensor,
    lens: Tensor,
    tail: Tensor,
    length: Tensor,
    limit: Tensor,
    active: Tensor,
    eos_ids: Tensor,
    record: Tensor,
) -> None:
    """See `ops.advance`."""
    width = tokens.shape[1]
    record.copy_(torch.cat((tokens, accepted[:, None], lens[:, None]), dim=1))
    place = torch.arange(width, device=tokens.device)
    count = accepted.clamp(min=0) + 1
    is_eos = torch.isin(tokens, eos_ids) & (place < count[:, None])
    first = torch.where(is_eos, place, width).amin(1)
    count = torch.minimum(count, first + 1)
    after = torch.cat((tail, tokens.clamp(min=0)), dim=1)
    moved = after.gather(1, count[:, None] + torch.arange(2, device=tokens.device))
    tail.copy_(torch.where(active[:, None], moved, tail))
    length.add_(count * active)
    active.logical_and_((first == width) & (length < limit))
