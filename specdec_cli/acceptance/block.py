"""Block verification: proposals are judged jointly. Lossless.

Sun et al., "Block Verification Accelerates Speculative Decoding", arXiv 2403.10444, Algorithm 2.
Rejection sampling accepts the longest run of tokens that each pass a test of their own. Block
verification tests every prefix of the block and accepts the longest one that passes, which is never
shorter in expectation. The output has the target's distribution under both.
Legend: B sequences, K draft tokens at most, V vocabulary.
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

from specdec_cli.acceptance.base import LosslessRule, NoForecast, Rule
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.types import SamplingParams


def block_chances(
    draft_tokens: Tensor, lens: Tensor, draft_probs: Tensor, target_probs: Tensor
) -> tuple[Tensor, Tensor]:
    """The decision of Algorithm 2 as a function of the drafts, before any random number is used.

    Args:
        draft_tokens: [B, K] int64, none negative before `lens`; the rest is ignored.
        lens: [B], 0..K, drafted tokens of each row.
        draft_probs: [B, K, V], fp32 or fp64: q.
        target_probs: [B, K + 1, V]: p.

    Returns:
        chances [B, K + 1]: h_i, the probability with which i drafts are accepted when no more than
        i are. The values at 0, which is accepted always, and past `lens` have no meaning.
        follow [B, K + 1, V]: weights of the token that follows when i drafts are accepted.
    """
    width = draft_tokens.shape[1]
    place = torch.arange(width + 1, device=lens.device)
    length = lens.long()[:, None]
    token = draft_tokens.masked_fill(place[:width] >= length, 0)[..., None]
    p = target_probs[:, :width].gather(2, token).squeeze(2)
    q = draft_probs.gather(2, token).squeeze(2)

    # 1. w_i = min(1, w_(i-1) p_i / q_i), the probability that i drafts or more are accepted.
    weight = torch.ones_like(target_probs[:, :, 0])
    for i in range(width):
        ratio = p[:, i] / q[:, i].clamp(min=TINY)
        weight[:, i + 1] = (weight[:, i] * ratio).clamp(max=1.0)

    # 2. h_i of the inner places is what makes up for the mass of later acceptances. It is 0 / 0
    # where w_i = 1 and p = q: the later ones are certain, so any value will do.
    residual = (weight[:, :width, None] * target_probs[:, :width] - draft_probs).clamp(min=0)
    mass = residual.sum(2)
    rest = mass + (1.0 - weight[:, :width])
    inner = torch.where(rest == 0, 1.0, mass / rest)
    is_inner = place < length
    chances = torch.where(is_inner, F.pad(inner, (0, 1)), weight)

    # 3. The residual w p - q follows an inner place, p the last one. Rounding may leave the
    # residual empty; a NaN in q makes its sum NaN. Then p alone decides.
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
    its accept noise is below h_i. For the whole block h_i = w_i; for a shorter prefix
    h_i = S_i / (S_i + 1 - w_i), where S_i is the mass of max(w_i p - q, 0) at the next place. The
    longest prefix that passes stands. The next token is drawn from that residual, or after the
    whole block from p.

    The output has the target's distribution, and at least i drafts stand with probability w_i given
    the first i. So the mean accepted length is never below rejection sampling's.

    Random numbers. One uniform number a place suffices: given the drafts, the tests of prefixes
    1..len are independent and test i only has to pass with probability h_i. `accept_noise[:, i]`
    decides prefix i + 1. `sample_noise[:, a]` draws the token that follows a accepted drafts.
    The rule looks ahead: the outcome depends on the accept noise and the drafts of ALL places up to
    `lens`, those after the accepted prefix included. The next round decides these positions again,
    and must do so with fresh numbers. The caller therefore guarantees that
      - accept noise, and the noise that draws the drafts, is a function of the round's start as
        well as of the position (`uniform_rows(..., by_round=True)`);
      - accept noise, draft noise and sample noise are independent of each other;
      - `lens` of a sequence is a stopping time of its drafts: whether place i is the last may
        depend on drafts 1..i and their distributions, never on a draft that is then left out.
    Sample noise may be keyed by position alone: only the number of the emitted token is read.
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
    """Both rules have the same law for proposals that were not drawn; rejection sampling costs
    less."""
    return ops.reject_logits(v) if v.draft_logits is None else verify_block(v)


class Block(LosslessRule):
    """Accept the longest prefix of the proposals that passes a test of its joint probability.

    A longer prefix may pass even if a shorter one does not, so a decision depends on proposals past
    the last accepted one. In greedy decoding the rule equals rejection sampling.
    """

    looks_ahead = True
    test = staticmethod(_test)

    def forecast(
        self, index: int, start: int, count: int, k: int, params: SamplingParams
    ) -> Forecast | None:
        """None in greedy decoding; otherwise chances of single tokens do not predict this rule."""
        if params.is_greedy:
            return None
        raise NoForecast


RULE = Rule(lambda _: Block())
