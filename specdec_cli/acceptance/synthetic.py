"""Synthetic acceptance: proposals are accepted at given rates, so that a draft can be timed before
it has been trained."""

from dataclasses import dataclass, field

import torch
from specdec_kernels import ops

from specdec_cli.acceptance.base import AcceptanceRule, Rule
from specdec_cli.core.candidates import Candidates, Noise, TargetOutput, Verdict
from specdec_cli.core.forecast import Forecast
from specdec_cli.core.sampling import draw, round_noise
from specdec_cli.core.types import SamplingParams
from specdec_cli.errors import UsageError
from specdec_cli.recipe import SpeculationSection
from specdec_cli.recipe.choices.synthetic import even_rate, marginal_rates

_LONGEST_PROPOSAL = 1024


@dataclass(frozen=True, eq=False)
class SyntheticAcceptance(AcceptanceRule):
    """A rule that accepts proposals at given rates, whatever their tokens are. Drafting and scoring
    run as usual, so that their times can be measured.

    conditional: the acceptance rate at each position, given that all positions before it were
    accepted.
    """

    conditional: tuple[float, ...]
    draws_when_greedy = True
    remark = "times are measured, but the text is not the target's"
    _made: dict[tuple[int, torch.device], torch.Tensor] = field(default_factory=dict, init=False)

    @classmethod
    def from_rates(cls, marginal: tuple[float, ...]) -> "SyntheticAcceptance":
        """Make a rule from the marginal acceptance rate of each position. Rates must not increase
        from one position to the next."""
        earlier = (1.0, *marginal)
        return cls(tuple(m / e if e else 0.0 for e, m in zip(earlier, marginal, strict=False)))

    @classmethod
    def from_length(cls, length: float, k: int) -> "SyntheticAcceptance":
        """Make a rule that accepts at the same rate at every position. The rate is chosen such that
        rounds with k proposals yield `length` tokens on average. The rule also works for other
        proposal lengths."""
        return cls((even_rate(length, k),) * _LONGEST_PROPOSAL)

    def rates(self, k: int) -> tuple[float, ...]:
        """Return the conditional rates of the first k positions. Raises `UsageError` if the recipe
        gives fewer."""
        if k > len(self.conditional):
            raise UsageError(
                f"up to {k} tokens are proposed per round, but there are only "
                f"{len(self.conditional)} synthetic_acceptance_rates",
                "give a rate for every position, or synthetic_acceptance_length",
            )
        return self.conditional[:k]

    def decide(
        self,
        candidates: Candidates,
        target: TargetOutput,
        params: SamplingParams,
        noise: Noise | None,
    ) -> Verdict:
        """Accept the proposal at each position with the probability given by that position's rate.
        Then sample a token from the target's distribution."""
        assert noise is not None
        c, logits = candidates, target.logits.flatten(0, 1)
        best = draw(logits, None, params, noise.sample.flatten()).view(target.logits.shape[:2])
        rates = self._on_device(c.token_ids.shape[1], logits.device)
        return Verdict(*ops.accept(c.token_ids, best, c.lens, noise.accept, rates))

    def forecast(
        self, index: int, start: int, count: int, k: int, params: SamplingParams
    ) -> Forecast | None:
        """Return a forecast with the rates of the first k positions. It also has one random number
        for each of the `count` output tokens. A round would compare that number with a rate."""
        rates = torch.tensor(self.rates(k), dtype=torch.float32)
        seed, at, length = (torch.tensor(n) for n in (params.seed, index, start))
        noise = round_noise(seed, at[None], length[None], count)
        return Forecast(draws=tuple(noise.accept[0].tolist()), rates=tuple(rates.tolist()))

    def _on_device(self, k: int, device: torch.device) -> torch.Tensor:
        """Return the rates of the first k positions on the device: fp32 [K]. They are copied there
        on first use and then kept, since CUDA graphs must not contain the copy. The first use is an
        ordinary round, before the round is captured as a graph."""
        if (k, device) not in self._made:
            self._made[k, device] = torch.tensor(self.rates(k), device=device)
        return self._made[k, device]


def from_recipe(speculation: SpeculationSection) -> SyntheticAcceptance:
    """Make the rule from the recipe's acceptance rates, or from its mean number of tokens per round
    at the recipe's k."""
    rates = speculation.synthetic_acceptance_rates
    length = speculation.synthetic_acceptance_length
    if rates is not None:
        return SyntheticAcceptance.from_rates(rates)
    assert length is not None, "the recipe's schema checks this"
    return SyntheticAcceptance.from_length(length, speculation.num_speculative_tokens)


def for_k(speculation: SpeculationSection, k: int) -> SpeculationSection:
    """Return the recipe's speculation section with acceptance rates for `k` positions. A mean
    length in the section is replaced by the rates that it stands for, since it only holds at the
    recipe's own k."""
    rates = marginal_rates(speculation, speculation.num_speculative_tokens, k)
    return speculation.model_copy(
        update={"synthetic_acceptance_rates": rates, "synthetic_acceptance_length": None}
    )


RULE = Rule(from_recipe, for_k)
