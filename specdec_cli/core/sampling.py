"""Samples tokens from logits, and generates the random numbers for sampling."""

from enum import IntEnum

import torch
from specdec_kernels import ops
from specdec_kernels.sampling.reference import to_probs as logits_to_probs

from specdec_cli.core.candidates import Noise
from specdec_cli.core.types import SamplingParams


class Purpose(IntEnum):
    """The purpose of a random number. It is part of the random number generator's counter, so
    different purposes never use the same number."""

    DRAFT = 0
    ACCEPT = 1
    SAMPLE = 2


def to_probs(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Convert `logits` [..., V] to probabilities over the vocabulary, fp32 [..., V], after
    temperature, top-k and top-p. See `specdec_kernels.sampling.reference.to_probs`."""
    return logits_to_probs(logits, *params.filters)


def round_noise(
    seed: torch.Tensor,
    index: torch.Tensor,
    length: torch.Tensor,
    k: int,
    *,
    by_round: bool = False,
) -> Noise:
    """Generate the random numbers of one round.

    Each number depends only on the seed, the prompt index, the number's purpose and the position of
    the token that it decides. So batch, order, preemption and shards cannot change what is sampled.

    seed: int64 scalar.
    index: int64 [B], the prompt index of each sequence.
    length: int64 [B], the number of tokens of each sequence.
    by_round: True if numbers also depend on the position at which the round starts; acceptance
    rules that look ahead need this.
    """
    noise = ops.uniform_rows(seed, index, length, len(Purpose), k + 1, by_round)
    return Noise(noise[Purpose.DRAFT, :, :k], noise[Purpose.ACCEPT, :, :k], noise[Purpose.SAMPLE])


def next_tokens(
    logits: torch.Tensor,
    params: SamplingParams,
    seed: torch.Tensor,
    index: torch.Tensor,
    length: torch.Tensor,
) -> torch.Tensor:
    """Draw one token from each row of `logits` [R, V], in a round without proposals. Returns int64
    [R], with -1 for rows that are not finite. seed, index, length: as for `round_noise`, with
    B = R."""
    if params.is_greedy:
        return draw(logits, None, params, None)
    noise = round_noise(seed, index, length, 0)
    return draw(logits, None, params, noise.sample[:, 0])


def softmax_stats(logits: torch.Tensor, params: SamplingParams) -> ops.LogitRows | None:
    """Compute statistics of logits [R, V] that sampling on CUDA reuses. Returns None on a CPU,
    where each operation reads the logits again."""
    return ops.logit_rows(logits, *params.filters) if logits.is_cuda else None


def greedy_pick(logits: torch.Tensor) -> torch.Tensor:
    """Return the index of the first maximum in each row of `logits` [..., V]. The result is int64
    [...], with -1 for rows that are not finite."""
    return ops.greedy_argmax(logits.flatten(0, -2)).view(logits.shape[:-1])


def by_target_ids(logits: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Convert logits over the draft's vocabulary, [..., V'], to the target's, [..., V].

    Tokens that the draft cannot propose get -inf. ids: int64 [V'], the target's id of each draft
    id.
    """
    wide = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
    return wide.index_copy_(-1, ids, logits)


def draw(
    logits: torch.Tensor,
    stats: ops.LogitRows | None,
    params: SamplingParams,
    noise: torch.Tensor | None,
) -> torch.Tensor:
    """Draw one token from each row of `logits` [R, V]. Returns int64 [R], with -1 for rows that are
    not finite.

    stats: the result of `softmax_stats` for `logits`; None to compute it here.
    noise: fp32 [R], uniform random numbers; None if decoding is greedy.
    """
    if params.is_greedy:
        return ops.greedy_argmax(logits)
    assert noise is not None
    stats = softmax_stats(logits, params) if stats is None else stats
    return ops.sample_logits(logits, stats, *params.filters, noise)
