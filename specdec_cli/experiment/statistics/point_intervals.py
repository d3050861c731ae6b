"""The intervals of a point's figures, over its prompts, beside that of its speed-up."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_cli.experiment.folders.records import Sample
from specdec_cli.experiment.statistics import stats
from specdec_cli.experiment.statistics.repeats import (
    decode_seconds,
    decoded_tokens,
    rounds_of,
    usual_mean,
)


def intervals_of(samples: Mapping[int, Sample], k: int, seed: int) -> dict[str, Any]:
    """The intervals of figures of a point's metrics."""
    own = [samples[index] for index in sorted(samples)]
    seconds = list(map(decode_seconds, own))
    shares = [usual_mean(s, s.round_share) for s in own]
    verify = [usual_mean(s, s.stage_ms.get("verify", [])) for s in own]
    tokens = list(map(decoded_tokens, own))
    speed = stats.speed(tokens, seconds)
    rounds = stats.speed(tokens, list(map(rounds_of, own)))
    marginal, conditional = [], []
    for place in range(1, k + 1):
        accepted = [sum(a >= place for a in s.accepted_per_round) for s in own]
        reached = [
            sum(p >= place and a >= place - 1 for p, a in zip(*pair, strict=True))
            for pair in ((s.proposed_per_round, s.accepted_per_round) for s in own)
        ]
        drafts = [len(s.accepted_per_round) for s in own]
        marginal.append(_share_interval(accepted, drafts))
        conditional.append(_share_interval(accepted, reached))
    return {
        "tokens_per_round_ci": [1.0, 1.0] if k == 0 else stats.interval(rounds, seed),
        "decode_tokens_per_second_ci": stats.linear_interval(speed),
        "round_ms_ci": stats.linear_interval(stats.speed([1e3 * s for s in seconds], shares)),
        "verify_ms_ci": stats.linear_interval(stats.speed(verify, shares)),
        "acceptance_rate_per_pos_ci": marginal,
        "conditional_acceptance_rate_per_pos_ci": conditional,
    }


def _share_interval(accepted: Sequence[float], of: Sequence[float]) -> list[float] | None:
    found = stats.linear_interval(stats.speed(accepted, of))
    return None if found is None else [found[0], min(1.0, found[1])]
