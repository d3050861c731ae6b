"""A policy that chooses each round's K from recent acceptance and measured round times.

First it times a few rounds with each K. Then it chooses the K with the most expected tokens per
millisecond. The choice depends only on earlier rounds, so it does not change the output
distribution. But as times vary, sampled text can differ between runs.
"""

from specdec_cli.lengths.base import LastRounds, LengthPolicy
from specdec_cli.lengths.costs import RoundCosts
from specdec_cli.recipe import SpeculationSection

_PRIOR_ROUNDS = 1.0  # a position's prior acceptance rate counts as much as this many rounds
_PRIOR_RATE = 0.6
# Each round counts this much relative to the next, newer round. A text's acceptance rate changes
# within about ten rounds, so older rounds count less.
_FADING = 0.9
_IDLE_ROUNDS = 24  # propose again after this many rounds without proposals


class Adaptive(LengthPolicy):
    """Chooses each round's K from `choices` and the run's k. Choices above k are ignored."""

    def __init__(self, choices: tuple[int, ...]) -> None:
        self.choices = choices

    def lengths(self, k: int) -> tuple[int, ...]:
        return tuple(sorted({*(c for c in self.choices if c <= k), k}))

    def next_k(
        self, lengths: tuple[int, ...], last: LastRounds, costs: RoundCosts, slots: int
    ) -> int:
        if (unmeasured := costs.unmeasured(slots, lengths)) is not None:
            return unmeasured
        recent = list(last.trials)[-_IDLE_ROUNDS:]
        if len(recent) == _IDLE_ROUNDS and not any(k for trial in recent for k, _ in trial):
            return next(k for k in lengths if k > 0)
        tokens = expected_tokens(last, lengths[-1])
        round_ms = costs.of(slots, lengths)
        return max(lengths, key=lambda k: tokens[k] / round_ms[k])


def expected_tokens(last: LastRounds, k: int) -> list[float]:
    """Return the expected number of tokens from a round with each K in 0..k.

    It is computed from each position's acceptance rate in the last rounds. If few of these rounds
    reached a position, its rate stays close to that of the previous position.
    """
    rounds = [
        (_FADING**age, trial)
        for age, trials in enumerate(reversed(last.trials))
        for trial in trials
    ]
    rate, reach, found = _PRIOR_RATE, 1.0, [1.0]
    for place in range(1, k + 1):
        reached = [(w, a >= place) for w, (k_i, a) in rounds if k_i >= place and a >= place - 1]
        stood = sum(w for w, stands in reached if stands)
        rate = (stood + _PRIOR_ROUNDS * rate) / (sum(w for w, _ in reached) + _PRIOR_ROUNDS)
        reach *= rate
        found.append(found[-1] + reach)
    return found


def from_recipe(speculation: SpeculationSection) -> Adaptive:
    return Adaptive(speculation.length.choices)
