"""K of each round by recent acceptance and the measured times of rounds.

Rounds of each K are timed first. From then on, the K is taken that promises most tokens a
millisecond, if the next round fares as the last ones did. K rests on what was written before the
round, so the text keeps the target's distribution. Times differ between runs, though, and with
them K: text that is sampled is not the same in every run, while greedy text is.
"""

import torch

from specdec_cli.core.drafting import Stop
from specdec_cli.core.state import BatchState
from specdec_cli.lengths.base import LastRounds
from specdec_cli.lengths.costs import RoundCosts
from specdec_cli.recipe import SpeculationSection

_PRIOR_ROUNDS = 2.0  # a place's rate before it is observed counts as so many rounds
_PRIOR_RATE = 0.6
_IDLE_ROUNDS = 24  # rounds without proposals after which acceptance is looked at again


class Adaptive:
    """choices: the K that rounds may have beside the run's k; those above k are left out."""

    is_fixed = False
    stop: Stop | None = None

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

    def caps(self, state: BatchState, caps: torch.Tensor) -> torch.Tensor:
        return caps


def expected_tokens(last: LastRounds, k: int) -> list[float]:
    """Tokens a round at each K of 0..k, from the acceptance of the last rounds.

    The chance at a place is that of the rounds that reached it, drawn towards the place before it
    where they are few: so is a place that short rounds never reach.
    """
    rounds = [trial for trials in last.trials for trial in trials]
    rate, reach, found = _PRIOR_RATE, 1.0, [1.0]
    for place in range(1, k + 1):
        reached = [a >= place for proposed, a in rounds if proposed >= place and a >= place - 1]
        rate = (sum(reached) + _PRIOR_ROUNDS * rate) / (len(reached) + _PRIOR_ROUNDS)
        reach *= rate
        found.append(found[-1] + reach)
    return found


def from_recipe(speculation: SpeculationSection) -> Adaptive:
    return Adaptive(speculation.length.choices)
