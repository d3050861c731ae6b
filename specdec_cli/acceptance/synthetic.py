"""Acceptance by given rates, to time drafts that do not exist yet."""

from dataclasses import dataclass

import torch
from specdec_kernels import ops

from specdec_cli.acceptance.rejection import decision
from specdec_cli.core.types import Proposal, RoundNoise, Scores
from specdec_cli.errors import UsageError

_LONGEST_PROPOSAL = 1024


@dataclass(frozen=True, slots=True)
class SyntheticAcceptance:
    """Accept by given rates, whatever the models say.

    All the work of drafting and scoring is done; the text is not the target's.
    conditional: chance that the proposal at each place is accepted when those before it were.
    """

    conditional: tuple[float, ...]

    @classmethod
    def from_rates(cls, marginal: tuple[float, ...]) -> "SyntheticAcceptance":
        """From the share of drafts accepted up to each place, which never rises."""
        earlier = (1.0, *marginal)
        return cls(tuple(m / e if e else 0.0 for e, m in zip(earlier, marginal, strict=False)))

    @classmethod
    def from_length(cls, length: float, k: int) -> "SyntheticAcceptance":
        """From the mean tokens a round at proposal length k, with one rate for all places.

        Solves (1 - a^(k+1)) / (1 - a) = length for a (Leviathan et al., equation 1); the same a
        then serves every proposal length.
        """
        low, high = 0.0, 1.0
        for _ in range(60):
            rate = (low + high) / 2
            low, high = (rate, high) if sum(rate**i for i in range(k + 1)) < length else (low, rate)
        return cls((high,) * _LONGEST_PROPOSAL)

    def rates(self, k: int) -> tuple[float, ...]:
        """The conditional rates of k places. Raises `UsageError` when fewer were given."""
        if k > len(self.conditional):
            raise UsageError(
                f"{k} tokens are proposed a round and there are {len(self.conditional)} "
                "synthetic_acceptance_rates",
                "give a rate for every position, or synthetic_acceptance_length",
            )
        return self.conditional[:k]

    def verify(self, proposal: Proposal, scores: Scores, noise: RoundNoise) -> torch.Tensor:
        """Like `verify`, with the places' rates in place of p / q."""
        device, k = proposal.token_ids.device, proposal.token_ids.shape[1]
        lens = torch.tensor(proposal.lens).to(device, non_blocking=True)
        rates = torch.tensor(self.rates(k)).to(device, non_blocking=True)
        if scores.best is not None:
            args = (proposal.token_ids, scores.best, lens, noise.accept, rates)
            return decision(*ops.accept(*args))
        assert scores.probs is not None
        batch = torch.arange(len(proposal.lens), device=device)
        drafted = torch.arange(k, device=device) < lens[:, None]
        accepted = (drafted & (noise.accept < rates)).long().cumprod(dim=1).sum(dim=1)
        own = ops.sample_categorical(scores.probs[batch, accepted], noise.sample[batch, accepted])
        tokens = torch.nn.functional.pad(proposal.token_ids, (0, 1))
        tokens[batch, accepted] = own
        accepted = accepted.masked_fill(own < 0, -1)
        accepted = accepted.masked_fill((proposal.token_ids < 0).any(dim=1), -2)
        return decision(tokens, accepted)
