"""From logits to a distribution, and the random numbers that draw from it."""

from enum import IntEnum

import torch
from specdec_kernels.sampling.logits import to_probs as logits_to_probs
from specdec_kernels.sampling.noise import uniform_reference

from specdec_cli.core.types import RoundNoise, SamplingParams


class Purpose(IntEnum):
    """What a random number decides; part of its counter, so that no number serves twice."""

    DRAFT = 0
    ACCEPT = 1
    SAMPLE = 2


def to_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Distribution over the vocabulary, fp32, of the shape of `logits` [..., V].

    See `specdec_kernels.sampling.logits.to_probs`, the one definition.
    """
    return logits_to_probs(logits, params.temperature, params.top_k, params.top_p)


def uniform(
    seed: int, index: torch.Tensor, position: torch.Tensor, purpose: torch.Tensor
) -> torch.Tensor:
    """One number in [0, 1) for each (prompt index, token position, purpose), fp32.

    The position is that of the token being decided. Batch, order, preemption and shards do not
    enter, so they cannot change what is sampled. Arguments broadcast; int64.
    """
    return uniform_reference(torch.tensor(seed), index, position, purpose)


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
    if params.is_greedy and not even_greedy:
        zeros = torch.zeros(3, batch, k + 1, device=device)
        return RoundNoise(zeros[0, :, :k], zeros[1, :, :k], zeros[2])
    index = torch.tensor(indices, dtype=torch.int64)[:, None]
    position = torch.tensor(lengths, dtype=torch.int64)[:, None] + torch.arange(k + 1)
    purposes = torch.tensor([Purpose.DRAFT, Purpose.ACCEPT, Purpose.SAMPLE])[:, None, None]
    noise = uniform(params.seed, index, position, purposes).to(device, non_blocking=True)
    return RoundNoise(noise[0, :, :k], noise[1, :, :k], noise[2])
