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
    if rates is None or accept_noise is None:
        stands = proposed == best[:, : proposed.shape[1]]
    else:
        stands = accept_noise < rates
    # Token by token: the many operations it would take otherwise cost more, of a few sequences.
    tokens, accepted = [], []
    rows = zip(*(t.tolist() for t in (proposed, best, lens, stands)), strict=True)
    for drafted, own, length, stood in rows:
        count = 0
        while count < length and stood[count]:
            count += 1
        tokens.append([*drafted[:count], own[count], *drafted[count + 1 :], 0][: len(own)])
        if min(drafted[:length], default=0) < 0:
            count = -2
        elif min(own[: length + 1]) < 0:
            count = -1
        accepted.append(count)
    return proposed.new_tensor(tokens).view(best.shape), proposed.new_tensor(accepted)


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
    history: Tensor | None = None,
    rows: Tensor | None = None,
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
    if history is not None and rows is not None:
        counts = active[:, None] & (place < count[:, None])
        at = (rows[:, None].expand_as(counts)[counts], (length[:, None] + place)[counts])
        history.index_put_(at, tokens[counts].clamp(min=0).to(history.dtype))
    length.add_(count * active)
    active.logical_and_((first == width) & (length < limit))
