"""The repeats of one prompt at one point, and which of them something disturbed."""

from collections.abc import Sequence
from statistics import median

OUTLYING = 1.5  # times its fellows


def usual_repeats(seconds: Sequence[float]) -> list[int]:
    """The places of the repeats that did not take far longer than their fellows.

    Repeats do the same work, and a disturbance only adds time. So of two that disagree the faster
    one counts; of more the median tells what is usual.
    """
    usual = median(seconds) if len(seconds) > 2 else min(seconds, default=0.0)
    return [place for place, value in enumerate(seconds) if value <= OUTLYING * usual]
