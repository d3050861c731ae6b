"""The time curve of a sweep: the cost of a round at each k, measured in parts."""

from collections.abc import Iterable, Mapping
from typing import Any

from specdec_cli.core.figures import STAGES
from specdec_cli.experiment.folders.records import CurvePart, Key, given
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.measure import units_of
from specdec_cli.experiment.statistics.factors import midmean

# The maximum number of parts of a time curve, at batch size 1 and at larger batch sizes. The parts
# are spread over the sweep.
_MOST_CURVE_PARTS = 16
_CURVE_PARTS_OF_BATCHES = 2


def curve_parts(job: Job, batch_size: int) -> int:
    """The number of parts of the time curve: at most half the number of units. Servers have no
    curve, because they report no round times."""
    if not job.backend.is_native:
        return 0
    most = _MOST_CURVE_PARTS if batch_size == 1 else _CURVE_PARTS_OF_BATCHES
    return max(1, min(most, len(units_of(job, batch_size)) // 2))


def curve_unit(job: Job, batch_size: int, part: int) -> int:
    """The index of the unit whose prompts are used for a part of the time curve. The part is
    measured just before that unit.

    It is a whole unit, so that its batch drains as often as the batches of points: a round in a
    half-empty batch costs more per sequence.
    """
    return part * len(units_of(job, batch_size)) // curve_parts(job, batch_size)


def curve_point(key: Key, parts: Mapping[int, CurvePart]) -> dict[str, Any]:
    """Compute the cost of a round at one point from the parts of the time curve.

    draft_ms_per_step: the method's whole time, including `commit_ms`, divided by k.
    `distinct_experts` is included only if all parts counted experts.
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
        "draft": key.draft if key.k else None,
        "rounds": total,
        "draft_ms_per_step": drafting / key.k if key.k else None,
        **stage_ms,
        "round_ms": sum(part.decode_seconds for part in parts.values()) * 1e3 / rounds,
        "seconds_per_sequence_round": midmean(costs) if costs else None,
        **given(distinct_experts=sum(experts) / rounds if are_counted else None),
    }


def cost_by_part(parts: Iterable[CurvePart]) -> dict[int, float]:
    """The seconds per round of one sequence, for each part in which at least one prompt could
    run."""
    return {p.part: p.decode_seconds / p.sequence_rounds for p in parts if p.sequence_rounds}
