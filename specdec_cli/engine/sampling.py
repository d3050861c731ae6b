"""From logits to a distribution, and the random numbers that draw from it.

`to_probs` is the only place in the project that turns logits into a distribution; the draft's q
and the target's p both come from it, so the acceptance test compares like with like.
"""

from enum import IntEnum

import torch

from specdec_cli.engine.types import RoundNoise, SamplingParams

_MASK = 0xFFFFFFFF
_PHILOX_ROUNDS = 10


class Purpose(IntEnum):
    """What a random number decides; part of its counter, so that no number serves twice."""

    DRAFT = 0
    ACCEPT = 1
    SAMPLE = 2


def to_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Distribution over the vocabulary, fp32, of the shape of `logits` [..., V].

    Temperature, then top-k, then top-p, in the order and with the tie rules of transformers'
    generation: top-k keeps ties with the k-th value, top-p keeps the smallest set whose mass
    reaches `top_p` and at least one token. Temperature 0 is the one-hot at the first maximum.
    A row with a NaN or +inf has a NaN for its sum, which verification reports.
    """
    logits = logits.float()
    if params.temperature == 0.0:
        best = logits.argmax(dim=-1, keepdim=True)
        # NaN compares as the maximum; its value, copied in, marks the row.
        value = logits.gather(-1, best)
        return torch.zeros_like(logits).scatter_(-1, best, value - value + 1.0)
    # Shifting first keeps tiny temperatures finite: the maximum stays 0. fp32 has no number below
    # `tiny` to divide by.
    temperature = max(params.temperature, torch.finfo(torch.float32).tiny)
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature
    vocab = logits.shape[-1]
    if 0 < params.top_k < vocab:
        kth = logits.topk(params.top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if params.top_p < 1.0:
        ascending, order = logits.sort(dim=-1)
        drop = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1.0 - params.top_p
        drop[..., -1] = False
        logits = logits.masked_fill(drop.scatter(-1, order, drop), float("-inf"))
    return logits.softmax(dim=-1)


def philox(counter: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    counter: int64 [..., 4], key: int64 [..., 2], each entry an unsigned 32-bit word.
    Returns int64 [..., 4] of unsigned 32-bit words. Works on any device.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = key.unbind(-1)
    for _ in range(_PHILOX_ROUNDS):
        # int64 products wrap, which keeps all 64 bits; masking undoes the sign extension.
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((p1 >> 32) & _MASK) ^ c1 ^ k0,
            p1 & _MASK,
            ((p0 >> 32) & _MASK) ^ c3 ^ k1,
            p0 & _MASK,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return torch.stack((c0, c1, c2, c3), dim=-1)


def uniform(
    seed: int, index: torch.Tensor, position: torch.Tensor, purpose: torch.Tensor
) -> torch.Tensor:
    """One number in [0, 1) for each (prompt index, token position, purpose), fp32.

    The position is that of the token being decided. Batch, order, preemption and shards do not
    enter, so they cannot change what is sampled. Arguments broadcast; int64.
    """
    index, position, purpose = torch.broadcast_tensors(index, position, purpose)
    zero = torch.zeros_like(index)
    counter = torch.stack((position, purpose, zero, zero + ((seed >> 32) & _MASK)), dim=-1)
    key = torch.stack((zero + (seed & _MASK), index & _MASK), dim=-1)
    word = philox(counter, key)[..., 0]
    return (word >> 8).to(torch.float32) * 2.0**-24


def round_noise(
    indices: list[int],
    lengths: list[int],
    k: int,
    params: SamplingParams,
    device: torch.device,
    *,
    even_greedy: bool = False,
) -> RoundNoise:
    """The noise of a round over sequences with these prompt indices and token counts.

    Rejection sampling reads no noise when decoding is greedy, so zeros serve, unless `even_greedy`.
    """
    batch = len(indices)
    if params.temperature == 0.0 and not even_greedy:
        zeros = torch.zeros(3, batch, k + 1, device=device)
        return RoundNoise(zeros[0, :, :k], zeros[1, :, :k], zeros[2])
    index = torch.tensor(indices, dtype=torch.int64)[:, None]
    position = torch.tensor(lengths, dtype=torch.int64)[:, None] + torch.arange(k + 1)
    purposes = torch.tensor([Purpose.DRAFT, Purpose.ACCEPT, Purpose.SAMPLE])[:, None, None]
    noise = uniform(params.seed, index, position, purposes).to(device, non_blocking=True)
    return RoundNoise(noise[0, :, :k], noise[1, :, :k], noise[2])
