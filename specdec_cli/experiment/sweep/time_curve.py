"""The time curve of a sweep: what a round costs at each k, measured in parts."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any

from specdec_cli.core.stages import STAGES
from specdec_cli.experiment.generation import Job
from specdec_cli.experiment.measure import units_of
from specdec_cli.experiment.records import CurvePart, Key

# The time curve is measured in parts, spread over the sweep.
_MOST_CURVE_PARTS = 16
_CURVE_PARTS_OF_BATCHES = 2


def curve_parts(job: Job, batch_size: int) -> int:
    """In how many parts the time curve is measured: over half of the units at most."""
    most = _MOST_CURVE_PARTS if batch_size == 1 else _CURVE_PARTS_OF_BATCHES
    return max(1, min(most, len(units_of(job, batch_size)) // 2))


def curve_unit(job: Job, batch_size: int, part: int) -> int:
    """The unit whose prompts a part takes, and before which it is measured.

    A whole unit, so that its batch runs empty as often as those of the points do: a round of a
    batch that is half empty costs each of its sequences more.
    """
    return part * len(units_of(job, batch_size)) // curve_parts(job, batch_size)


def curve_point(key: Key, parts: Mapping[int, CurvePart]) -> dict[str, Any]:
    """What a round costs at one point, from the parts of the time curve."""
    total = sum(part.rounds for part in parts.values())
    rounds = max(1, total)
    stage_ms = {
        f"{stage}_ms": sum(part.stage_ms(stage) for part in parts.values()) / rounds
        for stage in STAGES
    }
    draft = stage_ms.pop("draft_ms")
    return asdict(key) | {
        "rounds": total,
        "draft_ms_per_step": draft / key.k if key.k else None,
        **stage_ms,
        "round_ms": sum(part.decode_seconds for part in parts.values()) * 1e3 / rounds,
        "seconds_per_sequence_round": seconds_per_round(parts.values()),
    }


def seconds_per_round(parts: Iterable[CurvePart]) -> float | None:
    """Of one sequence, over the parts of which a prompt could run; None without any."""
    found = [p.decode_seconds / p.sequence_rounds for p in parts if p.sequence_rounds]
    return _midmean(found) if found else None


def _midmean(values: Iterable[float]) -> float:
    """The mean without the lowest and the highest quarter: what disturbs a few says nothing of the
    others."""
    ordered = sorted(values)
    cut = len(ordered) // 4
    return fmean(ordered[cut : len(ordered) - cut])
