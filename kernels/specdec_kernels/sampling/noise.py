"""Counter-based uniform numbers: torch implementation, also for the host.

A number is a function of a seed and of what it decides. There is no generator state.
"""

import torch
from torch import Tensor

from specdec_kernels.dispatch import kernel

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
    seed: Tensor, index: Tensor, position: Tensor, purpose: Tensor, start: Tensor | None = None
) -> Tensor:
    """One number in [0, 1), fp32, for each (index, position, purpose); int64, broadcast.

    start: position at which the round begins, for numbers of that round alone.
    """
    third = torch.zeros_like(index) if start is None else start + 1
    index, position, purpose, third = torch.broadcast_tensors(index, position, purpose, third)
    zero = torch.zeros_like(index)
    counter = torch.stack((position, purpose, third, zero + ((seed >> 32) & MASK)), dim=-1)
    key = torch.stack((zero + (seed & MASK), index & MASK), dim=-1)
    word = philox(counter, key)[..., 0]
    return (word >> 8).to(torch.float32) * 2.0**-24


@kernel("specdec_kernels.sampling.noise_triton:uniform_rows_triton")
def uniform_rows(
    seed: Tensor,
    index: Tensor,
    position: Tensor,
    purposes: int,
    width: int,
    by_round: bool = False,
) -> Tensor:
    """Uniform numbers in [0, 1) from Philox4x32-10, each a function of what it decides.

    Args:
        seed: int64 scalar.
        index: [B] int64, with the seed the key.
        position: [B] int64; number j of row b has counter (position[b] + j, purpose).
        purposes: How many numbers every position has.
        width: Positions a row.
        by_round: Put position[b] into the counter as well. A round that begins elsewhere then has
            other numbers at the same positions, which block verification needs.

    Returns:
        [purposes, B, width] fp32.
    """
    place = torch.arange(width, device=index.device)
    purpose = torch.arange(purposes, device=index.device)[:, None, None]
    start = position[:, None]
    return uniform_reference(
        seed, index[:, None], start + place, purpose, start if by_round else None
    )
