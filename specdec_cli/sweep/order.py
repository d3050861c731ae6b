"""Which prompts of a sweep go together, and when a part of the time curve is measured."""

from collections.abc import Iterator
from dataclasses import replace

from specdec_cli.generation import Job
from specdec_cli.sweep.plan import only

# Batches of this many refills: long enough to be full most of the time, short enough that little
# is lost when a job is killed.
_BATCHES_A_UNIT = 8
# The time curve is measured in parts, spread over the sweep.
_MOST_CURVE_PARTS = 8
_CURVE_PARTS_OF_BATCHES = 2
_CURVE_REFILLS = 4


def _curve_size(job: Job, batch_size: int) -> int:
    """Prompts of one part of the time curve: of larger batches, enough to refill them."""
    return min(len(job.prompts), batch_size if batch_size == 1 else _CURVE_REFILLS * batch_size)


def curve_parts(job: Job, batch_size: int) -> int:
    """In how many parts the time curve is measured: over half of the prompts at most."""
    most = len(job.prompts) // (2 * _curve_size(job, batch_size))
    return max(1, min(_MOST_CURVE_PARTS if batch_size == 1 else _CURVE_PARTS_OF_BATCHES, most))


def curve_part(job: Job, part: int, batch_size: int) -> Job:
    """Prompts from one place among all of them."""
    count = len(job.prompts)
    start = part * count // curve_parts(job, batch_size)
    size = _curve_size(job, batch_size)
    chosen = {job.prompts[(start + i) % count].index for i in range(size)}
    return only(job, chosen.__contains__)


def units_of(job: Job, batch_size: int) -> Iterator[Job]:
    """Prompts that go through every k before the next ones come."""
    size = 1 if batch_size == 1 else _BATCHES_A_UNIT * batch_size
    for start in range(0, len(job.prompts), size):
        yield replace(
            job,
            prompts=job.prompts[start : start + size],
            token_ids=job.token_ids[start : start + size],
        )
