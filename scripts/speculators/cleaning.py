"""Cuts loops off texts, and finds texts that share a run of tokens with prompts to avoid.

Knows token ids only.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]

LONGEST_PERIOD = 64
REPEATS = 3  # a tail that occurs this often is a loop
LEAST = 24  # least tokens of a loop, with all its turns
OVERLAP = 13  # length of a common run that makes two texts overlap
_BASE = np.uint64(0x9E3779B97F4A7C15)


def end_of_sense(ids: Ids) -> int:
    """The number of leading tokens to keep of `ids` [T]: a tail that repeats itself is cut to its
    first turn."""
    size = len(ids)
    for period in range(1, min(LONGEST_PERIOD, size // REPEATS) + 1):
        differs = ids[period:] != ids[:-period]
        alike = int(differs[::-1].argmax()) if differs.any() else len(differs)
        looped = alike + period
        if looped >= max(REPEATS * period, LEAST):
            return size - alike
    return size


def runs_of(ids: Ids) -> npt.NDArray[np.uint64]:
    """A hash of every run of `OVERLAP` tokens in `ids` [T]: uint64 [T - 12]."""
    size = len(ids) - OVERLAP + 1
    if size <= 0:
        return np.zeros(0, np.uint64)
    mixed = ids.astype(np.uint64) + np.uint64(1)
    found = np.zeros(size, np.uint64)
    with np.errstate(over="ignore"):
        for i in range(OVERLAP):
            found = found * _BASE + mixed[i : i + size]
            found ^= found >> np.uint64(29)
    return found


class Avoided:
    """The runs of tokens in prompts that no training text may share."""

    def __init__(self, prompts: Iterable[Sequence[int]]) -> None:
        runs = [runs_of(np.asarray(p, np.int64)) for p in prompts]
        self.runs = np.unique(np.concatenate(runs)) if runs else np.zeros(0, np.uint64)

    def is_in(self, ids: Ids) -> bool:
        """True if `ids` [T] shares a run with a prompt."""
        if not len(self.runs):
            return False
        mine = runs_of(ids)
        at = np.searchsorted(self.runs, mine).clip(max=len(self.runs) - 1)
        return bool((self.runs[at] == mine).any())
