"""The end of a round: how far each sequence gets, and what the host is told. Torch reference.

Legend: B sequences, K proposal length.
"""

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
    # Sequence by sequence: the many operations it would take otherwise cost more, of a few.
    ends = set(eos_ids.tolist())
    told = zip(
        *(x.tolist() for x in (tokens, accepted, lens, length, limit, active, tail)), strict=True
    )
    noted, lengths, still, tails = [], [], [], []
    for b, (decided, count, proposed, at, most, is_active, last) in enumerate(told):
        noted.append([*decided, count, proposed])
        new = [max(0, token) for token in decided[: max(0, count) + 1]] if is_active else []
        end = next((i for i, token in enumerate(decided[: len(new)]) if token in ends), None)
        new = new if end is None else new[: end + 1]
        if new and history is not None and rows is not None:
            history[rows[b], at : at + len(new)] = history.new_tensor(new)
        lengths.append(at + len(new))
        still.append(is_active and end is None and lengths[-1] < most)
        tails.append([*last, *new][-2:])
    for held, values in ((record, noted), (length, lengths), (active, still), (tail, tails)):
        held.copy_(held.new_tensor(values))
