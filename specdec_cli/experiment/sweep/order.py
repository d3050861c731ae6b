"""Which prompts of a sweep go together, and which of them a part of the time curve takes."""

from dataclasses import replace
from itertools import pairwise

from specdec_cli.experiment.generation import Job

# Batches of this many refills: long enough to be full most of the time, short enough that little
# is lost when a job is killed.
_BATCHES_A_UNIT = 8
# The time curve is measured in parts, spread over the sweep.
_MOST_CURVE_PARTS = 16
_CURVE_PARTS_OF_BATCHES = 2


def units_of(job: Job, batch_size: int) -> list[Job]:
    """Prompts that go through every k before the next ones come, in parts of even size."""
    size = 1 if batch_size == 1 else _BATCHES_A_UNIT * batch_size
    total = len(job.prompts)
    count = -(-total // size)
    bounds = [place * total // count for place in range(count + 1)]
    return [
        replace(job, prompts=job.prompts[start:stop], token_ids=job.token_ids[start:stop])
        for start, stop in pairwise(bounds)
    ]


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
