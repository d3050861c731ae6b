"""Noise, distributions from logits, draws and rejection sampling: torch implementations, and the
kernels' names.

`to_probs` is the project's only definition of temperature, top-k and top-p, for the draft's q and
the target's p alike. Noise is an input, so every outcome is a function of the arguments. Legend: R
rows, V vocabulary, B sequences, K draft tokens.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.dispatch import kernel

TINY = torch.finfo(torch.float32).tiny  # smallest fp32 divisor

INF = float("inf")

MASK = 0xFFFFFFFF

PHILOX_ROUNDS = 10
_PHILOX = (
    torch.tensor([0xD2511F53, 0xCD9E8D57]).numpy().view("uint64"),  # factors of a counter's words
    torch.tensor([0x9E3779B9, 0xBB67AE85]).numpy().view("uint64"),  # increments of a key's words
)


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): words
    int64 [..., 4] of a counter int64 [..., 4] and a key int64 [..., 2], all unsigned of 32 bits."""
    # For the few numbers of a round, numpy needs a third of torch's time.
    words, keys = (x.cpu().movedim(-1, 0).numpy().view("uint64") for x in (counter, key))
    even, odd = words[::2], words[1::2]
    factors, steps = (x.reshape(2, *[1] * (counter.dim() - 1)) for x in _PHILOX)
    for _ in range(PHILOX_ROUNDS):
        product = even * factors
        even, odd = (product >> 32)[::-1] ^ odd ^ keys, (product & MASK)[::-1]
        keys = (keys + steps) & MASK
    out = torch.empty(counter.shape, dtype=torch.int64)
    for place, word in enumerate((even[0], odd[0], even[1], odd[1])):
        out[..., place].numpy()[...] = word
    return out.to(counter.device)


def uniform_reference(
    seed: Tensor, index: Tensor, position: Tensor, purpose: Tensor, start: Tensor | None = None
) -> Tensor:
    """One fp32 number in [0, 1) for each (index, position, purpose), int64, broadcast. start: the
    first position of a round; rounds with other starts get other numbers."""
    third = torch.zeros_like(seed) if start is None else start + 1
    low, high = seed & MASK, (seed >> 32) & MASK
    counter = torch.stack(torch.broadcast_tensors(position, purpose, third, high, index)[:4], -1)
    key = torch.stack(torch.broadcast_tensors(low, index & MASK, counter[..., 0])[:2], -1)
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
    """Uniform numbers [purposes, B, width] fp32 in [0, 1) from Philox4x32-10.

    seed: int64 scalar. index: [B] int64; it and the seed are the key. position: [B] int64; number j
    of row b has counter (position[b] + j, purpose). by_round: put position[b] into the counter too,
    so that a round that begins elsewhere has other numbers. Block verification needs that.
    """
    place = torch.arange(width, device=index.device)
    purpose = torch.arange(purposes, device=index.device)[:, None, None]
    start = position[:, None]
    return uniform_reference(
        seed, index[:, None], start + place, purpose, start if by_round else None
    )


class LogitRows(NamedTuple):
    """Softmax statistics that turn rows of logits into distributions, see `logit_rows`.

    rows: [R, 4] fp32. Maximum m; normaliser, the sum of exp((x - m) / T) over what is kept, NaN
        where the row is void; threshold t and index c: x is kept iff x > t, or x == t and its
        index is c or more.
    parts: [R, P] fp32, the normaliser's share of each of P equal parts of the vocabulary.
    """

    rows: Tensor
    parts: Tensor


def masked_scores(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """(x - maximum) / T of `logits` [..., V], -inf where top-k or top-p drop: fp32."""
    logits = logits.float()
    # Shifting first keeps tiny temperatures finite: the maximum stays 0.
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, TINY)
    vocab = logits.shape[-1]
    # Compare logits instead of scores, which may round to the same value.
    if 0 < top_k < vocab:
        kth = logits.topk(top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(logits < kth, -INF)
    if top_p < 1.0:
        order = logits.argsort(dim=-1, stable=True)
        mass = scores.gather(-1, order).softmax(dim=-1).cumsum(dim=-1)
        drop = mass <= 1.0 - top_p
        drop[..., -1] = False
        scores = scores.masked_fill(drop.scatter(-1, order, drop), -INF)
    return scores


def to_probs(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Distribution over the vocabulary, fp32, of the shape of `logits` [..., V].

    Temperature, top-k and top-p apply in this order, as in transformers' generation, and keep as
    many tokens as there: top-k keeps ties with the k-th value; top-p keeps the smallest set whose
    mass reaches `top_p`, at least one token. Of equal tokens at that border those with higher index
    stay; in transformers the sort does not define this. Temperature 0 is the one-hot at the first
    maximum. A row with a NaN or +inf, or of -inf alone, sums to NaN, which verification reports.
    """
    if temperature == 0.0:
        logits = logits.float()
        best = logits.argmax(dim=-1, keepdim=True)
        # NaN counts as the maximum; this copies it in to mark the row.
        value = logits.gather(-1, best)
        return torch.zeros_like(logits).scatter_(-1, best, value - value + 1.0)
    return masked_scores(logits, temperature, top_k, top_p).softmax(dim=-1)


@kernel("specdec_kernels.sampling.logit_rows_triton:logit_rows_triton")
def logit_rows(logits: Tensor, temperature: float, top_k: int, top_p: float) -> LogitRows:
    """Softmax statistics with which the other functions read logits as `to_probs` does.

    A row that holds a NaN or +inf, or only -inf, is void. The torch implementation has one part.
    logits: [R, V] bf16, fp16 or fp32, rows contiguous. temperature: above 0. top_k: 0 keeps all.
    top_p: 1 keeps all.
    """
    assert temperature > 0.0
    scores = masked_scores(logits, temperature, top_k, top_p)
    logits = logits.float()
    total = scores.exp().sum(dim=-1)
    kept = scores > -INF
    threshold = logits.masked_fill(~kept, INF).amin(dim=-1)
    at_border = kept & (logits == threshold[:, None])
    first = at_border.to(torch.int32).argmax(dim=-1).float()
    rows = torch.stack((logits.amax(dim=-1), total, threshold, first), dim=1)
    return LogitRows(rows, total[:, None])


@kernel("specdec_kernels.sampling.argmax_triton:greedy_argmax_triton")
def greedy_argmax(logits: Tensor) -> Tensor:
    """The index of the first maximum of every row of [R, V]: [R] int64; -1 where it is not
    finite."""
    top, first = logits.max(dim=1)
    # Use a difference, because inf - inf is NaN and so not zero; `isfinite` takes five operations
    # on a CPU.
    return first.masked_fill_((top - top) != 0, -1)


def sample_categorical_reference(weights: Tensor, noise: Tensor) -> Tensor:
    """Draw from unnormalised `weights` [N, V] by inverse CDF, `noise` [N] in [0, 1): [N] int64.

    The smallest index whose running sum exceeds noise * total, never one with zero weight; -1 if
    the row holds a NaN. On CPU torch carries a running sum of fp32 in fp64.
    """
    running = weights.cumsum(1)
    total = running[:, -1]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(noise * total, below_total)
    index = torch.searchsorted(running, threshold[:, None], right=True).squeeze(1)
    return index.clamp(max=weights.shape[1] - 1).masked_fill(total.isnan(), -1)


def emitted(
    draft_tokens: Tensor, lens: Tensor, target_probs: Tensor, accepted: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """The output of a round: tokens [B, K + 1] int64 and accepted [B] int32. Inputs, [B] int64
    each: the number of accepted draft tokens, and the `last` token after them."""
    place = torch.arange(draft_tokens.shape[1] + 1, device=lens.device)
    stop = accepted[:, None]
    tokens = F.pad(draft_tokens, (0, 1)).masked_fill_(place >= stop, -1)
    tokens.scatter_(1, stop, last[:, None])
    # A NaN in any target row that counts voids the whole sequence.
    void = (target_probs.sum(2).isnan() & (place <= lens[:, None])).any(1)
    tokens.masked_fill_(void[:, None], -1)
    return tokens, accepted.masked_fill(void, -1).to(torch.int32)


def rejection_sample_reference(
    draft_tokens: Tensor,
    lens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    accept_noise: Tensor,
    sample_noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Modified rejection sampling: tokens distributed like the target's, for any draft.

    Leviathan et al. (arXiv 2211.17192), Chen et al. (2302.01318). With u the accept noise, draft
    d_i is accepted iff u_i * q_i(d_i) < p_i(d_i). At the first rejection, a, one token is drawn
    from norm(max(p_a - q_a, 0)), or from p_a if rounding leaves that empty. If all k are accepted,
    it is drawn from p_k. Draws are by inverse CDF with `sample_noise` at that position.
    draft_probs: [B, K, V] fp32. target_probs: [B, K + 1, V] fp32. The others are as in
    `Verification`.

    Returns tokens [B, K + 1] int64, the accepted drafts and one more, padded with -1, and accepted
    [B] int32, the number of accepted drafts. A NaN in the target's probabilities makes both -1.
    """
    num_rows, width = draft_tokens.shape
    row = torch.arange(num_rows, device=lens.device)
    place = torch.arange(width + 1, device=lens.device)
    length = lens.long()[:, None]

    # 1. Accept d_i iff u_i * q(d_i) < p(d_i); count the run of acceptances from the left.
    drafted = place[:width] < length
    token = draft_tokens.masked_fill(~drafted, 0)[..., None]
    q = draft_probs.gather(2, token).squeeze(2)
    p = target_probs[:, :width].gather(2, token).squeeze(2)
    accept = drafted & (accept_noise * q < p)
    accepted = accept.long().cumprod(1).sum(1)

    # 2. Weights of the one token to draw: max(p - q, 0) after a rejection, p otherwise. A NaN in q
    # makes the residual's sum NaN, not positive, so that p alone decides.
    stop = accepted[:, None]
    weights = target_probs[row, accepted]
    if width > 0:
        residual = (weights - draft_probs[row, accepted.clamp(max=width - 1)]).clamp_(min=0)
        from_residual = (stop < length) & (residual.sum(1, keepdim=True) > 0)
        weights = torch.where(from_residual, residual, weights)
    last = sample_categorical_reference(weights, sample_noise.gather(1, stop).squeeze(1))

    return emitted(draft_tokens, lens, target_probs, accepted, last)


@kernel("specdec_kernels.sampling.logits_triton:sample_logits_triton")
def sample_logits(
    logits: Tensor,
    stats: LogitRows | None,
    temperature: float,
    top_k: int,
    top_p: float,
    noise: Tensor,
) -> Tensor:
    """Draw from every row's distribution: [R] int64, -1 for void rows.

    CUDA needs `stats`, the result of `logit_rows` with the arguments before it. noise: [R] fp32 in
    [0, 1).
    """
    return sample_categorical_reference(to_probs(logits, temperature, top_k, top_p), noise)


class Verification(NamedTuple):
    """The arguments of a rule that verifies the proposals of B sequences, at most K each."""

    draft_tokens: Tensor
    """[B, K] int64, -1 from void rows; entries at or past `lens` are ignored."""
    lens: Tensor
    """[B] int64 or int32, 0..K, drafted tokens of each row."""
    draft_logits: Tensor | None
    """[B, K, V'] bf16, fp16 or fp32, V' <= V, rows contiguous. Ids at or past V' have probability
    0. None for proposals that were not drawn: q is one-hot at each."""
    draft_rows: Tensor | None
    """[B, K, 4], `rows` of the draft's `logit_rows`; None if `draft_logits` is."""
    target_logits: Tensor
    """[B, K + 1, V] of any of these types, rows contiguous."""
    target: LogitRows | None
    """`logit_rows` of the B * (K + 1) rows; needed on CUDA only."""
    temperature: float
    """This and the next two as `logit_rows` had them."""
    top_k: int
    top_p: float
    accept_noise: Tensor
    """[B, K] fp32 in [0, 1), the noise of the acceptance tests."""
    sample_noise: Tensor
    """[B, K + 1] fp32 in [0, 1), the noise of the next token's draw."""


@kernel("specdec_kernels.sampling.verify_triton:reject_logits_triton")
def reject_logits(v: Verification) -> tuple[Tensor, Tensor]:
    """`rejection_sample_reference` over logits: no probabilities are stored.

    Returns tokens and accepted as it does, int64: -2 where a draft token is negative, else -1 (and
    the tokens too) where a target row up to `lens` is void.
    """
    return verified_by(rejection_sample_reference, v)


def verified_by(
    rule: Callable[..., tuple[Tensor, Tensor]], v: Verification
) -> tuple[Tensor, Tensor]:
    """`reject_logits` with a rule over probabilities, such as `rejection_sample_reference`."""
    filters, vocab = (v.temperature, v.top_k, v.top_p), v.target_logits.shape[2]
    drafts, p = v.draft_tokens.clamp(min=0), to_probs(v.target_logits, *filters)
    if v.draft_logits is None:
        q = F.one_hot(drafts, vocab).float()
    else:
        missing = vocab - v.draft_logits.shape[2]
        q = to_probs(F.pad(v.draft_logits, (0, missing), value=-INF), *filters)
    tokens, accepted = rule(drafts, v.lens, q, p, v.accept_noise, v.sample_noise)
    place = torch.arange(drafts.shape[1], device=drafts.device)
    is_spoilt = ((v.draft_tokens < 0) & (place < v.lens[:, None])).any(dim=1)
    return tokens, accepted.long().masked_fill(is_spoilt, -2)
