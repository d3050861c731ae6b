"""From logits or probabilities to tokens, and rejection sampling over either."""

from torch import Tensor

from specdec_kernels.argmax import greedy_argmax_reference
from specdec_kernels.block_verify import block_verify_logits_reference
from specdec_kernels.logits import (
    LogitRows,
    logit_rows_reference,
    reject_logits_reference,
    sample_logits_reference,
)
from specdec_kernels.noise import uniform_rows_reference
from specdec_kernels.rejection import rejection_sample_reference, sample_categorical_reference


def greedy_argmax(logits: Tensor) -> Tensor:
    """Index of the first maximum of every row of [R, V]: [R] int64; -1 where it is not finite: the
    row holds a NaN or +inf, or -inf alone."""
    if logits.is_cuda:
        from specdec_kernels.argmax_triton import greedy_argmax_triton

        return greedy_argmax_triton(logits)
    return greedy_argmax_reference(logits)


def uniform_rows(
    seed: Tensor,
    index: Tensor,
    position: Tensor,
    purposes: int,
    width: int,
    by_round: bool = False,
) -> Tensor:
    """Uniform numbers in [0, 1) from Philox4x32-10, each a function of what it decides.

    Args:
        seed: int64 scalar.
        index: [B] int64, with the seed the key.
        position: [B] int64; number j of row b has counter (position[b] + j, purpose).
        purposes: How many numbers every position has.
        width: Positions a row.
        by_round: Put position[b] into the counter as well. A round that begins elsewhere then has
            other numbers at the same positions, which `block_verify_logits` needs.

    Returns:
        [purposes, B, width] fp32.
    """
    if index.is_cuda:
        from specdec_kernels.noise_triton import uniform_rows_triton

        return uniform_rows_triton(seed, index, position, purposes, width, by_round)
    return uniform_rows_reference(seed, index, position, purposes, width, by_round)


def sample_categorical(probs: Tensor, noise: Tensor) -> Tensor:
    """Draw from `probs` [N, V] fp32 by inverse CDF with `noise` [N] fp32 in [0, 1): [N] int64.

    The smallest index whose running sum exceeds noise * total, never one of zero probability; -1
    where a row holds a NaN.
    """
    if probs.is_cuda:
        from specdec_kernels.rejection_triton import sample_categorical_triton

        return sample_categorical_triton(probs, noise)
    return sample_categorical_reference(probs, noise)


def rejection_sample(
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
    args = (draft_tokens, lens, draft_probs, target_probs, accept_noise, sample_noise)
    if target_probs.is_cuda:
        from specdec_kernels.rejection_triton import rejection_sample_triton

        return rejection_sample_triton(*args)
    return rejection_sample_reference(*args)


def logit_rows(logits: Tensor, temperature: float, top_k: int, top_p: float) -> LogitRows:
    """What `sample_logits` and `reject_logits` must know to read logits as `logits.to_probs` does.

    Without top-k and top-p the logits are read once. A row that holds a NaN or +inf, or nothing
    above -inf, is void.

    Args:
        logits: [R, V] bf16, fp16 or fp32, rows contiguous.
        temperature: Above 0.
        top_k: 0 keeps all.
        top_p: 1 keeps all.
    """
    if logits.is_cuda:
        from specdec_kernels.logit_rows_triton import logit_rows_triton

        return logit_rows_triton(logits, temperature, top_k, top_p)
    return logit_rows_reference(logits, temperature, top_k, top_p)


def sample_logits(
    logits: Tensor,
    stats: LogitRows,
    temperature: float,
    top_k: int,
    top_p: float,
    noise: Tensor,
) -> Tensor:
    """Draw from every row's distribution, as `sample_categorical` does from probabilities.

    Args:
        logits, temperature, top_k, top_p: As `logit_rows` had them to make `stats`.
        noise: [R] fp32 in [0, 1).

    Returns:
        [R] int64, -1 for void rows.
    """
    if logits.is_cuda:
        from specdec_kernels.logits_triton import sample_logits_triton

        return sample_logits_triton(logits, stats, temperature, noise)
    return sample_logits_reference(logits, temperature, top_k, top_p, noise)


def reject_logits(
    draft_tokens: Tensor,
    lens: Tensor,
    draft_logits: Tensor | None,
    draft_rows: Tensor | None,
    target_logits: Tensor,
    target: LogitRows,
    temperature: float,
    top_k: int,
    top_p: float,
    accept_noise: Tensor,
    sample_noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """`rejection_sample` over logits: no probabilities are stored.

    Args:
        draft_tokens: [B, K] int64, -1 from void rows; what lies at or past `lens` is ignored.
        lens: [B] int64 or int32, 0..K, drafted tokens of each row.
        draft_logits: [B, K, V'] bf16, fp16 or fp32, V' <= V, rows contiguous. Ids at or past V'
            have probability 0. None for proposals that were not drawn: q is one-hot at each.
        draft_rows: [B, K, 4], `rows` of the draft's `logit_rows`, or None likewise.
        target_logits: [B, K + 1, V] of any of these types, rows contiguous.
        target: `logit_rows` of the B * (K + 1) rows.
        temperature, top_k, top_p: As `logit_rows` had them.
        accept_noise: [B, K] fp32 in [0, 1).
        sample_noise: [B, K + 1] fp32 in [0, 1).

    Returns:
        tokens [B, K + 1] int64, the accepted drafts and one more, padded with -1, and accepted [B]
        int64, how many drafts: -2 where a draft token is negative, else -1 (and the tokens too)
        where a row of the target's up to `lens` is void.
    """
    if target_logits.is_cuda:
        from specdec_kernels.logits_triton import reject_logits_triton

        return reject_logits_triton(
            draft_tokens,
            lens,
            draft_logits,
            draft_rows,
            target_logits,
            target,
            temperature,
            accept_noise,
            sample_noise,
        )
    return reject_logits_reference(
        draft_tokens,
        lens,
        draft_logits,
        target_logits,
        temperature,
        top_k,
        top_p,
        accept_noise,
        sample_noise,
    )


def block_verify_logits(
    draft_tokens: Tensor,
    lens: Tensor,
    draft_logits: Tensor | None,
    draft_rows: Tensor | None,
    target_logits: Tensor,
    target: LogitRows,
    temperature: float,
    top_k: int,
    top_p: float,
    accept_noise: Tensor,
    sample_noise: Tensor,
) -> tuple[Tensor, Tensor]:
    """Block verification (Sun et al., arXiv 2403.10444): `reject_logits` with a joint decision.

    With w_0 = 1 and w_i = min(1, w_(i-1) p_i(d_i) / q_i(d_i)), prefix i of the drafts passes iff
    its accept noise is below h_i. For the whole block h_i = w_i; for a shorter prefix
    h_i = S_i / (S_i + 1 - w_i), where S_i is the mass of max(w_i p - q, 0) at the next place. The
    longest prefix that passes stands. The next token is drawn from that residual, or after the
    whole block from p. Arguments and results are those of `reject_logits`.

    The output has the target's distribution, and at least i drafts stand with probability w_i given
    the first i. So the mean accepted length is never below rejection sampling's. For proposals that
    were not drawn (`draft_logits` None) both rules have the same law, and `reject_logits` answers.

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
    if target_logits.is_cuda:
        from specdec_kernels.block_verify_triton import block_verify_logits_triton

        return block_verify_logits_triton(
            draft_tokens,
            lens,
            draft_logits,
            draft_rows,
            target_logits,
            target,
            temperature,
            accept_noise,
            sample_noise,
        )
    return block_verify_logits_reference(
        draft_tokens,
        lens,
        draft_logits,
        target_logits,
        temperature,
        top_k,
        top_p,
        accept_noise,
        sample_noise,
    )
