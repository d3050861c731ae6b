"""Distributions from logits, draws from them, and rejection sampling: torch, and the CPU path.

`to_probs` is the project's only definition of temperature, top-k and top-p. The draft's q and the
target's p both come from it, so that the acceptance test compares like with like.
Legend: R rows, V vocabulary, B sequences, K draft tokens.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_kernels.dispatch import kernel
from specdec_kernels.sampling.rejection import (
    TINY,
    rejection_sample_reference,
    sample_categorical_reference,
)

INF = float("inf")


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
    # Logits are compared, not scores, which may round to the same number.
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
    mass reaches `top_p`, at least one token. Of equal tokens at that border those of higher index
    stay; transformers' sort leaves it open. Temperature 0 is the one-hot at the first maximum. A
    row with a NaN or +inf, or of -inf alone, sums to NaN, which verification reports.
    """
    if temperature == 0.0:
        logits = logits.float()
        best = logits.argmax(dim=-1, keepdim=True)
        # NaN compares as the maximum; its value, copied in, marks the row.
        value = logits.gather(-1, best)
        return torch.zeros_like(logits).scatter_(-1, best, value - value + 1.0)
    return masked_scores(logits, temperature, top_k, top_p).softmax(dim=-1)


@kernel("specdec_kernels.sampling.logit_rows_triton:logit_rows_triton")
def logit_rows(logits: Tensor, temperature: float, top_k: int, top_p: float) -> LogitRows:
    """Softmax statistics with which the other functions read logits as `logits.to_probs` does.

    Without top-k and top-p the logits are read once. A row that holds a NaN or +inf, or only -inf,
    is void. The torch implementation has one part.

    Args:
        logits: [R, V] bf16, fp16 or fp32, rows contiguous.
        temperature: Above 0.
        top_k: 0 keeps all.
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


@kernel("specdec_kernels.sampling.logits_triton:sample_logits_triton")
def sample_logits(
    logits: Tensor,
    stats: LogitRows | None,
    temperature: float,
    top_k: int,
    top_p: float,
    noise: Tensor,
) -> Tensor:
    """Draw from every row's distribution; `sample_categorical_reference` over logits.

    Args:
        logits, temperature, top_k, top_p: As `logit_rows` had them to make `stats`.
        stats: Needed on CUDA only.
        noise: [R] fp32 in [0, 1).

    Returns:
        [R] int64, -1 for void rows.
    """
    return sample_categorical_reference(to_probs(logits, temperature, top_k, top_p), noise)


@kernel("specdec_kernels.sampling.verify_triton:reject_logits_triton")
def reject_logits(
    draft_tokens: Tensor,
    lens: Tensor,
    draft_logits: Tensor | None,
    draft_rows: Tensor | None,
    target_logits: Tensor,
    target: LogitRows | None,
    temperature: float,
    top_k: int,
    top_p: float,
    accept_noise: Tensor,
    sample_noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """`rejection_sample_reference` over logits: no probabilities are stored.

    Args:
        draft_tokens: [B, K] int64, -1 from void rows; what lies at or past `lens` is ignored.
        lens: [B] int64 or int32, 0..K, drafted tokens of each row.
        draft_logits: [B, K, V'] bf16, fp16 or fp32, V' <= V, rows contiguous. Ids at or past V'
            have probability 0. None for proposals that were not drawn: q is one-hot at each.
        draft_rows: [B, K, 4], `rows` of the draft's `logit_rows`; None if `draft_logits` is.
        target_logits: [B, K + 1, V] of any of these types, rows contiguous.
        target: `logit_rows` of the B * (K + 1) rows; needed on CUDA only.
        temperature, top_k, top_p: As `logit_rows` had them.
        accept_noise: [B, K] fp32 in [0, 1).
        sample_noise: [B, K + 1] fp32 in [0, 1).

    Returns:
        tokens [B, K + 1] int64, the accepted drafts and one more, padded with -1, and accepted [B]
        int64, how many drafts: -2 where a draft token is negative, else -1 (and the tokens too)
        where a target row up to `lens` is void.
    """
    drafts, q, p = distributions(
        draft_tokens, draft_logits, target_logits, temperature, top_k, top_p
    )
    tokens, accepted = rejection_sample_reference(drafts, lens, q, p, accept_noise, sample_noise)
    return tokens, spoilt(draft_tokens, lens, accepted)


def distributions(
    draft_tokens: Tensor,
    draft_logits: Tensor | None,
    target_logits: Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Proposals without -1 [B, K], q [B, K, V] and p [B, K + 1, V], fp32; as `reject_logits`."""
    filters, vocab = (temperature, top_k, top_p), target_logits.shape[2]
    drafts, p = draft_tokens.clamp(min=0), to_probs(target_logits, *filters)
    if draft_logits is None:
        q = F.one_hot(drafts, vocab).float()
    else:
        q = to_probs(F.pad(draft_logits, (0, vocab - draft_logits.shape[2]), value=-INF), *filters)
    return drafts, q, p


def spoilt(draft_tokens: Tensor, lens: Tensor, accepted: Tensor) -> Tensor:
    """`accepted` [B] as int64, -2 where a draft token before `lens` is negative."""
    place = torch.arange(draft_tokens.shape[1], device=lens.device)
    is_spoilt = ((draft_tokens < 0) & (place < lens[:, None])).any(dim=1)
    return accepted.long().masked_fill(is_spoilt, -2)


@kernel("specdec_kernels.sampling.argmax_triton:greedy_argmax_triton")
def greedy_argmax(logits: Tensor) -> Tensor:
    """Index of the first maximum of every row of [R, V]: [R] int64.

    -1 where the maximum is not finite: the row holds a NaN or +inf, or only -inf.
    """
    top, first = logits.max(dim=1)
    # inf - inf is NaN, which is not zero either; `isfinite` takes five operations on a CPU.
    return first.masked_fill_((top - top) != 0, -1)
