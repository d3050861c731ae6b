"""Block verification: proposals are judged jointly. Lossless.

Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444, Algorithm 2. It
accepts the longest prefix of the block that passes a test. On average, this prefix is at least as
long as with token-by-token tests. Legend: B sequences, K draft tokens at most, V vocabulary.
"""

import torch
import torch.nn.functional as F
from specdec_kernels import ops
from specdec_kernels.dispatch import kernel
from specdec_kernels.sampling.reference import (
    TINY,
    emitted,
    sample_categorical_reference,
    verified_by,
)
from torch import Tensor

from specdec_cli.acceptance.base import LosslessRule, Rule


def block_chances(
    draft_tokens: Tensor, lens: Tensor, draft_probs: Tensor, target_probs: Tensor
) -> tuple[Tensor, Tensor]:
    """The decision of Algorithm 2 as a function of the drafts, before any random number is used.

    draft_tokens: [B, K] int64, with no negative id before `lens`. lens: [B], 0..K. draft_probs: q
    [B, K, V], fp32 or fp64. target_probs: p [B, K + 1, V].

    Returns chances [B, K + 1]: h_i, the probability that i drafts are accepted, given that at most
    i are; entries 0 and those past `lens` are meaningless. Also returns follow [B, K + 1, V]:
    weights of the token that follows when i drafts are accepted.
    """
    width = draft_tokens.shape[1]
    place = torch.arange(width + 1, device=lens.device)
    length = lens.long()[:, None]
    token = draft_tokens.masked_fill(place[:width] >= length, 0)[..., None]
    p = target_probs[:, :width].gather(2, token).squeeze(2)
    q = draft_probs.gather(2, token).squeeze(2)

    # 1. w_i = min(1, w_(i-1) p_i / q_i), the probability that at least i drafts are accepted.
    weight = torch.ones_like(target_probs[:, :, 0])
    for i in range(width):
        ratio = p[:, i] / q[:, i].clamp(min=TINY)
        weight[:, i + 1] = (weight[:, i] * ratio).clamp(max=1.0)

    # 2. At inner positions, h_i accounts for the mass of later acceptances. It is 0 / 0 if w_i = 1
    # and p = q; later acceptances are then certain, so any value works.
    residual = (weight[:, :width, None] * target_probs[:, :width] - draft_probs).clamp(min=0)
    mass = residual.sum(2)
    rest = mass + (1.0 - weight[:, :width])
    inner = torch.where(rest == 0, 1.0, mass / rest)
    is_inner = place < length
    chances = torch.where(is_inner, F.pad(inner, (0, 1)), weight)

    # 3. The next token is drawn from the residual w p - q after an inner position, and from p after
    # the last. If rounding makes the residual zero, or a NaN in q makes its sum NaN, p is used
    # instead.
    from_residual = is_inner & F.pad(mass > 0, (0, 1))
    follow = torch.where(from_residual[..., None], F.pad(residual, (0, 0, 0, 1)), target_probs)
    return chances, follow


def block_verify_reference(
    draft_tokens: Tensor,
    lens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    accept_noise: Tensor,
    sample_noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Block verification over probabilities, in the form of `rejection_sample_reference`.

    With w_0 = 1 and w_i = min(1, w_(i-1) p_i(d_i) / q_i(d_i)), prefix i of the drafts passes iff
    its accept noise is below h_i: w_i for the whole block, S_i / (S_i + 1 - w_i) for a shorter
    prefix, where S_i is the mass of max(w_i p - q, 0) at the next place. The longest prefix that
    passes is accepted. The next token is drawn from that residual, or after the whole block from p.
    Given the first i drafts, at least i are accepted with probability w_i.

    `accept_noise[:, i]` decides prefix i + 1, and `sample_noise[:, a]` draws the token after a
    accepted drafts. The outcome depends on the accept noise and the drafts at ALL positions up to
    `lens`. The next round decides some of these positions again, with fresh random numbers. The
    caller must therefore guarantee that accept noise and the noise that draws the drafts are
    functions of the round's start too (`uniform_rows(..., by_round=True)`); that all three kinds
    are independent; and that `lens` is a stopping time of the drafts, which never depends on a
    draft that is then left out.
    """
    chances, follow = block_chances(draft_tokens, lens, draft_probs, target_probs)
    place = torch.arange(1, draft_tokens.shape[1] + 1, device=lens.device)
    # Strictly below: a chance of 0 never passes, a chance of 1 always does.
    passes = (place <= lens[:, None]) & (accept_noise < chances[:, 1:])
    accepted = F.pad(passes * place, (1, 0)).amax(1)
    row = torch.arange(draft_tokens.shape[0], device=lens.device)
    last = sample_categorical_reference(follow[row, accepted], sample_noise[row, accepted])
    return emitted(draft_tokens, lens, target_probs, accepted, last)


@kernel("specdec_kernels.sampling.verify_triton:verify_block_triton")
def verify_block(v: ops.Verification) -> tuple[Tensor, Tensor]:
    """`block_verify_reference` over logits, in the form of `ops.reject_logits`; K is 1 or more."""
    return verified_by(block_verify_reference, v)


def _test(v: ops.Verification) -> tuple[Tensor, Tensor]:
    """Block verification; or, for proposals that were not sampled, rejection sampling, which is
    equivalent there and cheaper."""
    return ops.reject_logits(v) if v.draft_logits is None else verify_block(v)


class Block(LosslessRule):
    """Accept the longest prefix of the proposals that passes a test of its joint probability."""

    looks_ahead = judges_jointly = True
    test = staticmethod(_test)


RULE = Rule(lambda _: Block())
