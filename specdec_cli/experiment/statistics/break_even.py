"""The tokens a round, and the acceptance, at which speculation is as fast as plain decoding.

Knows no engine and no files.
"""

from specdec_cli.experiment.folders.records import BreakEven
from specdec_cli.experiment.predict import iid_length
from specdec_cli.experiment.statistics.factors import MidRatio, interval_of
from specdec_cli.experiment.statistics.stats import SumRatio

_STEPS = 50  # of a bisection


def break_even(
    cost: SumRatio | MidRatio,
    k: int,
    *,
    drafts: float,
    draft_tokens: float,
    rounds: float,
    seed: int,
) -> BreakEven:
    """The break-even of a point.

    cost: seconds of a sequence's round over those of one at k = 0. drafts: rounds with proposals,
    draft_tokens: their proposals. rounds: all rounds, which cost and count alike.
    """
    is_predicted = isinstance(cost, MidRatio)
    ends = cost.interval() if isinstance(cost, MidRatio) else interval_of(cost, seed)
    needed, share = cost.value, drafts / rounds if rounds else 0.0
    # Rounds without proposals write one token each; the others have to make up for them.
    length = 1 + (needed - 1) / share if share else float("inf")
    rate = max(0.0, length - 1) * drafts / draft_tokens if draft_tokens else float("inf")
    return BreakEven(
        tokens_per_round=needed,
        tokens_per_round_ci=ends,
        draft_acceptance_rate=rate if rate <= 1.0 else None,
        alpha=chance_for(length, k),
        is_predicted=is_predicted,
    )


def chance_for(length: float, k: int) -> float | None:
    """The chance of each proposal whose `iid_length` is `length`; None if there is none."""
    if length > k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if iid_length(middle, k) < length else (low, middle)
    return low if length > 1.0 else 0.0
