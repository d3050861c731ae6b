"""Noise, distributions from logits, sampling and rejection sampling: the torch implementations.
Each is decorated with the name of its Triton kernel.

`to_probs` is the project's only definition of temperature, top-k and top-p. It computes both the
draft's distributions q and the target's p. Random numbers are passed in as noise, so every function
is deterministic.

Legend for shapes: R rows, V vocabulary, B sequences, K draft tokens per sequence.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.dispatch import kernel

TINY = torch.finfo(torch.float32).tiny  # divisors are at least this, to avoid division by 0

INF = float("inf")

MASK = 0xFFFFFFFF

PHILOX_ROUNDS = 10
_PHILOX = (
    torch.tensor([0xD2511F53, 0xCD9E8D57]).numpy().view("uint64"),  # factors for counter words
    torch.tensor([0x9E3779B9, 0xBB67AE85]).numpy().view("uint64"),  # increments for key words
)


def philox(counter: Tensor, key: Tensor) -> Tensor:
    """Compute Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC
    2011). Returns the random words [..., 4] for a counter [..., 4] and a key [..., 2]. All are
    int64 tensors that hold unsigned 32-bit numbers."""
    # A round needs only a few numbers, which numpy computes three times as fast as torch.
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
    """Return one fp32 number in [0, 1) for each (index, position, purpose). The arguments are int64
    tensors whose shapes broadcast.

    start: the first position of a round, if rounds with different starts should get different
        numbers; None if the numbers should not depend on the round.
    """
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
    """Return uniform random numbers [purposes, B, width] fp32 in [0, 1) from Philox4x32-10.

    seed: int64 scalar.
    index: [B] int64. The seed and the index form the key.
    position: [B] int64. Number j of row b has the counter (position[b] + j, purpose).
    by_round: whether the counter also contains position[b], so that rounds with different first
        positions get different numbers at the same position. Block verification needs that.
    """
    place = torch.arange(width, device=index.device)
    purpose = torch.arange(purposes, device=index.device)[:, None, None]
    start = position[:, None]
    return uniform_reference(
        seed, index[:, None], start + place, purpose, start if by_round else None
    )


class LogitRows(NamedTuple):
    """Softmax statistics that turn rows of logits into distributions; see `logit_rows`.

    rows: [R, 4] fp32, with these columns:
        0. The maximum m.
        1. The normaliser: the sum of exp((x - m) / T) over the kept logits x; NaN if the row has no
        valid distribution.
        2. A threshold t.
        3. An index c. A logit x is kept iff x > t, or x == t and its index is at least c.
    parts: [R, P] fp32, the contribution of each of P equal parts of the vocabulary to the
        normaliser.
    """

    rows: Tensor
    parts: Tensor


def masked_scores(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return (x - maximum) / T in fp32 for `logits` x [..., V]; -inf for tokens that top-k or top-p
    drop."""
    logits = logits.float()
    # Subtract the maximum before dividing. Its score is then 0 even if the temperature is tiny;
    # otherwise the division could overflow.
    scores = (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, TINY)
    vocab = logits.shape[-1]
    # Compare logits instead of scores, because different logits may have equal scores after
    # rounding.
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
    """Return fp32 distributions over the vocabulary, in the shape of `logits` [..., V].

    Temperature, top-k and top-p are applied in this order, and keep as many tokens as they do in
    transformers. Top-k also keeps all ties with the k-th value. Top-p keeps the smallest set of
    tokens whose mass reaches `top_p`, but at least one token. If this set contains only some of
    several tokens with equal logits, they are those with the highest indices (in transformers, this
    depends on the sort).

    At temperature 0, the first maximum gets probability 1. If a row contains NaN or +inf, or only
    -inf, its result sums to NaN; verification reports such rows.
    """
    if temperature == 0.0:
        logits = logits.float()
        best = logits.argmax(dim=-1, keepdim=True)
        # argmax treats NaN as the maximum. value - value is NaN if `value` is NaN or infinite,
        # which marks the row as invalid; otherwise it is 0.
        value = logits.gather(-1, best)
        return torch.zeros_like(logits).scatter_(-1, best, value - value + 1.0)
    return masked_scores(logits, temperature, top_k, top_p).softmax(dim=-1)


@kernel("specdec_kernels.sampling.logit_rows_triton:logit_rows_triton")
def logit_rows(logits: Tensor, temperature: float, top_k: int, top_p: float) -> LogitRows:
    """Compute softmax statistics of each row. Other functions use them to compute probabilities as
    in `to_probs`, without storing whole distributions.

    A row that contains NaN or +inf, or only -inf, has no valid distribution and is called void. The
    torch implementation treats the vocabulary as one part.

    logits: [R, V] bf16, fp16 or fp32; each row is contiguous.
    temperature: above 0.
    top_k: 0 keeps all tokens.
    top_p: 1 keeps all tokens.
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
    """Return [R] int64: the index of the first maximum in each row of `logits` [R, V], or -1 if the
    maximum is not finite."""
    top, first = logits.max(dim=1)
    # top - top is zero if top is finite, and NaN otherwise. `isfinite` would take five operations
    # on a CPU.
    return first.masked_fill_((top - top) != 0, -1)


def sample_categorical_reference(weights: Tensor, noise: Tensor) -> Tensor:
    """Sample from unnormalised `weights` [N, V] by inverse CDF, with `noise` [N] in [0, 1).

    Returns [N] int64: the smallest index at which the running sum exceeds noise * total; -1 if the
    row has a NaN. A token with zero weight is never returned. On a CPU, torch computes the running
    sums of fp32 weights in fp64.
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
    """Build the results of a verification from its decisions. Returns tokens [B, K + 1] int64 and
    accepted [B] int32, as in `rejection_sample_reference`.

    accepted: [B] int64, the number of accepted draft tokens.
    last: [B] int64, the token after the accepted ones.
    """
    place = torch.arange(draft_tokens.shape[1] + 1, device=lens.device)
    stop = accepted[:, None]
    tokens = F.pad(draft_tokens, (0, 1)).masked_fill_(place >= stop, -1)
    tokens.scatter_(1, stop, last[:, None])
    # A NaN in any of the target's rows up to `lens` makes the whole sequence invalid.
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
    """Verify drafts by modified rejection sampling. The resulting tokens are distributed like
    samples from the target, whatever the draft.

    See Leviathan et al. (arXiv 2211.17192) and Chen et al. (arXiv 2302.01318). Let q be the draft's
    probabilities, p the target's, and u the `accept_noise`. Draft token d_i is accepted iff
    u_i * q_i(d_i) < p_i(d_i). If d_a is the first rejected token, one token is sampled from
    norm(max(p_a - q_a, 0)), or from p_a if rounding makes this residual zero. If all k = `lens`
    draft tokens are accepted, one token is sampled from p_k. Sampling is by inverse CDF, with the
    `sample_noise` of that position.

    draft_probs: [B, K, V] fp32.
    target_probs: [B, K + 1, V] fp32.
    The other arguments are as in `Verification`.

    Returns:
        Tokens [B, K + 1] int64: the accepted draft tokens and one more, padded with -1.
        accepted [B] int32: the number of accepted draft tokens.
        If the target's probabilities for a sequence contain a NaN, its tokens and accepted are -1.
    """
    num_rows, width = draft_tokens.shape
    row = torch.arange(num_rows, device=lens.device)
    place = torch.arange(width + 1, device=lens.device)
    length = lens.long()[:, None]

    # 1. Accept d_i iff u_i * q(d_i) < p(d_i); count the tokens before the first rejected one.
    drafted = place[:width] < length
    token = draft_tokens.masked_fill(~drafted, 0)[..., None]
    q = draft_probs.gather(2, token).squeeze(2)
    p = target_probs[:, :width].gather(2, token).squeeze(2)
    accept = drafted & (accept_noise * q < p)
    accepted = accept.long().cumprod(1).sum(1)

    # 2. Sample one token: after a rejection from the residual max(p - q, 0), otherwise from p. If q
    # has a NaN, the residual's sum is NaN and fails the test `> 0`, so p is used.
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
    """Sample a token from the distribution of each row. Return [R] int64; -1 for rows that have no
    valid distribution.

    logits, temperature, top_k, top_p: as for `logit_rows`.
    stats: the result of `logit_rows` for these arguments; needed only on CUDA.
    noise: [R] fp32 in [0, 1).
    """
    return sample_categorical_reference(to_probs(logits, temperature, top_k, top_p), noise)


class Verification(NamedTuple):
    """The arguments of a rule that verifies the proposals for B sequences, at most K each."""

    draft_tokens: Tensor
    """[B, K] int64, -1 where the draft had no valid distribution; entries from `lens` on are
    ignored."""
    lens: Tensor
    """[B] int64 or int32, 0..K, the number of draft tokens in each row."""
    draft_logits: Tensor | None
    """[B, K, V'] bf16, fp16 or fp32, V' <= V, rows contiguous. Ids from V' on have probability 0.
    None if proposals were not sampled: then q is one-hot at each proposal."""
    draft_rows: Tensor | None
    """[B, K, 4], `rows` of the draft's `logit_rows`; None if `draft_logits` is None."""
    target_logits: Tensor
    """[B, K + 1, V] bf16, fp16 or fp32, rows contiguous."""
    target: LogitRows | None
    """`logit_rows` of the target's B * (K + 1) rows; needed on CUDA only."""
    temperature: float
    """temperature, top_k and top_p: the arguments that were passed to `logit_rows`."""
    top_k: int
    top_p: float
    accept_noise: Tensor
    """[B, K] fp32 in [0, 1), the noise of the acceptance tests."""
    sample_noise: Tensor
    """[B, K + 1] fp32 in [0, 1), the noise for sampling the token after the accepted ones."""


@kernel("specdec_kernels.sampling.verify_triton:reject_logits_triton")
def reject_logits(v: Verification) -> tuple[Tensor, Tensor]:
    """Verify drafts like `rejection_sample_reference`, but from logits, without storing
    probabilities.

    Returns tokens [B, K + 1] and accepted [B] as described there, but both int64. If a draft token
    is negative, accepted is -2. Otherwise, if a target row up to index `lens` has no valid
    distribution, accepted and the tokens are -1.
    """
    return verified_by(rejection_sample_reference, v)


def verified_by(
    rule: Callable[..., tuple[Tensor, Tensor]], v: Verification
) -> tuple[Tensor, Tensor]:
    """Compute probabilities from the logits, and pass them to `rule`, a function such as
    `rejection_sample_reference`. Returns tokens and accepted as in `reject_logits`."""
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
