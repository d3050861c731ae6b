"""Block verification: a lossless rule that tests proposals jointly.

This is Algorithm 2 of Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv
2403.10444. It accepts the longest prefix of the block that passes a test. On average, this prefix
is at least as long as with token-by-token tests. Legend: B sequences, K draft tokens at most, V
vocabulary.
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
    """Compute the probabilities that Algorithm 2 uses to decide, given the draft tokens.

    draft_tokens: [B, K] int64; ids before `lens` must not be negative.
    lens: [B], 0..K, the number of draft tokens.
    draft_probs: [B, K, V] fp32 or fp64, the draft's probabilities q.
    target_probs: [B, K + 1, V], the target's probabilities p.

    Returns:
        chances [B, K + 1]: h_i, the probability that i draft tokens are accepted, given that at
            most i are. Entry 0 and entries past `lens` are meaningless.
        follow [B, K + 1, V]: the weights from which the next token is sampled if i draft tokens are
            accepted.
    """
    width = draft_tokens.shape[1]
    place = torch.arange(width + 1, device=lens.device)
    length = lens.long()[:, None]
    token = draft_tokens.masked_fill(place[:width] >= length, 0)[..., None]
    p = target_probs[:, :width].gather(2, token).squeeze(2)
    q = draft_probs.gather(2, token).squeeze(2)

    # 1. w_i = min(1, w_(i-1) p_i / q_i) is the probability that at least i draft tokens are
    # accepted.
    weight = torch.ones_like(target_probs[:, :, 0])
    for i in range(width):
        ratio = p[:, i] / q[:, i].clamp(min=TINY)
        weight[:, i + 1] = (weight[:, i] * ratio).clamp(max=1.0)

    # 2. The whole block passes with chance w_i. For a shorter prefix, let S_i be the mass of the
    # residual. Given the prefix, exactly i tokens are accepted with probability S_i, and at most i
    # with probability S_i + 1 - w_i. So it passes with chance S_i / (S_i + 1 - w_i). This is 0 / 0
    # if w_i = 1 and p = q. A longer prefix is then certain to pass, so any value works.
    residual = (weight[:, :width, None] * target_probs[:, :width] - draft_probs).clamp(min=0)
    mass = residual.sum(2)
    rest = mass + (1.0 - weight[:, :width])
    inner = torch.where(rest == 0, 1.0, mass / rest)
    is_inner = place < length
    chances = torch.where(is_inner, F.pad(inner, (0, 1)), weight)

    # 3. The next token is sampled from the residual max(w p - q, 0), or from p if the whole block
    # was accepted. p is also used if the residual is unusable: rounding can make it zero, and a NaN
    # in q makes its sum NaN.
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
    """Verify drafts by block verification, given the probabilities of both models. The arguments
    and results are those of `rejection_sample_reference`.

    Let w_0 = 1 and w_i = min(1, w_(i-1) p_i(d_i) / q_i(d_i)). The first i draft tokens pass iff
    their accept noise is below h_i. For the whole block, h_i is w_i. For a shorter prefix, it is
    S_i / (S_i + 1 - w_i), where S_i is the mass of the residual max(w_i p - q, 0) at the next
    position. The longest prefix that passes is accepted. The next token is then sampled from the
    residual at the next position, or from p if the whole block was accepted. Given the first i
    draft tokens, at least i are accepted with probability w_i.

    `accept_noise[:, i]` decides whether the first i + 1 draft tokens pass, and `sample_noise[:, a]`
    samples the next token if a tokens were accepted. The result depends on the accept noise and the
    draft tokens at all positions up to `lens`, including rejected ones. The next round decides the
    rejected positions again, and must not reuse their random numbers. The caller must therefore
    ensure that
    1. accept noise and the noise for drafting also depend on where the round starts
       (`uniform_rows(..., by_round=True)`);
    2. accept noise, sample noise and the noise for drafting are independent;
    3. `lens` is a stopping time: whether a draft token is left out never depends on that token.
    """
    chances, follow = block_chances(draft_tokens, lens, draft_probs, target_probs)
    place = torch.arange(1, draft_tokens.shape[1] + 1, device=lens.device)
    # The noise is in [0, 1), so a chance of 0 never passes and a chance of 1 always passes.
    passes = (place <= lens[:, None]) & (accept_noise < chances[:, 1:])
    accepted = F.pad(passes * place, (1, 0)).amax(1)
    row = torch.arange(draft_tokens.shape[0], device=lens.device)
    last = sample_categorical_reference(follow[row, accepted], sample_noise[row, accepted])
    return emitted(draft_tokens, lens, target_probs, accepted, last)


@kernel("specdec_kernels.sampling.verify_triton:verify_block_triton")
def verify_block(v: ops.Verification) -> tuple[Tensor, Tensor]:
    """Verify drafts like `block_verify_reference`, but from logits. The results are those of
    `ops.reject_logits`. K must be at least 1."""
    return verified_by(block_verify_reference, v)


def _test(v: ops.Verification) -> tuple[Tensor, Tensor]:
    """Verify by block verification. If the proposals have no draft distribution, because they were
    not sampled, use rejection sampling, which is then equivalent and cheaper."""
    return ops.reject_logits(v) if v.draft_logits is None else verify_block(v)


class Block(LosslessRule):
    """A rule that accepts the longest prefix of the proposals whose joint probability passes a
    test."""

    looks_ahead = judges_jointly = True
    test = staticmethod(_test)


RULE = Rule(lambda _: Block())
