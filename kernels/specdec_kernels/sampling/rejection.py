"""Rejection sampling of drafted tokens over probabilities: torch reference, and the CPU path.

Noise is an input, so the outcome is a deterministic function of the arguments. Does not know
temperature, top-k or top-p: probabilities arrive finished. One-hot rows give greedy decoding.
Legend: B sequences, K draft tokens at most, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

TINY = torch.finfo(torch.float32).tiny  # fp32 has no smaller number to divide by


def sample_categorical_reference(weights: Tensor, noise: Tensor) -> Tensor:
    """Draw from unnormalised `weights` [N, V] by inverse CDF, `noise` [N] in [0, 1): [N] int64.

    The smallest index whose running sum exceeds noise * total, never one of zero weight; -1 where
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
    """Output of a round: tokens [B, K + 1] int64 and accepted [B] int32.

    accepted: [B] int64, draft tokens that stand. last: [B] int64, the token drawn after them.
    """
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
    """Modified rejection sampling: tokens distributed as the target's, whatever the draft is.

    Leviathan et al. (arXiv 2211.17192), Chen et al. (2302.01318). With u the accept noise, draft
    d_i is accepted iff u_i * q_i(d_i) < p_i(d_i). At the first rejection, a, one token is drawn
    from norm(max(p_a - q_a, 0)), or from p_a where rounding leaves that empty; when all k are
    accepted, from p_k. Draws are by inverse CDF with `sample_noise` at that position. One-hot p
    and q give greedy decoding.

    Args:
        draft_tokens: [B, K] int64; what lies at or past `lens` is ignored.
        lens: [B] int32, 0..K, drafted tokens of each row.
        draft_probs: [B, K, V] fp32, the q that the draft tokens were drawn from.
        target_probs: [B, K + 1, V] fp32.
        accept_noise: [B, K] fp32 in [0, 1).
        sample_noise: [B, K + 1] fp32 in [0, 1).

    Returns:
        tokens [B, K + 1] int64, the accepted drafts and one more, padded with -1, and accepted
        [B] int32, how many drafts. A NaN in the target's probabilities makes both -1.
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
