"""Verification: which proposals stand, and the token that follows them."""

import torch
from specdec_kernels import ops

from specdec_cli.core.types import Proposal, RoundNoise, Scores, Verdict
from specdec_cli.errors import RunError


def verify(proposal: Proposal, scores: Scores, noise: RoundNoise) -> torch.Tensor:
    """Modified rejection sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

    Accept d_i iff u_i * q(d_i) < p(d_i); at the first rejection draw from norm(max(p - q, 0));
    with every proposal accepted draw from the target's next distribution. Greedy decoding is the
    one-hot case, for which its choices are enough. Returns a decision, see `decision`.
    """
    device = proposal.token_ids.device
    lens = torch.tensor(proposal.lens, dtype=torch.int32).to(device, non_blocking=True)
    if scores.best is not None:
        return decision(*ops.accept(proposal.token_ids, scores.best, lens.long()))
    assert scores.probs is not None
    proposed = proposal.token_ids.clamp(min=0)
    tokens, accepted = ops.rejection_sample(
        proposed, lens, proposal.probs, scores.probs, noise.accept, noise.sample
    )
    # A draft token of -1 was drawn from a row that is not finite.
    accepted = accepted.masked_fill((proposal.token_ids < 0).any(dim=1), -2)
    return decision(tokens, accepted)


def decision(tokens: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
    """What a round decided as one tensor, which ranks can send: int64 [B, K + 2].

    tokens: [B, K + 1], the accepted proposals, a token of the target's own, and what has no
    meaning. accepted: [B], the last column; -1 where the target's logits were not finite, -2 where
    the draft's were not.
    """
    return torch.cat((tokens.long(), accepted.long()[:, None]), dim=1)


def read_verdict(decided: torch.Tensor) -> Verdict:
    """Read a decision: the one place of a round where the host waits for the device.

    Raises `RunError` when a distribution was not finite.
    """
    rows: list[list[int]] = decided.tolist()
    counts = [row[-1] for row in rows]
    check_finite(counts)
    return Verdict([row[: row[-1] + 1] for row in rows], counts)


def check_finite(counts: list[int]) -> None:
    """Raise `RunError` where a count of accepted proposals is one that says "not finite"."""
    if (worst := min(counts)) < 0:
        raise RunError(
            f"the {'draft' if worst == -2 else 'target'} produced logits that are not finite "
            "(NaN or infinity)",
            "try another dtype (float32 or bfloat16), or check the checkpoint",
        )
