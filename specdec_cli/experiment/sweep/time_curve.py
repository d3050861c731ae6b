"""The time curve of a sweep: what a round costs at each k. It is measured in several parts, spread
over the sweep, so that a passing disturbance of the machine affects only a few of them."""

from collections.abc import Iterable, Mapping
from typing import Any

from specdec_cli.core.figures import STAGES
from specdec_cli.experiment.folders.records import CurvePart, Key, given
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.measure import units_of
from specdec_cli.experiment.statistics.factors import midmean

# The maximum number of parts of a time curve, at batch size 1 and at larger batch sizes.
_MOST_CURVE_PARTS = 16
_CURVE_PARTS_OF_BATCHES = 2


def curve_parts(job: Job, batch_size: int) -> int:
    """Return the number of parts of the time curve: at most half the number of prompt groups
    (units), but at least 1. It is 0 for servers, which do not report round times."""
    if not job.backend.is_native:
        return 0
    most = _MOST_CURVE_PARTS if batch_size == 1 else _CURVE_PARTS_OF_BATCHES
    return max(1, min(most, len(units_of(job, batch_size)) // 2))


def curve_unit(job: Job, batch_size: int, part: int) -> int:
    """Return the index of the prompt group (unit) on which a part of the time curve is measured.
    This is done just before the group itself is measured.

    The last requests of a group leave the batch half-empty, and rounds then cost more per sequence.
    Each part runs its whole group, so that such rounds are as frequent in the time curve as in the
    measured points.
    """
    return part * len(units_of(job, batch_size)) // curve_parts(job, batch_size)


def curve_point(key: Key, parts: Mapping[int, CurvePart]) -> dict[str, Any]:
    """Combine the parts of the time curve at one point into the cost of a round there.

    draft_ms_per_step: the time that the method takes per round, including `commit_ms`, divided by
        k. None at k = 0.
    distinct_experts: left out unless all parts counted experts.
    """
    total = sum(part.rounds for part in parts.values())
    rounds = max(1, total)
    stage_ms = {
        f"{stage}_ms": sum(part.stage_ms(stage) for part in parts.values()) / rounds
        for stage in STAGES
    }
    drafting = stage_ms.pop("draft_ms") + stage_ms["commit_ms"]
    experts = [p.distinct_experts for p in parts.values() if p.distinct_experts is not None]
    are_counted = bool(experts) and len(experts) == len(parts)
    costs = list(cost_by_part(parts.values()).values())
    return key.as_dict() | {
        "rounds": total,
        "draft_ms_per_step": drafting / key.k if key.k else None,
        **stage_ms,
        "round_ms": sum(part.decode_seconds for part in parts.values()) * 1e3 / rounds,
        "seconds_per_sequence_round": midmean(costs) if costs else None,
        **given(distinct_experts=sum(experts) / rounds if are_counted else None),
    }


def cost_by_part(parts: Iterable[CurvePart]) -> dict[int, float]:
    """Return how many seconds a round takes per sequence, for each part in which at least one
    prompt could run."""
    return {p.part: p.decode_seconds / p.sequence_rounds for p in parts if p.sequence_rounds}
