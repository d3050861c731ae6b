"""Counter-based uniform numbers: torch reference, and the host's path.

A number is a function of a seed and of what it decides; no generator has a state.
"""

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
PHILOX_ROUNDS = 10


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    counter: int64 [..., 4], key: int64 [..., 2], each entry an unsigned 32-bit word.
    Returns int64 [..., 4] of unsigned 32-bit words. Works on any device.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(PHILOX_ROUNDS):
        # int64 products wrap, which keeps all 64 bits; masking undoes the sign extension.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & MASK) ^ c1 ^ k0,
            p1 & MASK,
            ((p0 >> 32) & MASK) ^ c3 ^ k1,
            p0 & MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def uniform_reference(
    seed: Tensor,
    index: Tensor,
    position: Tensor,
    purpose: Tensor,
    round_start: Tensor | None = None,
) -> Tensor:
    """One number in [0, 1), fp32, for each (index, position, purpose); int64, broadcast.

    With `round_start`, the position of a round's first number, for each (..., round_start).
    """
    index, position, purpose = torch.broadcast_tensors(index, position, purpose)
    zero = torch.zeros_like(index)
    # One more than the start, so that no round has the numbers of those without.
    which = zero if round_start is None else zero + round_start + 1
    counter = torch.stack((position, purpose, which, zero + ((seed >> 32) & MASK)), dim=-1)
    key = torch.stack((zero + (seed & MASK), index & MASK), dim=-1)
    word = philox(counter, key)[..., 0]
    return (word >> 8).to(torch.float32) * 2.0**-24


def uniform_rows_reference(
    seed: Tensor,
    index: Tensor,
    position: Tensor,
    purposes: int,
    width: int,
    by_round: bool = False,
) -> Tensor:
    """See `ops.uniform_rows`."""
    place = torch.arange(width, device=index.device)
    purpose = torch.arange(purposes, device=index.device)[:, None, None]
    start = position[:, None]
    round_start = start if by_round else None
    return uniform_reference(seed, index[:, None], start + place, purpose, round_start)
