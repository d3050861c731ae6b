"""Decides whether a gain is real and, if that is inconclusive, how much more to measure."""

import math
from collections.abc import Iterable, Sequence

from specdec_cli.errors import Notice
from specdec_cli.experiment.folders.conclusions import Needed, Verdict
from specdec_cli.experiment.statistics.stats import student
from specdec_cli.text import counted

NEGLIGIBLE = 0.03  # a gain up to this is not worth a draft, so the verdict may be "none"
# If the true gain is this many standard errors from 1, four of five 95 % intervals exclude 1.
_SURE = 1.96 + 0.84
_ENOUGH = 8  # minimum prompts for an interval with enough degrees of freedom
Ends = Sequence[float] | None


def verdict_of(chosen: Ends, others: Iterable[Ends], *, is_disturbed: bool) -> Verdict:
    """Return the verdict on the gain from speculation:
    - "use" if the chosen point is significantly faster than plain decoding.
    - "none" if the intervals of all points with proposals exclude gains above `NEGLIGIBLE`.
    - "inconclusive" otherwise, and always if the times were disturbed.

    chosen: the interval of the chosen point's speed-up; None if that point is plain decoding or has
    no interval.
    others: the intervals of all points with proposals.
    """
    if is_disturbed:
        return "inconclusive"
    if chosen is not None and chosen[0] > 1.0:
        return "use"
    known = list(others)
    is_none = known and all(ends is not None and ends[1] <= 1 + NEGLIGIBLE for ends in known)
    return "none" if is_none else "inconclusive"


def claimed(value: float, ends: Ends, reach: float) -> Ends:
    """Return the interval of a gain with its lower end moved outwards, to correct for the number of
    gains that were tried.

    reach: `stats.joint_reach` of all gains that were tried.
    """
    return None if ends is None else [value * (ends[0] / value) ** reach, ends[1]]


def judged(
    chosen: Ends,
    others: Sequence[Ends],
    leader: tuple[float, Ends, int, float, int] | None,
    disturbed: Sequence[Notice],
) -> tuple[Verdict, Needed | None, str]:
    """Return the verdict, the measurement that would settle an inconclusive one, and a text that
    explains both.

    The text is meant to be appended to the reason of a recommendation. The measurement is None if
    none is needed, or if there is no leader.

    chosen, others: as for `verdict_of`.
    leader: the arguments of `needed_for` for the fastest point with proposals; None without such a
    point.
    disturbed: warnings that something disturbed the times.
    """
    is_disturbed = bool(disturbed)
    verdict = verdict_of(chosen, others, is_disturbed=is_disturbed)
    codes = ", ".join(dict.fromkeys(one.code for one in disturbed))
    told = f"; not called significant, since times were disturbed ({codes})" if codes else ""
    if verdict != "inconclusive" or leader is None:
        return verdict, None, told
    needed = needed_for(*leader, is_disturbed=is_disturbed)
    told += needed_in_words(needed, leader[2], is_disturbed=is_disturbed)
    return verdict, needed, told


def needed_for(
    gain: float, ends: Ends, count: int, seconds: float, batch_size: int, *, is_disturbed: bool
) -> Needed:
    """Estimate how many prompts would settle, with a chance of four in five, whether a gain is
    real. The measured gain is assumed to be the true one; a smaller one needs more prompts.

    The question is settled if the interval shows that the gain is above 1, or that it is at most
    negligible. Further prompts are assumed to vary as much as the measured ones. If too few prompts
    were measured to know how much they vary, the result is the number needed to estimate that. If
    the interval excludes 1 and is in doubt only because the times were disturbed, the result is the
    same number of prompts, to be measured again.

    ends: the gain's interval over the `count` prompts, which took `seconds` to measure.
    """
    is_unknown = ends is None or count < _ENOUGH
    if ends is None or is_unknown:
        prompts = max(count + 1, _ENOUGH * batch_size)
    elif is_disturbed and not ends[0] <= 1.0 <= ends[1]:
        prompts = count
    else:
        middle = math.log(gain)
        error = math.log(ends[1] / ends[0]) / 2 / student(count - 1)
        distance = max(middle, math.log1p(NEGLIGIBLE) - middle)
        more = math.ceil(count * (_SURE * error / distance) ** 2)
        prompts = max(more, count if is_disturbed else count + 1)
    minutes = seconds / 60 * prompts / count if seconds and count else None
    return Needed(prompts=prompts, minutes=minutes, at_least=is_unknown)


def needed_in_words(needed: Needed, count: int, *, is_disturbed: bool) -> str:
    """Describe the needed measurement, such as `; about 60 prompts like these would decide, in
    about 4 minutes, if the gain is what it seems`. count: the number of measured prompts."""
    if needed.at_least:
        told = f"{counted(count, 'prompt')} cannot show how many are enough: measure at least"
        return f"; {told} {needed.prompts:,}"
    which = f"about {rounded_up(needed.prompts):,} prompts like these"
    provided = ", if the gain is what it seems"
    if needed.prompts == count:
        which, provided = "the same prompts again", ""
    time = ""
    if needed.minutes is not None:
        time = f", in {minutes_in_words(needed.minutes, is_quiet=is_disturbed)}"
    return f"; {which} would decide{time}{provided}"


def minutes_in_words(minutes: float, *, is_quiet: bool) -> str:
    """Describe a duration, such as `a minute` or, if the machine must be idle for that time,
    `about 12 quiet minutes`."""
    count, quiet = rounded_up(math.ceil(minutes)), "quiet " if is_quiet else ""
    return f"about {count:,} {quiet}minutes" if count > 1 else f"a {quiet}minute"


def rounded_up(count: int) -> int:
    """Round a count up to two significant digits."""
    unit = int(10 ** max(0, len(str(count)) - 2))
    return -(-count // unit) * unit
